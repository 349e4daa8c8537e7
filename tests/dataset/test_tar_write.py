"""The writer: equal samples make equal bytes, which every other tar reader takes."""

import hashlib
import io
import subprocess
import tarfile
import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.packs import tape_of, write_tar
from wdsprep.dataset.tar.members import decode_index
from wdsprep.dataset.tar.read import read_samples
from wdsprep.dataset.tar.write import FLUSH_NBYTES, MAX_MEMBER_NBYTES, TarWriter, header, pieces_of
from wdsprep.errors import StoreError, TarError

Samples = list[tuple[str, dict[str, bytes]]]

GOLDEN: Samples = [
    ("000000000", {"jpg": b"\xff\xd8 an image", "json": b"{}", "txt": b""}),
    ("000000001", {"png": bytes(512), "json": b'{"width": 512}', "txt": "ünï".encode()}),
    ("f/" + "k" * 96, {"npy": bytes(range(256)) * 40}),
]
GOLDEN_SHA256 = "1ca746dc59a3af950d8543eb2ca703c06c959dc1ff7b3e39d0585f894b1c8e3e"


def tar_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("tar-writer")]


def test_large_members_are_written_and_hashed_where_they_lie() -> None:
    """In pieces, one of them a view; small ones between them are joined."""
    large = memoryview(bytes(range(256)) * 300)
    members = [("npy", (b"header", large)), ("json", b"{}"), ("txt", b"")]
    parts: list[int] = []

    class Sink(io.BytesIO):
        def writelines(self, pieces: Iterable[Any], /) -> None:
            several = [*pieces]
            parts.extend(id(piece) for piece in several)
            super().writelines(several)

    sink = Sink()
    with TarWriter(sink) as tar:
        for key in "ab":
            tar.add(key, members)
        tar.finish()
    whole = {name: b"".join(pieces_of(data)) for name, data in members}
    data, same = write_tar([(key, whole) for key in "ab"])
    assert (sink.getvalue(), tar.digest, tar.index) == (data, same.digest, same.index)
    assert parts.count(id(large)) == 2
    assert len(parts) == 5


@pytest.mark.parametrize("flush_nbytes", [FLUSH_NBYTES, 1, 512, 1000, 5000, 1 << 30])
def test_bytes_are_frozen_and_do_not_depend_on_block_boundaries(
    flush_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.dataset.tar.write.FLUSH_NBYTES", flush_nbytes)
    data, written = write_tar(GOLDEN)
    assert hashlib.sha256(data).hexdigest() == GOLDEN_SHA256
    assert written.digest == blake3(data).hexdigest()
    assert (written.samples, written.nbytes) == (3, len(data))
    spans = [*pairwise(decode_index(written.index, "it"))]
    with TarWriter(sink := io.BytesIO()) as again:
        sizes, blocks = [end - start for start, end in spans], [data[a:b] for a, b in spans]
        again.add_tarred([key for key, _ in GOLDEN], sizes, blocks)
        again.finish()
    assert (sink.getvalue(), again.digest, again.index) == (data, written.digest, written.index)


# Names: what is encoded comes back from other readers, the rest is refused.

GOOD_NAMES = [
    "n" * 96 + ".jpg",
    "n" * 97 + ".jp",
    "f/" + "n" * 95 + ".jpg",
    "f" * 155 + "/" + "n" * 96 + ".jpg",
    "f" * 50 + "/" + "g" * 104 + "/" + "n" * 96 + ".jpg",
    "a//b/" + "n" * 95 + ".jpg",
    "ü" * 48 + ".jpg",
    "日本" * 20 + "/" + "語" * 30 + ".jpg",
    "\U0001f600" * 36 + "/" + "\U0001f600" * 24 + ".txt",
    "a b\nc\\d*.jpg",
]


def test_names_come_back_from_tarfile_gnu_tar_and_our_reader(tmp_path: Path) -> None:
    parts = [name.rpartition(".") for name in GOOD_NAMES]
    samples: Samples = [(key, {field: b"data"}) for key, _, field in parts]
    data, _ = write_tar(samples)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == GOOD_NAMES
    (tmp_path / "a.tar").write_bytes(data)
    command = ["tar", "--quoting-style=literal", "-tf", tmp_path / "a.tar"]
    listed = subprocess.run(command, capture_output=True, check=True)
    assert listed.stdout.decode() == "".join(f"{name}\n" for name in GOOD_NAMES)
    assert not listed.stderr
    read = read_samples(tape_of(data), "it")
    assert [(sample.key, sample.fields) for sample in read] == samples


# Samples that a reader would not give back as they are.


KEYS_REFUSED = ["", "a.b", "f.g/a.b", "/a", "../a", "a/../b", "a/", "n" * 101, "a\0b", "\udcff"]
FIELDS_REFUSED = [[], [""], ["a/b"], ["jpg", "jpg"], ["JPG"], ["j\0g"], ["j" * 100]]


@pytest.mark.parametrize(
    ("key", "names"),
    [*((key, ["jpg"]) for key in KEYS_REFUSED), *(("k", names) for names in FIELDS_REFUSED)],
)
def test_bad_key_or_fields_are_refused(key: str, names: list[str]) -> None:
    with TarWriter(io.BytesIO()) as tar, pytest.raises(TarError):
        tar.add(key, [(name, b"") for name in names])


def test_repeated_key_is_refused_wherever_it_stood() -> None:
    with TarWriter(io.BytesIO()) as tar:
        for key in ("a", "b"):
            tar.add(key, [("jpg", b"")])
        for key in ("a", "b"):
            with pytest.raises(TarError, match="earlier sample"):
                tar.add(key, [("json", b"")])


def test_refused_sample_leaves_no_trace() -> None:
    sink = io.BytesIO()
    with TarWriter(sink) as tar:
        for key, fields in GOLDEN:
            with pytest.raises(TarError):
                tar.add(key, [("jpg", b"never seen"), ("x" * 101, b"")])
            tar.add(key, fields.items())
        tar.finish()
    assert tar.digest == blake3(sink.getvalue()).hexdigest()


# Failure.


class FullSink:
    """Takes one block, then fails as a full disk does."""

    def __init__(self) -> None:
        self.blocks = 0

    def write(self, data: bytes | memoryview, /) -> None:
        self.writelines([data])

    def writelines(self, _pieces: Sequence[bytes | memoryview], /) -> None:
        self.blocks += 1
        if self.blocks > 1:
            raise StoreError("the disk is full")


def test_failing_sink_surfaces_and_leaves_no_thread() -> None:
    def fill() -> None:
        with TarWriter(FullSink()) as tar:
            for added in range(12):
                tar.add(f"{added:04d}", [("jpg", bytes(1 << 20))])

    with pytest.raises(StoreError, match="the disk is full"):
        fill()
    assert not tar_threads()


# Oracles.

CHARS = st.characters(codec="utf-8", exclude_characters="./\0", exclude_categories=["Cc"])
KEYS = st.lists(st.text(CHARS, min_size=1, max_size=12), min_size=1, max_size=3).map("/".join)
FIELDS = st.sampled_from(["jpg", "json", "txt", "latent.npy", "emb.npy", "cls"])
SIZES = st.sampled_from([0, 0, 1, 511, 512, 513, 1024, 1025, 20_000])
BYTES = st.builds(lambda size, byte: bytes([byte]) * size, SIZES, st.integers(0, 255))
SAMPLES = st.dictionaries(
    KEYS.filter(lambda key: not key.startswith("__")),
    st.dictionaries(FIELDS, BYTES, min_size=1, max_size=4),
    min_size=1,
    max_size=6,
)


@settings(max_examples=50, deadline=None)
@given(SAMPLES)
def test_tarfile_and_our_reader_read_any_samples_back(samples: dict[str, dict[str, bytes]]) -> None:
    data, written = write_tar(list(samples.items()))
    wanted = {f"{k}.{f}": v for k, fields in samples.items() for f, v in fields.items()}
    with tarfile.open(fileobj=io.BytesIO(data), errorlevel=2) as tar:
        found = {info.name: tar.extractfile(info) for info in tar}
        assert {name: file.read() for name, file in found.items() if file} == wanted
    ours = list(read_samples(tape_of(data), "it"))
    assert [(s.key, s.fields) for s in ours] == list(samples.items())
    assert (*(s.start for s in ours), len(data) - 1024) == decode_index(written.index, "it")


def test_what_ustar_cannot_hold_is_refused() -> None:
    assert len(header("f" * 155 + "/" + "n" * 100, MAX_MEMBER_NBYTES)) == 512
    with pytest.raises(TarError, match="8 GiB"):
        header("a.jpg", MAX_MEMBER_NBYTES + 1)
    for name in ("n" * 101, "f" * 156 + "/n", "ü" * 51):
        with pytest.raises(TarError, match="too long"):
            header(name, 0)
