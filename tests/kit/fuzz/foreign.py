"""Datasets of strangers, for `import` and `pack`, as `tests.kit.foreign_sets` has written them."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import wdsprep
from tests.kit.fuzz.cases import Kind, Make, Run, change_one, command, copy_of
from tests.kit.fuzz.mutations import (
    Mutator,
    change_digit,
    mutate,
    mutate_in_place,
    mutate_json,
    mutate_json_line,
)
from tests.kit.fuzz.tables import change_table, write_tables
from tests.kit.packs import BUCKETS, jpeg

ANY: tuple[Mutator, ...] = (mutate_in_place, mutate_in_place, mutate, change_digit)


def _copy(name: str) -> Make:
    return copy_of(f"foreign/{name}")


def _change_shard(place: Path, rng: Random) -> str:
    """Change an MDS shard, and let its index say what is there, but for what it unpacks to."""
    index = place / "index.json"
    said = json.loads(index.read_bytes())
    shard = rng.choice(said["shards"])
    kind = "zip_data" if shard["zip_data"] else "raw_data"
    path = place / shard[kind]["basename"]
    path.write_bytes(rng.choice(ANY)(path.read_bytes(), rng))
    for each in filter(None, (shard["zip_data"], shard["raw_data"])):
        each["hashes"] = {}
    shard[kind]["bytes"] = path.stat().st_size
    if shard["zip_data"] and rng.random() < 0.3:
        shard["raw_data"]["bytes"] = rng.choice((0, 1, 10**6, 10**9, 2**32, 10**12))
    index.write_text(json.dumps(said))
    return path.name


def _change_member(*endings: str) -> Callable[[Path, Random], str]:
    """Change a member of a tar, and write the tar anew, at times gzipped."""

    def change(place: Path, rng: Random) -> str:
        path = rng.choice(sorted(place.rglob("*.tar")))
        with tarfile.open(path) as tar:
            members = [(m.name, tar.extractfile(m).read()) for m in tar]  # type: ignore[union-attr]
        chosen = rng.choice([n for n, (name, _) in enumerate(members) if name.endswith(endings)])
        changed, data = members[chosen]
        ways = [mutate_in_place, mutate, change_digit] + (
            [mutate_json] if changed.endswith("json") else []
        )
        members[chosen] = changed, rng.choice(ways)(data, rng)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        path.write_bytes(gzip.compress(out.getvalue()) if rng.random() < 0.2 else out.getvalue())
        return f"{path.name}: {changed}"

    return change


def _images_in_parquet(sound: Path, place: Path, _rng: Random) -> None:
    place.mkdir()
    sets = sorted((sound / "foreign/images/datasets").rglob("*.arrow"))
    tables = [pa.ipc.open_stream(path.read_bytes()).read_all() for path in sets[:2]]
    pq.write_table(tables[0], place / "a.parquet", compression="zstd")
    pq.write_table(tables[1], place / "b.parquet", row_group_size=2)


def _tables(sound: Path, place: Path, _rng: Random) -> None:
    """Tables of URLs that only this machine could have, so that none is fetched."""
    del sound
    place.mkdir()
    rows = [{"url": f"http://127.0.0.1/{n}.jpg", "caption": f"p {n}", "n": n} for n in range(12)]
    write_tables(place, rows)


def _folder(sound: Path, place: Path, _rng: Random) -> None:
    """Images with metadata, json and txt beside them."""
    del sound
    place.mkdir()
    for n in range(4):
        (place / f"{n}.jpg").write_bytes(jpeg(n))
        (place / f"{n}.json").write_text(json.dumps({"caption": f"p {n}", "more": {"tags": [n]}}))
        (place / f"{n}.txt").write_text(f"picture {n}")
    rows = [{"file_name": f"{n}.jpg", "score": n, "tags": ["a", n]} for n in range(4)]
    (place / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _import(*options: str) -> Callable[[Path, Path], Sequence[Run]]:
    def runs(place: Path, out: Path) -> list[Run]:
        return [_sound_after(command("import", place, out, *options), out)]

    return runs


def _pack(place: Path, out: Path) -> list[Run]:
    return [_sound_after(command("pack", place, out, "--workers", "1", *BUCKETS), out)]


def _sound_after(run: Run, out: Path) -> Run:
    """Run it, and let `verify` find nothing in what came of it."""

    def act() -> int:
        code = run.act()
        if code in (0, 3) and (found := wdsprep.verify(str(out)).findings):
            raise AssertionError(f"verify: {found[0]}")
        return code

    return Run(run.name, act)


FLUX = _import("--resolution", "64")
PRX = _import("--resolution", "64", "--scale", "0.18215", "--shift", "0")
BYTES = _import("--resolution", "256")
ROWS: list[tuple[str, Any, Any, Any]] = [
    ("import-mds-index", _copy("latents/prx"), change_one("index.json", mutate_json, *ANY), PRX),
    ("import-mds-shard", _copy("latents/prx"), _change_shard, PRX),
    ("import-mds-bytes", _copy("latents/mosaicml"), _change_shard, BYTES),
    ("import-arrow", _copy("latents/mlperf"), change_one("*.arrow", *ANY), FLUX),
    ("import-arrow-state", _copy("latents/mlperf"), change_one("*.json", mutate_json), FLUX),
    ("import-parquet", _copy("latents/mlperf.parquet"), change_one("*.parquet", *ANY), FLUX),
    ("import-pth", _copy("latents/primus"), _change_member(".pth"), FLUX),
    ("import-npy", _copy("latents/sana"), _change_member(".npy", ".json"), FLUX),
    ("import-tar", _copy("latents/sana"), change_one("*.tar", *ANY), FLUX),
    ("pack-mds-index", _copy("images/mds-jpeg"), change_one("index.json", mutate_json), _pack),
    ("pack-mds-zstd", _copy("images/mds-jpeg"), _change_shard, _pack),
    ("pack-mds-br", _copy("images/mds-bytes"), _change_shard, _pack),
    ("pack-mds-pil", _copy("images/mds-pil"), _change_shard, _pack),
    ("pack-arrow", _copy("images/datasets"), change_one("*.arrow", *ANY), _pack),
    ("pack-arrow-state", _copy("images/datasets"), change_one("*.json", mutate_json), _pack),
    ("pack-parquet", _images_in_parquet, change_one("*.parquet", *ANY), _pack),
    ("pack-tables", _tables, change_table, _pack),
    ("pack-folder", _folder, change_one("*.json*", *ANY, mutate_json_line), _pack),
]
KINDS = tuple(
    Kind(name=name, make=make, change=change, runs=runs) for name, make, change, runs in ROWS
)
