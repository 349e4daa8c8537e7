"""Runs that meet on one dataset: started at random moments, killed, or stopped and woken later.

A `Meeting` has a web site whose pictures are others at each request and vanish one by one, a table
of them that grows, a dataset of images and one of latents, and plays rounds: two or three commands
at once, then, alone, what a user would do. After that both datasets are sound, every row is in them
once, and every picture that was packed and has vanished since is there still.

`house/test_meetings.py` plays a few rounds, `tools/chaos --meetings` any number.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.kit.damaged import check, named
from tests.kit.meeting_processes import ALIKE
from tests.kit.packs import is_running, jpeg, tape_of, write_table
from tests.kit.paths import ROOT
from tests.kit.webserver import Connection, Request, WebServer, ok, status
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import rejects_in
from wdsprep.dataset.stored_dataset import read_manifest, refresh_manifest
from wdsprep.dataset.tar.read import read_samples
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes

SIZES = ((40, 48), (72, 80))
PICTURES = 12  # of each row there may be so many
ROWS = 24
LATEST_S = 0.6  # how late a command may start, or be struck after that
PACK = (
    *("--allow-private-hosts", "--retries", "0", "--ignore-robots", "--check", "header"),
    *("--buckets", "32,64", "--samples-per-shard", "8", "--workers", "1"),
)
SIZES_OF_SHARDS = ("15KB", "40KB")  # the one rolls over, and an --overwrite may change it
ENCODE = ("--resolution", "32", "--model", "tiny", "--device", "cpu", "--runner", "local")


# --- processes


class Stage:
    """Starts commands in processes of their own, and strikes them. Latents that two of them make
    of one shard differ, unless they are to be `alike`."""

    def __init__(self, *, alike: bool = False) -> None:
        self._own = {ALIKE: "1"} if alike else {}
        words = [sys.executable, "-m", "tests.kit.meeting_processes"]
        self._server = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self._answer() == "ready"

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait(60)
        self._server.stdout.close()

    def _ask(self, what: object) -> int:
        print(json.dumps(what), file=self._server.stdin, flush=True)
        return int(self._answer())

    def _answer(self) -> str:
        return self._server.stdout.readline().strip()

    def start(self, arguments: Sequence[object], log: Path) -> int:
        aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        return self._ask([[str(a) for a in arguments], str(log), aws | self._own])

    def end(self, process: int) -> int:
        return self._ask(process)

    def run(self, arguments: Sequence[object], log: Path) -> int:
        return self.end(self.start(arguments, log))


# --- the site


@cache
def picture(number: int, kind: int) -> bytes:
    return jpeg(1000 * kind + number, SIZES[number % 2])


class Fickle:
    """A site: each time another picture, sometimes none, and none any more once it has vanished."""

    def __init__(self, chance: random.Random) -> None:
        self._chance, self._lock = chance, threading.Lock()
        self.vanished: set[int] = set()

    def __call__(self, connection: Connection, request: Request) -> bool:
        number = int(request.path.rpartition("/")[2])
        with self._lock:
            fails, kind = self._chance.random() < 0.15, self._chance.randrange(PICTURES)
            pause_s = self._chance.random() * 0.02
        time.sleep(pause_s)
        if number in self.vanished:
            return status(404)(connection, request)
        return (status(503) if fails else ok(picture(number, kind)))(connection, request)


# --- rounds


@dataclass
class Round:
    """What was done in a round, and what was wrong after it."""

    commands: list[str] = field(default_factory=list)
    kills: int = 0
    stops: int = 0
    findings: list[str] = field(default_factory=list)


class Meeting:
    """`place` has the two datasets: a folder or a prefix on S3."""

    def __init__(self, stage: Stage, root: Path, place: str, seed: int) -> None:
        self._stage, self._root = stage, root
        self._chance = random.Random(seed)
        self._source, self._images, self._latents = root / "in", f"{place}/images", f"{place}/lat"
        self._site = Fickle(random.Random(seed))
        self._rows = 0
        self._kept: set[int] = set()
        self._removed: set[int] = set()
        self._log = root / "log"

    @contextlib.contextmanager
    def begun(self) -> Iterator["Meeting"]:
        with WebServer(self._site) as self._server:
            self._grow()
            yield self

    def _grow(self) -> None:
        first, self._rows = self._rows, self._rows + ROWS
        rows = [
            {"url": f"{self._server.url}/{n}", "caption": f"row {n}"}
            for n in range(first, self._rows)
        ]
        write_table(self._source / f"{first:04d}.parquet", rows, row_group_size=8)

    # What is drawn, and what is done with it.

    def play(self) -> Round:
        """One round."""
        self._log.write_bytes(b"")
        done = Round()
        left = self._rows - len(self._site.vanished | self._removed)
        if self._chance.random() < 0.1 or left < ROWS // 2:
            self._grow()
        spoiled = self._spoil() if self._chance.random() < 0.3 else set()
        drawn = [self._draw() for _ in range(self._chance.choice((2, 2, 3)))]
        done.commands = [name for name, _ in drawn]
        if "overwrite" in done.commands:
            self._kept.clear()
        self._kept -= spoiled
        self._meet([arguments for _, arguments in drawn], done)
        self._quieten(done)
        if not done.findings:
            self._look(done)
        vanishing = sorted(self._kept - self._site.vanished)
        self._site.vanished |= set(self._chance.sample(vanishing, min(1, len(vanishing))))
        return done

    def _draw(self) -> tuple[str, list[str]]:
        name = self._chance.choice(
            (
                *("pack", "append", "overwrite", "retry", "repair", "verify"),
                *("encode", "encode again", "remove"),
            )
        )
        options = {"append": "--append", "overwrite": "--overwrite", "retry": "--retry-rejected"}
        if name in ("pack", *options):
            size = self._chance.choice(SIZES_OF_SHARDS) if name == "overwrite" else self._size()
            return name, self._pack(size, *filter(None, [options.get(name)]))
        if name == "repair":
            return name, self._chance.choice(self._repairs())
        if name == "remove":
            self._removed |= set(self._chance.sample(range(self._rows), 2))
            self._kept -= self._removed
            return name, self._remove()
        if name == "verify":
            return name, ["verify", self._images, self._latents, "--workers", "1"]
        return name, self._encode("--overwrite" if name == "encode again" else "--redo-changed")

    def _size(self) -> str:
        manifest = read_manifest(open_store(self._images))
        nbytes = manifest.settings["max_shard_size"] if manifest else 15_000
        return SIZES_OF_SHARDS[nbytes > 15_000]

    def _pack(self, size: str, *options: str) -> list[str]:
        return ["pack", str(self._source), self._images, *PACK, "--max-shard-size", size, *options]

    def _encode(self, *options: str) -> list[str]:
        batch = str(self._chance.choice((2, 3, 8)))
        return ["encode", self._images, self._latents, *ENCODE, "--batch-size", batch, *options]

    def _remove(self) -> list[str]:
        """All that was ever asked for, so that it is the same command."""
        urls = self._root / "urls.txt"
        urls.write_text("".join(f"{self._server.url}/{row}\n" for row in sorted(self._removed)))
        return ["remove", self._images, self._latents, "--urls", str(urls), "--yes"]

    def _repairs(self) -> list[list[str]]:
        """The repair of the images, and that of the latents."""
        return [
            ["repair", place, "--yes", "--workers", "1"] for place in (self._images, self._latents)
        ]

    def _spoil(self) -> set[int]:
        """Harm a file of the images; the rows that this may cost."""
        store = open_store(self._images)
        names = [e.name for e in store.list() if e.name.endswith((".tar", ".idx", ".jsonl"))]
        if not names:
            return set()
        name = self._chance.choice(names)
        data = bytearray(store.read(name))
        if name.endswith(".tar"):
            unit = name.partition("/")[2][:-4].partition("_")[0]
            cost = [n for n in names if n.partition("/")[2].startswith((f"{unit}.tar", f"{unit}_"))]
            rows = {row for tar in cost if tar.endswith(".tar") for row in self._packed(tar)}
            data[self._chance.randrange(len(data))] ^= 1
            write_bytes(store, name, bytes(data))
            return rows
        if name.startswith("inputs/1"):
            return set()  # of a retry nothing else tells what it is of
        store.delete(name)
        return set()

    def _meet(self, commands: Sequence[list[str]], done: Round) -> None:
        """Start them one after the other, strike some, wake those that sleep, wait for all."""
        asleep, processes = [], []
        for arguments in commands:
            time.sleep(self._chance.random() * LATEST_S)
            processes.append(self._stage.start(arguments, self._log))
            struck = self._chance.choice([None, None, signal.SIGKILL, signal.SIGSTOP])
            if struck is None:
                continue
            time.sleep(self._chance.random() * LATEST_S)
            if is_running(processes[-1]):
                os.kill(processes[-1], struck)
                done.kills += struck is signal.SIGKILL
                done.stops += struck is signal.SIGSTOP
                asleep += [processes[-1]] * (struck is signal.SIGSTOP)
        deadline = time.monotonic() + self._chance.random() * 4
        while time.monotonic() < deadline and any(
            is_running(process) for process in processes if process not in asleep
        ):
            time.sleep(0.02)
        for process in asleep:
            dies = self._chance.random() < 0.2
            os.kill(process, signal.SIGKILL if dies else signal.SIGCONT)
            done.kills += dies
        codes = [self._stage.end(process) for process in processes]
        said = self._log.read_text(errors="replace")
        if "a bug:" in said or "Traceback" in said or set(codes) - {0, 1, 2, 3, -signal.SIGKILL}:
            done.findings.append(f"{done.commands} ended with {codes}: {said}")

    # What must be true afterwards.

    def _quieten(self, done: Round) -> None:
        """What a user would do now: repair what is damaged, pack and encode what is missing."""
        remove = [self._remove()] if self._removed else []
        # A removal fails where it meets damage, or there is nothing yet; a repair leaves one alone.
        for arguments in [*remove, *self._repairs(), *remove] if remove else []:
            self._stage.run(arguments, self._log)
        images, latents = self._repairs()
        for arguments in (
            images,
            self._pack(self._size(), "--append"),
            self._encode("--redo-changed"),
            latents,
            self._encode("--redo-changed"),
            *remove,
        ):
            self._log.write_bytes(b"")
            code = self._stage.run(arguments, self._log)
            is_new = arguments[0] == "repair" and code == 1  # nothing has been made yet
            if code and not is_new:
                said = self._log.read_text(errors="replace")
                done.findings.append(f"{' '.join(arguments)} ended with {code}: {said}")

    def _look(self, done: Round) -> None:
        found = check(self._images, self._latents)
        done.findings += [f"{named(f)}: {f.what}" for f in (*found.findings, *found.notes)]
        store = open_store(self._images)
        manifest = read_manifest(store)
        assert manifest is not None
        if refresh_manifest(store, manifest).receipts != manifest.receipts:
            done.findings.append("the manifest is not what the receipts say")
        rows: Counter[int] = Counter()
        for shard in manifest.shards:
            rows.update(self._packed(shard.name))
        packed = set(rows)
        for receipt in manifest.receipts:
            for reject in rejects_in(store, receipt.unit):
                if reject.source and reject.code is not Code.REMOVED:
                    rows[self._row(reject.source)] += 1
        lost = manifest.rejects.get("record_lost", 0) + manifest.rejects.get("removed", 0)
        twice = sorted(row for row, count in rows.items() if count > 1)
        missing = sorted(set(range(self._rows)) - set(rows))
        if twice or len(missing) != lost:
            done.findings.append(
                f"rows {missing} are missing where {lost} may be, and {twice} are there twice; "
                f"{sorted(self._removed)} were removed"
            )
        if self._removed & packed:
            done.findings.append(f"removed, and there again: {sorted(self._removed & packed)}")
        if self._kept - packed:
            done.findings.append(f"packed once, vanished, and lost: {sorted(self._kept - packed)}")
        self._kept |= packed

    def _packed(self, name: str) -> Iterator[int]:
        store = open_store(self._images)
        with contextlib.suppress(Exception):  # a shard that was spoiled before
            for sample in read_samples(tape_of(store.read(name)), name):
                yield self._row(json.loads(sample.fields["json"])["source"])

    @staticmethod
    def _row(source: str) -> int:
        table, _, number = source.partition("#")
        return int(Path(table).stem) + int(number)
