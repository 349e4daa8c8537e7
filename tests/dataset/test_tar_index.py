"""The index: where each sample lies, for tars of ours and of others."""

import io
import struct
import tarfile
import warnings
from itertools import pairwise
from pathlib import Path

import pytest

from tests.kit.packs import tape_of, write_tar
from wdsprep.dataset.tar.members import decode_index, split_member
from wdsprep.dataset.tar.read import file_tape, index_tar, read_samples
from wdsprep.errors import FormatError

FIELDS = ("jpg", "json", "txt")


def payload(i: int, field: str) -> bytes:
    return f"{i}{field}".encode() * (i * 97 % 300)


def write_ours(path: Path) -> bytes:
    data, tar = write_tar((f"{i:06d}", {f: payload(i, f) for f in FIELDS}) for i in range(20))
    path.write_bytes(data)
    return tar.index


def write_shardwriter(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import webdataset

        with webdataset.ShardWriter(str(path) + "%d", verbose=0) as tar:
            for i in range(20):
                tar.write({"__key__": f"{i:06d}", **{f: payload(i, f) for f in FIELDS}})
    Path(f"{path}0").rename(path)


def write_tarfile(path: Path, form: int) -> None:
    """With long names, folders and links between the samples."""
    with tarfile.open(path, "w", format=form) as tar:
        for i in range(20):
            folder = "d" * 90 + f"/{i // 4}"
            for name, kind in ((folder, tarfile.DIRTYPE), ("link.jpg", tarfile.SYMTYPE)):
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, "0" * (150 if form != tarfile.USTAR_FORMAT else 9)
                if i % 4 == 0:
                    tar.addfile(info)
            for field in FIELDS:
                info = tarfile.TarInfo(f"{folder}/{'k' * 60}{i:06d}.{field}")
                info.size = len(payload(i, field))
                tar.addfile(info, io.BytesIO(payload(i, field)))


def index_file(path: Path) -> tuple[int, ...]:
    with file_tape(path) as tape:
        data = index_tar(tape, path.name)
    assert index_tar(tape_of(path.read_bytes()), path.name) == data
    return decode_index(data, path.name)


def test_index_from_headers_equals_the_writers(tmp_path: Path) -> None:
    index = write_ours(tmp_path / "a.tar")
    assert index_file(tmp_path / "a.tar") == decode_index(index, "it")
    assert index == struct.pack("<21Q", *decode_index(index, "it"))


@pytest.mark.parametrize("maker", ["ours", "shardwriter", "ustar", "gnu", "pax"])
def test_each_range_is_a_tar_of_exactly_that_sample(maker: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    if maker == "ours":
        write_ours(path)
    elif maker == "shardwriter":
        write_shardwriter(path)
    else:
        write_tarfile(path, getattr(tarfile, f"{maker.upper()}_FORMAT"))
    offsets, data = index_file(path), path.read_bytes()
    assert len(offsets) == 21
    for i, (start, end) in enumerate(pairwise(offsets)):
        with tarfile.open(fileobj=io.BytesIO(data[start:end])) as tar:
            files = {split_member(t.name): tar.extractfile(t) for t in tar if t.isreg()}
        found = {name[1]: file.read() for name, file in files.items() if name and file}
        assert found == {f: payload(i, f) for f in FIELDS}
        assert len({name[0] for name in files if name}) == 1
    assert (b"mtime=" in data) == (maker == "shardwriter")  # in a PAX header
    with file_tape(path) as tape:
        samples = [*read_samples(tape, "it")]
    assert [sample.start for sample in samples] == [*offsets[:-1]]
    assert [s.fields for s in samples] == [{f: payload(i, f) for f in FIELDS} for i in range(20)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\0" * 9,
        struct.pack("<2Q", 0, 0),
        struct.pack("<2Q", 1, 512),
        struct.pack("<2Q", 0, 513),
        struct.pack("<3Q", 0, 1024, 512),
        b"<html>!!" * 4,
    ],
)
def test_damaged_index_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"a\.idx is damaged"):
        decode_index(data, "a.idx")
