"""Writing and indexing tars beside webdataset, Python's tarfile and GNU tar.

The same samples of jpg, txt and json go from memory into one tar on tmpfs. GNU tar has no such
input: it packs the same members from files. Two writers hash nothing, so wdsprep is shown with and
without its BLAKE3. Indexing reads the headers of two foreign tars, ShardWriter's with a PAX header
before every member and tarfile's plain one, in one thread.
"""

import io
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from blake3 import blake3

from tools.benches import Group, Rival, Role, call, took

NBYTES = 50_000
CAPTION = b"a photograph of something that has about this many words to it"
FACTS = b'{"height": 512, "width": 768, "source": "part-00000.parquet#%d"}'
Sample = tuple[str, bytes, bytes, bytes]


def groups(home: Path, scale: float) -> Iterator[Group]:
    count = round(20_000 * scale)
    files = home / "files"
    explode(count, files)
    yield Group(
        name="pack-write",
        title="one tar from memory",
        count=count,
        rivals=[
            _writer("wdsprep, BLAKE3 included", "wdsprep", count, home, Role.OURS),
            _writer("wdsprep, the hash left out", "unhashed", count, home, Role.LIMIT),
            _writer("webdataset ShardWriter", "shardwriter", count, home),
            _writer("Python tarfile", "tarfile", count, home),
            Rival(
                name="GNU tar, from files, no hash",
                command=["tar", "--format=ustar", "-cf", home / "out/gnu.tar", "-C", files, "."],
                leaves=home / "out/gnu.tar",
            ),
            _writer("BLAKE3 of as many bytes", "hash", count, home, Role.LIMIT),
        ],
        targets={"webdataset ShardWriter": 4.0},
    )
    for kind in ("shardwriter", "tarfile"):
        WRITERS[kind](list(samples(count)), home / f"{kind}.tar")
    yield Group(
        name="pack-index",
        title="the index of a tar of others, one thread",
        count=count,
        rivals=[
            Rival(name=f"of {kind}'s", command=call(index, home / f"{kind}.tar"), role=Role.OURS)
            for kind in ("shardwriter", "tarfile")
        ],
    )


def _writer(name: str, kind: str, count: int, home: Path, role: Role = Role.RIVAL) -> Rival:
    out = home / "out"
    out.mkdir(exist_ok=True)
    return Rival(name=name, command=call(write, kind, count, out / f"{kind}.tar"), role=role)


def samples(count: int) -> Iterator[Sample]:
    """Every sample has bytes of its own, so that no cache serves them."""
    for number in range(count):
        yield f"{number:09d}", os.urandom(NBYTES), FACTS % number, CAPTION


def explode(count: int, files: Path) -> None:
    files.mkdir()
    for key, *members in samples(count):
        for name, data in zip(("jpg", "json", "txt"), members, strict=True):
            (files / f"{key}.{name}").write_bytes(data)


def write(kind: str, count: int, target: str) -> None:
    ready = list(samples(count))
    if kind == "shardwriter":
        import webdataset  # noqa: F401 (brings torch, which says nothing of writing)
    started = time.perf_counter()
    WRITERS[kind](ready, Path(target))
    took(time.perf_counter() - started)
    Path(target).unlink(missing_ok=True)


def write_wdsprep(ready: list[Sample], target: Path) -> None:
    from wdsprep.dataset.tar.write import TarWriter
    from wdsprep.store.local import LocalStore

    with LocalStore(target.parent).write(target.name) as sink, TarWriter(sink) as tar:
        for key, image, facts, caption in ready:
            tar.add(key, (("jpg", image), ("json", facts), ("txt", caption)))
        tar.finish()


class NoHash:
    """Stands in for BLAKE3, to compare with writers that hash nothing."""

    def update(self, data: bytes) -> None: ...

    def hexdigest(self) -> str:
        return ""


def write_unhashed(ready: list[Sample], target: Path) -> None:
    with mock.patch("wdsprep.dataset.sealed_json.blake3", NoHash):
        write_wdsprep(ready, target)


def write_shardwriter(ready: list[Sample], target: Path) -> None:
    import webdataset

    pattern = f"{target}.%d"
    with webdataset.ShardWriter(pattern, len(ready) + 1, maxsize=1 << 60, verbose=0) as tar:
        for key, image, facts, caption in ready:
            tar.write({"__key__": key, "jpg": image, "json": facts, "txt": caption})
    os.replace(f"{target}.0", target)


def write_tarfile(ready: list[Sample], target: Path) -> None:
    with tarfile.open(target, "w") as tar:
        for key, image, facts, caption in ready:
            for name, data in (("jpg", image), ("json", facts), ("txt", caption)):
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def hash_only(ready: list[Sample], _target: Path) -> None:
    """The floor under wdsprep's time."""
    digest = blake3()
    for _, image, _, _ in ready:
        digest.update(image)
        digest.update(bytes(3 * 512 + 1024))


WRITERS: dict[str, Callable[[list[Sample], Path], None]] = {
    "wdsprep": write_wdsprep,
    "unhashed": write_unhashed,
    "shardwriter": write_shardwriter,
    "tarfile": write_tarfile,
    "hash": hash_only,
}


def index(path: str) -> None:
    from wdsprep.dataset.tar.read import file_tape, index_tar

    started = time.perf_counter()
    with file_tape(Path(path)) as tape:
        index_tar(tape, path)
    took(time.perf_counter() - started)
