"""`pack` beside what people would write themselves, tmpfs to tmpfs, on all cores.

JPEGs of 50 KB with txt and json, as a folder and as img2dataset's tars. ShardWriter fed by Pillow's
headers is the rival, in one process and in one per core. A loop in each core that only decodes is
the limit of a full check; of a header check it is one that reads a sample's three files, hashes the
image and all that it writes, as a dataset's two digests need it, and writes them, without a look
at what they say. Then a table of 3 million rows, of which the memory counts, and what it
takes to see that nothing is left to do.
"""

import io
import itertools
import json
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from PIL import Image, ImageFilter

from tools.benches import CORES, Group, Rival, Role, call, ours, took
from tools.benches import tar as tars

NBYTES, A_TAR, ROWS, SLICES = 50_000, 5_000, 3_000_000, 100_000
Found = Iterator[tuple[str, bytes, dict[str, Any], str]]


def groups(home: Path, scale: float) -> Iterator[Group]:
    count = round(20_000 * scale)
    folder, packed = home / "downloads", home / "tars"
    make_folder(folder, count)
    yield _beside("folder", "a folder, header check", "--check=header", folder, home, count)
    decoders = f"a loop that only decodes, {CORES} processes"
    yield Group(
        name="pack-full",
        title="a folder, full check",
        count=count,
        rivals=[
            _pack("wdsprep pack", folder, home),
            Rival(
                name=decoders, command=call(spread, "decode", folder, "", CORES), role=Role.LIMIT
            ),
        ],
        targets={decoders: 0.9},
    )
    make_tars(folder, packed, min(A_TAR, count // 4))
    shutil.rmtree(folder)
    yield _beside("tars", "img2dataset's tars, header check", "--check=header", packed, home, count)
    shutil.rmtree(packed)
    yield from _large(home, scale)
    yield from tars.groups(home, scale)


def _beside(kind: str, title: str, option: str, source: Path, home: Path, count: int) -> Group:
    one, several = (f"ShardWriter and Pillow's header, {n} at once" for n in (1, CORES))
    out = home / "theirs"
    rivals = [
        _pack(f"wdsprep pack {option}", source, home, option),
        Rival(name=one, command=call(spread, kind, source, out, 1), leaves=out),
        Rival(name=several, command=call(spread, kind, source, out, CORES), leaves=out),
    ]
    if kind == "folder":
        copy = call(spread, "copy", source, out, CORES)
        name = f"a loop that reads, hashes and writes, {CORES} at once"
        rivals.append(Rival(name=name, command=copy, role=Role.LIMIT, leaves=out))
    return Group(
        name=f"pack-{kind}",
        title=title,
        count=count,
        rivals=rivals,
        targets={one: 4.0, several: 2.5} if kind == "folder" else {one: 5.0},
    )


def _pack(name: str, source: Path, home: Path, *options: str) -> Rival:
    out = home / "ours"
    return Rival(name=name, command=ours("pack", source, out, *options), role=Role.OURS, leaves=out)


def _large(home: Path, scale: float) -> Iterator[Group]:
    rows, slices = round(ROWS * scale), round(SLICES * scale)
    table, many = home / "table.parquet", home / "many"
    make_table(table, rows)
    yield Group(
        name="pack-rows",
        title="a table whose rows are no images, but for one",
        unit="rows",
        count=rows,
        rivals=[_pack("wdsprep pack", table, home)],
    )
    table.unlink()
    make_many(many, slices)
    again = ours("pack", many, home / "done", "--samples-per-shard", "1")
    subprocess.run(again, check=True, capture_output=True)
    yield Group(
        name="pack-resume",
        title=f"a run that finds nothing left to do of {slices:,} slices",
        rivals=[Rival(name="wdsprep pack", command=again, role=Role.OURS)],
    )
    shutil.rmtree(many)
    shutil.rmtree(home / "done")


# --- data


def jpeg(seed: int, nbytes: int, noise: float = 0.05) -> bytes:
    """A picture of 704 x 678 that compresses to about `nbytes`."""
    grain = Image.frombytes("RGB", (704, 678), seed.to_bytes(4, "big") * (704 * 678 * 3 // 4))
    rough = Image.effect_noise((704, 678), 60).convert("RGB").filter(ImageFilter.GaussianBlur(2))
    picture = Image.blend(rough, grain, noise)
    for quality in range(95, 20, -3):
        data = io.BytesIO()
        picture.save(data, "JPEG", quality=quality)
        if data.tell() <= nbytes:
            break
    return data.getvalue()


def make_folder(folder: Path, count: int) -> None:
    pictures = [jpeg(seed, NBYTES) for seed in range(20)]
    for number in range(count):
        key = f"{number:09d}"
        home = folder / key[:5]
        home.mkdir(parents=True, exist_ok=True)
        facts = {"key": key, "width": 704, "height": 678, "aesthetic": 5.5}
        facts |= {"caption": f"picture number {number} of many", "url": f"http://a.b/{number}.jpg"}
        (home / f"{key}.jpg").write_bytes(pictures[number % 20])
        (home / f"{key}.json").write_text(json.dumps(facts))
        (home / f"{key}.txt").write_text(str(facts["caption"]))


def make_tars(folder: Path, out: Path, a_tar: int) -> None:
    """The folder as tars of img2dataset's kind."""
    out.mkdir()
    files = itertools.groupby(sorted(folder.rglob("*.*")), lambda path: int(path.stem) // a_tar)
    for number, members in files:
        with tarfile.open(out / f"{number:05d}.tar", "w") as tar:
            for path in members:
                tar.add(path, path.name)


def make_table(path: Path, rows: int) -> None:
    """One picture, then rows of a few bytes that are none: what counts here is their number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema({"image": pa.binary(), "caption": pa.string()})
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, 100_000):
            numbers = range(first, min(rows, first + 100_000))
            images = [b"not an image %d" % row if row else jpeg(0, NBYTES) for row in numbers]
            captions = [f"caption {row}" for row in numbers]
            writer.write_table(pa.table([images, captions], schema=schema), row_group_size=10_000)


def make_many(folder: Path, slices: int) -> None:
    for number in range(slices):
        home = folder / f"{number // 1_000:03d}"
        home.mkdir(parents=True, exist_ok=True)
        data = b"not an image" if number else jpeg(0, NBYTES)
        (home / f"{number:06d}.jpg").write_bytes(data)


# --- the others


def spread(kind: str, source: str, out: str, processes: int) -> None:
    """The work of one kind, shared by so many processes. Imports are left out: webdataset's brings
    torch, which says nothing of the work."""
    if kind in ("folder", "tars"):
        import webdataset  # noqa: F401
    begun = time.perf_counter()
    work: Callable[[Path, Path, int, int], None] = {
        "folder": peer_folder,
        "tars": peer_tars,
        "copy": copy_only,
        "decode": decode_only,
    }[kind]
    started = [
        get_context("fork").Process(target=work, args=(Path(source), Path(out), share, processes))
        for share in range(processes)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
        if process.exitcode:
            sys.exit(f"a process of {kind} failed")
    took(time.perf_counter() - begun)


def peer_folder(source: Path, out: Path, share: int, shares: int) -> None:
    def read() -> Found:
        for path in pictures_of(source, share, shares):
            facts = json.loads(path.with_suffix(".json").read_bytes())
            yield path.stem, path.read_bytes(), facts, path.with_suffix(".txt").read_text()

    write_buckets(read(), out, share)


def peer_tars(source: Path, out: Path, share: int, shares: int) -> None:
    import webdataset as wds

    def read() -> Found:
        paths = [str(path) for path in sorted(source.glob("*.tar"))[share::shares]]
        for sample in wds.WebDataset(paths, shardshuffle=False, empty_check=False):
            caption = sample["txt"].decode()
            yield sample["__key__"], sample["jpg"], json.loads(sample["json"]), caption

    write_buckets(read(), out, share)


def write_buckets(found: Found, out: Path, share: int) -> None:
    """ShardWriter into two buckets by Pillow's header, as people write it."""
    import webdataset as wds

    out.mkdir(parents=True, exist_ok=True)
    writers = {
        bucket: wds.ShardWriter(f"{out}/{bucket}-{share}-%06d.tar", maxcount=10_000, verbose=0)
        for bucket in (256, 512)
    }
    for key, picture, facts, caption in found:
        width, height = Image.open(io.BytesIO(picture)).size
        bucket = 512 if min(width, height) >= 512 else 256
        writers[bucket].write({"__key__": key, "jpg": picture, "json": facts, "txt": caption})
    for writer in writers.values():
        writer.close()


def copy_only(source: Path, out: Path, share: int, shares: int) -> None:
    from blake3 import blake3

    out.mkdir(parents=True, exist_ok=True)
    written = blake3()
    with (out / f"{share}.tar").open("wb", buffering=0) as tar:
        for picture in pictures_of(source, share, shares):
            files = [picture.with_suffix(kind).read_bytes() for kind in (".jpg", ".json", ".txt")]
            blake3(files[0]).digest()
            sample = b"".join(files)
            written.update(sample)
            tar.write(sample)


def decode_only(source: Path, _out: Path, share: int, shares: int) -> None:
    for path in pictures_of(source, share, shares):
        with Image.open(io.BytesIO(path.read_bytes())) as image:
            image.load()


def pictures_of(folder: Path, share: int, shares: int) -> list[Path]:
    return sorted(folder.rglob("*.jpg"))[share::shares]
