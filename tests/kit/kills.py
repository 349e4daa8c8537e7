"""Commands that are killed at random moments, again and again, and resumed until they are through.

Each of `JOBS` is a command on small datasets of pairs. It is run once undisturbed, whose files and
duration are kept. Then it is run in a place of its own, where SIGKILL comes at any moment of it;
the same command goes on, until it ends. After that each file has the bytes of the undisturbed run,
and there are no others. One dataset after the other, until there were as many kills as are asked
for.

`house/test_meetings.py` lets each job be killed twice, `tools/chaos --kills` any number.

`Cut` ends what is done in this process at a change of files that a test chooses.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.kit.encodes import encode_here
from tests.kit.meetings import SIZES, Stage
from tests.kit.packs import differences, is_running, jpeg, pack, write_files
from tests.kit.scores import score_here
from tests.kit.scoring_models import small
from wdsprep.dataset.file_names import EDITION
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes
from wdsprep.store.local import LocalStore

PICTURES, SLICE = 48, 6
MARGIN = 1.2
"""How much longer than the undisturbed run a kill may wait, so that some come to its end."""
SPARED = 0.3
"""How many of the runs are let alone: on S3 one waits for the hold of a killed one to run out."""
TOY = ("--model", "tiny", "--device", "cpu", "--runner", "local", "--batch-size", "4")
Files = dict[str, bytes]

JOBS = {
    "pack pairs": "pack {root}/in {out}/images --role source={root}/before"
    " --buckets 32,64 --samples-per-shard 6 --workers 2",
    "remove": "remove {out}/images {out}/latents {out}/scores --keys {keys} --yes",
    "select": "select {source}/images {source}/latents {source}/scores {out}/{{split}}/{{name}}"
    " --split train=0.7,val=0.2 --samples-per-shard 8",
    "export": "export {source}/latents {out}/mds --to mds",
    "export pairs": "export {source}/latents {out}/edits --to automodel",
    "encode": "encode {source}/images {out}/latents-{{resolution}} --resolution 32,64",
    "encode pairs": "encode {source}/images {out}/pairs --resolution 32 --roles target,source",
    "score": "score {source}/images {out}/scores --language --model {model}"
    " --embedding fp16 --device cpu --runner local",
    "score captions": "score {source}/images {out}/scores --language --runner local",
    "text apart": "encode {source}/images {out}/latents --text-out {out}/text --resolution 32",
}
"""The words of each command; `TOY` is added to those of `encode`."""
CHANGED = {"remove": ("images", "latents", "scores")}
"""Datasets that a job changes, and so is given copies of."""


@dataclass
class KilledRuns:
    """What a job has gone through: kills, runs that ended, and what was wrong after these."""

    kills: int = 0
    complete: int = 0
    findings: list[str] = field(default_factory=list)


class Kills:
    """`place` is where jobs work: a folder, or a prefix on S3."""

    def __init__(self, stage: Stage, root: Path, place: str, seed: int) -> None:
        self._stage, self._root, self._place = stage, root, place
        self._chance = random.Random(seed)
        self._log = root / "log"
        self._made = 0
        self._took_s = 0.0
        self._prepare()

    def _prepare(self) -> None:
        """Make the datasets that all jobs begin with, here and at the place."""
        files: dict[str, bytes | str] = {}
        for number in range(PICTURES):
            files[f"{number:04d}.jpg"] = jpeg(number, SIZES[number % 2])
            files[f"{number:04d}.txt"] = f"picture {number}"
        before = {name: jpeg(99) for name in files if name.endswith("5.jpg")}
        write_files(self._root / "before", {**files, **before, "0007.jpg": b"<html>"})
        options = ("--samples-per-shard", str(SLICE), "--role", f"source={self._root}/before")
        source = self._root / "source"
        images = pack(write_files(self._root / "in", files), source / "images", *options)
        encode_here(images, source / "latents", resolution=32, roles="target,source", flip=True)
        score_here(images, source / "scores", language=True)
        small("clip", self._root / "clip")
        self._source = f"{self._place}/source"
        if open_store(self._source).root != source:
            _write_all(self._source, read_all(str(source)))
        keys = (f"{slice_:06d}{number:06d}" for slice_ in range(0, 8, 2) for number in (1, 4))
        self._keys = ",".join(keys)

    def play(self, name: str, kills: int) -> Iterator[KilledRuns]:
        """Kill a job as often, and yield after each dataset what there was so far."""
        done, undisturbed = KilledRuns(), self._fresh(name)
        began = time.monotonic()
        code = self._stage.run(self._words(name, undisturbed), self._log)
        self._took_s = time.monotonic() - began
        assert code == 0, self._log.read_text()
        wanted = read_all(undisturbed)
        while done.kills < kills and not done.findings:
            out = self._fresh(name)
            code = self._through(self._words(name, out), done)
            if code:
                said = self._log.read_text(errors="replace")
                done.findings.append(f"{name} ended with {code} after a kill: {said}")
            else:
                done.complete += 1
                done.findings += differences(read_all(out), wanted)
                done.findings += (f"{path} is left" for path in leftovers(out))
            yield done

    def _through(self, words: Sequence[str], done: KilledRuns) -> int:
        """Run a command until it is not killed; how it ended."""
        whole = True
        while True:
            self._log.write_bytes(b"")
            began = time.monotonic()
            process = self._stage.start(words, self._log)
            struck_at = began + self._chance.random() * self._took_s * MARGIN
            if self._chance.random() >= SPARED:
                while time.monotonic() < struck_at and is_running(process):
                    time.sleep(0.002)
                if is_running(process):
                    os.kill(process, signal.SIGKILL)
            code = self._stage.end(process)
            if code != -signal.SIGKILL:
                if whole:  # as long as a whole run takes on a machine that has less to do now
                    self._took_s = min(self._took_s, time.monotonic() - began)
                return code
            done.kills += 1
            whole = False

    def _fresh(self, name: str) -> str:
        """Return another place, with copies of what the job of this name changes."""
        self._made += 1
        out = f"{self._place}/{self._made:04d}"
        for dataset in CHANGED.get(name, ()):
            _write_all(f"{out}/{dataset}", read_all(str(self._root / "source" / dataset)))
        return out

    def _words(self, name: str, out: str) -> list[str]:
        named = {"out": out, "source": self._source, "keys": self._keys}
        named |= {"model": str(self._root / "clip"), "root": str(self._root)}
        words = [word.format(**named) for word in JOBS[name].split()]
        return words + [*TOY] * (words[0] == "encode")


def read_all(place: str) -> Files:
    """Return what lies at a place, but for what each dataset is known by."""
    store = open_store(place)
    names = (entry.name for entry in store.list())
    return {name: store.read(name) for name in names if name.rpartition("/")[2] != EDITION}


def _write_all(place: str, files: Files) -> None:
    store = open_store(place)
    for name, data in files.items():
        write_bytes(store, name, data)


def leftovers(place: str) -> Iterator[Path]:
    """Yield the temporary files that are left in a folder."""
    root = open_store(place).root
    if root is not None:
        yield from root.rglob("*.tmp*")


class CutError(BaseException):
    """As a kill at this moment: nothing is caught, and nothing is done after it."""


class Cut:
    """Lets so many changes of files happen, and no more."""

    def __init__(self, left: int) -> None:
        self.left = self.before = left

    def count(self) -> None:
        if self.left <= 0:
            raise CutError
        self.left -= 1

    def __enter__(self) -> "Cut":
        cut, write_file, delete_file = self, LocalStore.write, LocalStore.delete

        @contextlib.contextmanager
        def write(store: LocalStore, name: str, /, *, exclusive: bool = False) -> Iterator[Any]:
            with write_file(store, name, exclusive=exclusive) as sink:
                yield sink
                cut.count()

        def delete(store: LocalStore, name: str, /) -> None:
            cut.count()
            delete_file(store, name)

        self._patches = [patch.object(LocalStore, "write", write)]
        self._patches.append(patch.object(LocalStore, "delete", delete))
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._patches:
            each.stop()
