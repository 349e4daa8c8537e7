"""Mutated files of strangers, taken in by `import` and `pack`: a seed is a case.

    python -m tests.kit.foreign_fuzz FOREIGN FIRST COUNT [KIND]

FOREIGN is what `tests.kit.foreign_sets` has written. Each case copies one of its datasets, changes
a file of it, and runs a command in this process, whose address space may grow by 1.5 GB, no more.
What goes wrong is a line of JSON: a bug, a traceback, an exit code that no command has, a dataset
that `verify` finds fault with, a run that takes too long, or a file outside that was touched.
"""

import contextlib
import faulthandler
import gzip
import io
import json
import resource
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import wdsprep
from tests.kit.damaged import packing_here
from tests.kit.mutations import (
    Mutator,
    change_digit,
    mutate,
    mutate_in_place,
    mutate_json,
    mutate_json_line,
)
from tests.kit.packs import BUCKETS, jpeg
from wdsprep.cli import main
from wdsprep.encoding.caption_table import CaptionTable, _Pairs
from wdsprep.errors import WdsprepError
from wdsprep.loading.shelves.cache import cache_dir
from wdsprep.loading.tables import keyed_table

MORE_NBYTES = 1_500_000_000
LONGEST_S = 30
KEYED = [{"key": f"{n:012d}", "caption": f"picture {n}", "score": n / 2} for n in range(12)]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is copied, how a file of it is changed, and what reads it."""

    name: str
    make: Callable[[Path, Path], Path]
    """Makes a dataset in a folder, out of FOREIGN."""
    change: Callable[[Path, Random], None]
    read: Callable[[Path, Path], int]
    """Reads the dataset into a folder; the exit code."""


def _copy(name: str) -> Callable[[Path, Path], Path]:
    def make(foreign: Path, place: Path) -> Path:
        if (foreign / name).is_file():
            place.mkdir()
            shutil.copy(foreign / name, place)
            return place
        return Path(shutil.copytree(foreign / name, place))

    return make


def _change(pattern: str, *ways: Mutator) -> Callable[[Path, Random], None]:
    def change(place: Path, rng: Random) -> None:
        path = rng.choice(sorted(place.rglob(pattern)))
        path.write_bytes(rng.choice(ways)(path.read_bytes(), rng))

    return change


def _change_shard(place: Path, rng: Random) -> None:
    """Change an MDS shard, and let its index say what is there, but for what it unpacks to."""
    index = place / "index.json"
    said = json.loads(index.read_bytes())
    shard = rng.choice(said["shards"])
    kind = "zip_data" if shard["zip_data"] else "raw_data"
    path = place / shard[kind]["basename"]
    path.write_bytes(rng.choice(ANY)(path.read_bytes(), rng))
    for each in ("zip_data", "raw_data"):
        if shard[each]:
            shard[each]["hashes"] = {}
    shard[kind]["bytes"] = path.stat().st_size
    if shard["zip_data"] and rng.random() < 0.3:
        shard["raw_data"]["bytes"] = rng.choice((0, 1, 10**6, 10**9, 2**32, 10**12))
    index.write_text(json.dumps(said))


def _change_samples(place: Path, rng: Random) -> None:
    """Change bytes of samples behind the offsets of an MDS shard, whose size stays."""
    said = json.loads((place / "index.json").read_bytes())
    for shard in said["shards"]:
        shard["raw_data"]["hashes"] = {}
    (place / "index.json").write_text(json.dumps(said))
    path = place / rng.choice(said["shards"])["raw_data"]["basename"]
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 20)):
        at = rng.randrange(200, min(len(data), rng.choice((2000, len(data)))))
        data[at] = rng.choice((0, 1, 5, 127, 128, 255, rng.randrange(256)))
    path.write_bytes(data)


def _change_member(*endings: str) -> Callable[[Path, Random], None]:
    """Change a member of a tar, and write the tar anew, at times gzipped."""

    def change(place: Path, rng: Random) -> None:
        path = rng.choice(sorted(place.rglob("*.tar")))
        with tarfile.open(path) as tar:
            members = [(m.name, tar.extractfile(m).read()) for m in tar]  # type: ignore[union-attr]
        chosen = rng.choice([n for n, (name, _) in enumerate(members) if name.endswith(endings)])
        name, data = members[chosen]
        ways = [mutate_in_place, mutate, change_digit] + (
            [mutate_json] if name.endswith("json") else []
        )
        members[chosen] = name, rng.choice(ways)(data, rng)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        path.write_bytes(gzip.compress(out.getvalue()) if rng.random() < 0.2 else out.getvalue())

    return change


def _images_in_parquet(foreign: Path, place: Path) -> Path:
    place.mkdir()
    sets = sorted((foreign / "images/datasets").rglob("*.arrow"))
    tables = [pa.ipc.open_stream(path.read_bytes()).read_all() for path in sets[:2]]
    pq.write_table(tables[0], place / "a.parquet", compression="zstd")
    pq.write_table(tables[1], place / "b.parquet", row_group_size=2)
    return place


def _tables(foreign: Path, place: Path) -> Path:
    """Tables of URLs that only this machine could have, so that none is fetched."""
    del foreign
    place.mkdir()
    rows = [{"url": f"http://127.0.0.1/{n}.jpg", "caption": f"p {n}", "n": n} for n in range(12)]
    return _write_tables(place, rows)


def _keyed_tables(foreign: Path, place: Path) -> Path:
    del foreign
    place.mkdir()
    return _write_tables(place, KEYED)


def _write_tables(place: Path, rows: list[dict[str, Any]]) -> Path:
    for ending, mark in (("csv", ","), ("tsv", "\t")):
        lines = [mark.join(rows[0]), *(mark.join(map(str, row.values())) for row in rows)]
        (place / f"t.{ending}").write_text("\n".join(lines) + "\n")
    (place / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "t.csv.gz").write_bytes(gzip.compress((place / "t.csv").read_bytes()))
    pq.write_table(pa.Table.from_pylist(rows), place / "t.parquet")
    return place


def _one_table(place: Path, rng: Random) -> None:
    path = rng.choice(sorted(place.iterdir()))
    ways = [mutate, change_digit] + ([mutate_json_line] * 2 if path.suffix == ".jsonl" else [])
    data = rng.choice(ways)(path.read_bytes(), rng)
    for other in place.iterdir():
        other.unlink()
    path.write_bytes(data)


def _folder(foreign: Path, place: Path) -> Path:
    """Images with metadata, json and txt beside them."""
    del foreign
    place.mkdir()
    for n in range(4):
        (place / f"{n}.jpg").write_bytes(jpeg(n))
        (place / f"{n}.json").write_text(json.dumps({"caption": f"p {n}", "more": {"tags": [n]}}))
        (place / f"{n}.txt").write_text(f"picture {n}")
    rows = [{"file_name": f"{n}.jpg", "score": n, "tags": ["a", n]} for n in range(4)]
    (place / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def _import(*options: str) -> Callable[[Path, Path], int]:
    def read(place: Path, out: Path) -> int:
        return main(["import", str(place), str(out), *options])

    return read


def _pack(place: Path, out: Path) -> int:
    with packing_here():
        return main(["pack", str(place), str(out), "--workers", "1", *BUCKETS])


def _keyed(place: Path, out: Path) -> int:
    (path,) = place.iterdir()
    try:
        keyed_table(str(path), cache_dir(out, 1 << 30), ("caption",))
        for _ in _Pairs(CaptionTable.find(str(path), "key", "caption")):
            pass
    except WdsprepError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


ANY: tuple[Mutator, ...] = (mutate_in_place, mutate_in_place, mutate, change_digit)
FLUX = _import("--resolution", "64")
PRX = _import("--resolution", "64", "--scale", "0.18215", "--shift", "0")
BYTES = _import("--resolution", "256")
KINDS = [
    Kind(name=name, make=make, change=change, read=read)
    for name, make, change, read in [
        ("import-mds-index", _copy("latents/prx"), _change("index.json", mutate_json), PRX),
        ("import-mds-index-bytes", _copy("latents/prx"), _change("index.json", *ANY), PRX),
        ("import-mds-shard", _copy("latents/prx"), _change_shard, PRX),
        ("import-mds-samples", _copy("latents/prx"), _change_samples, PRX),
        ("import-mds-bytes", _copy("latents/mosaicml"), _change_samples, BYTES),
        ("import-arrow", _copy("latents/mlperf"), _change("*.arrow", *ANY), FLUX),
        ("import-arrow-state", _copy("latents/mlperf"), _change("*.json", mutate_json), FLUX),
        ("import-parquet", _copy("latents/mlperf.parquet"), _change("*.parquet", *ANY), FLUX),
        ("import-pth", _copy("latents/primus"), _change_member(".pth"), FLUX),
        ("import-npy", _copy("latents/sana"), _change_member(".npy", ".json"), FLUX),
        ("import-tar", _copy("latents/sana"), _change("*.tar", *ANY), FLUX),
        ("pack-mds-index", _copy("images/mds-jpeg"), _change("index.json", mutate_json), _pack),
        ("pack-mds-zstd", _copy("images/mds-jpeg"), _change_shard, _pack),
        ("pack-mds-gz", _copy("images/mds-png"), _change_shard, _pack),
        ("pack-mds-br", _copy("images/mds-bytes"), _change_shard, _pack),
        ("pack-mds-pil", _copy("images/mds-pil"), _change_samples, _pack),
        ("pack-arrow", _copy("images/datasets"), _change("*.arrow", *ANY), _pack),
        ("pack-arrow-state", _copy("images/datasets"), _change("*.json", mutate_json), _pack),
        ("pack-parquet", _images_in_parquet, _change("*.parquet", *ANY), _pack),
        ("pack-tables", _tables, _one_table, _pack),
        ("pack-folder", _folder, _change("*.json*", *ANY, mutate_json_line), _pack),
        ("keyed-tables", _keyed_tables, _one_table, _keyed),
    ]
]


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Let this process have little more than it has now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmSize:"):
            limit = int(line.split()[1]) * 1024 + MORE_NBYTES
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run_case(foreign: Path, scratch: Path, seed: int, kind: Kind) -> list[str]:
    """Run one case; what is wrong with how it went."""
    rng = Random(f"{kind.name} {seed}")
    place, out = scratch / f"{seed}-{kind.name}", scratch / "out"
    place = kind.make(foreign, place)
    kind.change(place, rng)
    before = _names(scratch, out)
    said = io.StringIO()
    began = time.monotonic()
    with limited_memory(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = kind.read(place, out)
    took, text = time.monotonic() - began, said.getvalue()
    for path in out.rglob("*.jsonl"):
        text += path.read_text()
    wrong = [line[:300] for line in text.splitlines() if "a bug" in line or "Traceback" in line]
    if code not in (0, 1, 2, 3):  # 3: whole, with rejects
        wrong.append(f"exit code {code}: {text[-300:]}")
    if code and not text.strip():
        wrong.append(f"exit code {code} without a word")
    if took > LONGEST_S:
        wrong.append(f"it took {took:.0f} s")
    if max(map(len, text.splitlines()), default=0) > 5000:
        wrong.append(f"a line of {max(map(len, text.splitlines())):,} characters")
    if code in (0, 3) and kind.read is not _keyed:
        wrong += [f"verify: {finding}" for finding in wdsprep.verify(str(out)).findings][:3]
    if _names(scratch, out) != before:
        wrong.append("it left files beside its dataset")
    for folder in (place, out):
        shutil.rmtree(folder, ignore_errors=True)
    return wrong


def _names(scratch: Path, out: Path) -> set[Path]:
    return {path for path in scratch.rglob("*") if path != out and out not in path.parents}


def run_cases(
    foreign: Path, seeds: range, names: tuple[str, ...] = (), told: Callable[[str], Any] = print
) -> int:
    """Run each kind with each seed, in little memory; how many went wrong."""
    faults = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        for seed in seeds:
            for kind in KINDS:
                if names and kind.name not in names:
                    continue
                told(f"> {kind.name} {seed}")
                if wrong := run_case(foreign, Path(scratch), seed, kind):
                    faults += 1
                    told(json.dumps([kind.name, seed, wrong]))
    return faults


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    first, count = map(int, sys.argv[2:4])
    found = run_cases(Path(sys.argv[1]), range(first, first + count), tuple(sys.argv[4:]))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(f"{found} faults, {most / 1e6:.2f} GB at most\n")
    sys.exit(found > 0 or most > MORE_NBYTES / 1000)
