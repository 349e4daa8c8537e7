"""Small sources and packed datasets for tests: made, packed by the real command, read back."""

import contextlib
import gc
import io
import json
import os
import random
import re
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import Generator, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3
from PIL import Image

from wdsprep.cli import cli
from wdsprep.dataset.file_names import table_name, tar_of
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.sample_table import TableWriter, read_table, table_columns
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.tar.members import Tape
from wdsprep.dataset.tar.read import ChunkTape, file_tape, index_tar
from wdsprep.dataset.tar.write import TarWriter
from wdsprep.packing.slices import survey_source
from wdsprep.runners.base import Event, Quarantined, Unit, Work
from wdsprep.runners.make_runner import InProcessRunner
from wdsprep.sources.base import Columns, Source
from wdsprep.sources.recognise import recognise
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes
from wdsprep.store.schemes import is_keyed

SCRIPT = Path(sys.executable).with_name("wdsprep")
BUCKETS = ("--buckets", "32,64")
SIZES = ((40, 48), (96, 72), (36, 100), (70, 64))


@cache
def jpeg(number: int = 0, size: tuple[int, int] = (0, 0), kind: str = "JPEG") -> bytes:
    """An image that no other number gives; without a size, of one that its number decides."""
    width, height = size if size[0] else SIZES[number % len(SIZES)]
    noise = random.Random(number).randbytes(width * height * 3)
    out = io.BytesIO()
    Image.frombytes("RGB", (width, height), noise).save(out, kind)
    return out.getvalue()


def write_tar(samples: Iterable[tuple[str, Any]]) -> tuple[bytes, TarWriter]:
    """A tar of keys and their members, and its writer, which knows the digest and the index."""
    out = io.BytesIO()
    with TarWriter(out) as tar:
        for key, members in samples:
            tar.add(key, dict(members).items())
        tar.finish()
    return out.getvalue(), tar


def with_text(tar: bytes, old: str, new: str) -> bytes:
    """A tar of samples with another text in place of one, in names of members and their content."""
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        for name, file in ((member.name, opened.extractfile(member)) for member in opened):
            key, field = name.partition(".")[0], name.replace(old, new).partition(".")[2]
            data = file.read() if file else b""
            samples.setdefault(key, {})[field] = data.replace(old.encode(), new.encode())
    return write_tar(samples.items())[0]


def write_files(root: Path, files: dict[str, bytes | str]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return root


def photos(root: Path, count: int, *, first: int = 0) -> Path:
    """A folder of images with captions, and a json for some."""
    files: dict[str, bytes | str] = {}
    for number in range(first, first + count):
        stem = f"{number % 3}/photo-{number:05d}"
        files[f"{stem}.jpg"] = jpeg(number)
        files[f"{stem}.txt"] = f"photo {number} of a noise\n"
        if number % 4 == 0:
            files[f"{stem}.json"] = json.dumps({"aesthetic": number / 10, "number": number})
    return write_files(root, files)


def touch(root: Path) -> None:
    """Give every file there a date of now."""
    for path in [root, *root.rglob("*")]:
        os.utime(path)


def upload(root: Path, url: str) -> None:
    store = open_store(url)
    for path in sorted(root.rglob("*")):
        if path.is_file():
            write_bytes(store, str(path.relative_to(root)), path.read_bytes())


def tar_bytes(
    members: Iterable[tuple[str, bytes]], form: int = tarfile.DEFAULT_FORMAT, **facts: object
) -> bytes:
    """A tar of Python's, whose members have these facts, such as `mtime`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for fact, value in facts.items():
                setattr(info, fact, value)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


# --- reading a source without packing it


def tape_of(data: bytes) -> Tape:
    """What reads a tar by offsets, over its bytes as they come from a stream."""
    return ChunkTape(partial(io.BytesIO(data).read, 5_000)).at


def source_of(url: Path | str, /, *, rows: int = 100, **columns: Any) -> Source:
    return recognise(str(url), columns=Columns(**columns), rows_per_item=rows)


def rows_of(url: Path | str, /, **options: Any) -> list[Sample | Reject]:
    seen = survey_source(source_of(url, **options), 0, 1, lambda _count: None)
    return [row for item in seen.items() for row in seen.source.read(item)]


def by_source(url: Path | str, **options: Any) -> dict[str, Sample | Reject]:
    rows = rows_of(url, **options)
    named = {row.source: row for row in rows}
    assert len(named) == len(rows)
    return named


READING = """
import re, sys
from pathlib import Path
import pyarrow.parquet
from wdsprep.sources.base import Columns
from wdsprep.sources.recognise import recognise
def peak():  # getrusage knows of the parent's memory too
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) >> 10
source = recognise(sys.argv[1], columns=Columns(), rows_per_item=10_000)
before = peak()
for item in source.items():
    for row in source.read(item):
        pass
print(peak() - before)
"""


def peak_of_reading(url: Path | str) -> int:
    """By how many MB the memory of a process grows that reads all rows of a source."""
    words = [sys.executable, "-c", READING, str(url)]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


# --- packing


def once(*words: str) -> list[str]:
    """A command line on which of what is given twice only the last stands, so that a test may say
    otherwise than its kit."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([word])
        else:
            found[-1].append(word)
    name = [option[0].partition("=")[0] for option in found]
    last = [option for n, option in enumerate(found) if name[n] not in name[n + 1 :]]
    return [word for option in last for word in option]


class Loud(InProcessRunner):
    """In this process, where a unit that fails is a bug."""

    def run(self, work: Work, units: Iterable[Unit]) -> Generator[Event, None, None]:
        for event in super().run(work, units):
            assert not isinstance(event, Quarantined), event.trace
            yield event


@contextlib.contextmanager
def packing_here() -> Iterator[None]:
    """No worker processes, which take long to start."""
    with patch("wdsprep.packing.pack.make_runner", lambda *_args, **_options: Loud(1)):
        yield


def pack(source: Path | str, images: Path | str, *options: str, workers: int = 0) -> Path:
    """The command in this process; errors are raised. Without `workers` there are no others."""
    words = once("--workers", str(workers or 1), *BUCKETS, *options)
    with contextlib.nullcontext() if workers else packing_here():
        cli.main(
            ["pack", str(source), str(images), *words], prog_name="wdsprep", standalone_mode=False
        )
    return Path(images)


def command(source: Path | str, images: Path | str, *options: str) -> list[str]:
    return [str(SCRIPT), "pack", str(source), str(images), *once(*BUCKETS, *options)]


def run(*arguments: Path | str, **options: Any) -> "subprocess.CompletedProcess[str]":
    words = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, **options)


def run_pack(
    source: Path | str, images: Path | str, *options: str
) -> "subprocess.CompletedProcess[str]":
    return run(*command(source, images, *options)[1:])


def children(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def wait_gone(pids: Iterable[int], timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        while is_running(pid):
            assert time.monotonic() < deadline, f"process {pid} lives on"
            time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is more than its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return False


# --- looking at what came of it


def tree(root: Path | str) -> dict[str, bytes]:
    """Every file of a dataset, hidden ones too."""
    if is_keyed(str(root)):
        store = open_store(str(root))
        return {entry.name: store.read(entry.name) for entry in store.list()}
    paths = (path for path in Path(root).rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def differences(there: dict[str, bytes], wanted: dict[str, bytes]) -> Iterator[str]:
    """Yield what is missing of files, is too much, or has other bytes."""
    for name in sorted(wanted.keys() | there.keys()):
        if name not in there:
            yield f"{name} is missing"
        elif name not in wanted:
            yield f"{name} is too much"
        elif wanted[name] != there[name]:
            yield f"{name} has other bytes"


def tars(root: Path | str) -> dict[str, bytes]:
    return {name: data for name, data in tree(root).items() if name.endswith((".tar", ".idx"))}


def temporaries(root: Path) -> list[str]:
    return [name for name in tree(root) if name.endswith(".tmp")]


def manifest_of(root: Path) -> Manifest:
    return Manifest.from_bytes((root / "wdsprep.json").read_bytes(), "manifest")


def samples_of(root: Path) -> list[dict[str, Any]]:
    """All samples, as plain webdataset reads them from the tars the manifest names."""
    found = read_by_webdataset([root / shard.name for shard in manifest_of(root).shards])
    for sample in found:
        sample["json"] = json.loads(sample["json"])
        sample["txt"] = sample["txt"].decode()
    return found


def read_by_webdataset(tars: list[Path], *, decoded: bool = False) -> list[dict[str, Any]]:
    import webdataset as wds

    if not tars:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its files open
        samples = wds.WebDataset([*map(str, tars)], shardshuffle=False)
        found = list(samples.decode() if decoded else samples)
        gc.collect()
    return found


def decoded(tar: Path) -> list[dict[str, Any]]:
    """The samples of one tar, as plain webdataset decodes them."""
    return read_by_webdataset([tar], decoded=True)


def rejects_of(root: Path) -> list[dict[str, Any]]:
    files = sorted((root / "rejects").rglob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


def outcome(root: Path) -> dict[str, str]:
    """What became of each input by its source: a reject's code, or `packed`."""
    found: dict[str, str] = {}
    for sample in samples_of(root):
        assert found.setdefault(sample["json"]["source"], "packed") == "packed"
    for reject in rejects_of(root):
        assert reject["source"] not in found, "an input came out twice"
        found[reject["source"]] = reject["code"]
    return found


TWENTY = ("--samples-per-shard", "20")


def check_tables(root: Path) -> None:
    """Each shard has its table: of its samples in their order, and as its receipt says."""
    manifest = manifest_of(root)
    stated = {name: digest for r in manifest.receipts for name, digest in r.files.items()}
    tables = [table_name(shard.name) for shard in manifest.shards]
    assert {path.relative_to(root).as_posix() for path in root.rglob("*.parquet")} == {*tables}
    columns = table_columns(manifest.dataset, manifest.settings)
    for name in tables:
        data = (root / name).read_bytes()
        assert stated[name] == blake3(data).hexdigest()
        table = read_table(data, columns, what=name)
        rows = iter(table.to_pylist())
        writer = TableWriter(columns)
        with tarfile.open(root / tar_of(name)) as tar:
            for member in tar:
                key, _, field = member.name.partition(".")
                if field == "json" and (file := tar.extractfile(member)):
                    row = {n: value for n, value in next(rows).items() if n == "row"}
                    writer.add(key, {**json.loads(file.read()), **row})
        assert table == read_table(writer.finish(), columns, what=name)


def check_dataset(root: Path) -> None:
    """What holds for every dataset, whatever it was made of."""
    manifest = manifest_of(root)
    keys: list[str] = []
    for shard in manifest.shards:
        path = root / shard.name
        data = path.read_bytes()
        assert (shard.nbytes, shard.digest) == (len(data), blake3(data).hexdigest())
        assert shard.samples > 0
        with file_tape(path) as tape:
            assert index_tar(tape, shard.name) == Path(f"{path}.idx").read_bytes()
    check_tables(root)
    samples = samples_of(root)
    for sample in samples:
        keys.append(sample["__key__"])
        assert sample["json"]["key"] == sample["__key__"]
        assert sample["json"]["caption"] == sample["txt"]
    assert len(set(keys)) == len(keys) == sum(shard.samples for shard in manifest.shards)
    assert all(re.fullmatch(r"\d{12}", key) for key in keys)
    for bucket in manifest.settings["buckets"]:
        of_bucket = [s["__key__"] for s in samples if s["json"]["bucket"] == bucket]
        assert of_bucket == sorted(of_bucket)
    rejects = rejects_of(root)
    assert not {reject["key"] for reject in rejects} & set(keys)
    assert len(rejects) == sum(manifest.rejects.values())
    assert sum(receipt.inputs for receipt in manifest.receipts) == len(keys) + len(rejects)
    names = {shard.name + end for shard in manifest.shards for end in ("", ".idx")}
    names |= {table_name(shard.name) for shard in manifest.shards}
    names |= {
        f"{kind}/{receipt.unit}.json{'l' * (kind != 'receipts')}"
        for receipt in manifest.receipts
        for kind in ("receipts", "rejects", "inputs")
    }
    assert set(tree(root)) == {*names, "wdsprep.json"}


def sample(url: Path, name: str, **options: Any) -> Sample:
    found = by_source(url, **options)[name]
    assert isinstance(found, Sample), found
    return found


def codes(url: Path, **options: Any) -> dict[str, str]:
    rows = by_source(url, **options).items()
    return {name: row.code.value for name, row in rows if isinstance(row, Reject)}


def write_table(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path
