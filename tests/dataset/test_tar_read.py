"""The reader: any sound tar, whoever made it, and the precise name of any damage."""

import contextlib
import gzip
import os
import random
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.packs import tape_of, tar_bytes, write_tar
from wdsprep.dataset.chunks import LOCAL_CHUNK_NBYTES
from wdsprep.dataset.tar.members import (
    MAX_EXTENSION_NBYTES,
    MAX_PADDING_NBYTES,
    BadSampleError,
    decode_index,
    split_member,
)
from wdsprep.dataset.tar.read import (
    TarSample,
    file_tape,
    index_tar,
    open_unpacked_tape,
    read_samples,
    scan,
)
from wdsprep.dataset.tar.write import header
from wdsprep.store.local import LocalStore

CODES = {"truncated", "bad_header", "repeated_key", "scattered", "repeated_field"}
END = bytes(1024)
Files = list[tuple[str, bytes]]


def read(data: bytes) -> list[TarSample | BadSampleError]:
    return list(scan(tape_of(data)))


def outcome(data: bytes) -> list[object]:
    """The keys of sound samples, and (code, key) of bad ones."""
    return [f.key if isinstance(f, TarSample) else (f.code, f.key) for f in read(data)]


def contents(data: bytes) -> dict[str, dict[str, bytes]]:
    return {s.key: s.fields for s in read_samples(tape_of(data), "it")}


def member(name: str, data: bytes = b"data") -> bytes:
    return header(name, len(data)) + data + bytes(-len(data) % 512)


def fixed(head: bytes) -> bytes:
    """`head` with the checksum that its bytes call for."""
    total = sum(head[:148] + b" " * 8 + head[156:])
    return head[:148] + b"%06o\0 " % total + head[156:]


def patched(head: bytes, offset: int, data: bytes) -> bytes:
    return fixed(head[:offset] + data + head[offset + len(data) :])


SOUND, _ = write_tar(
    (f"{i:03d}", {"jpg": b"%d" % i * 700, "json": b"{}", "txt": b""}) for i in range(3)
)

# Sound tars of others.

PLAIN: Files = [("00000.jpg", b"image" * 300), ("00000.json", b"{}"), ("00001.jpg", b"")]
LONG: Files = [("d" * 90 + "/" + "n" * 90 + ".jpg", b"x" * 512), ("0.txt", b"short")]
LONGEST: Files = [("d" * 400 + "/" + "n" * 400 + ".jpg", b"x" * 513), ("0.txt", b"short")]
UNICODE: Files = [
    ("bücher/日本.jpg", b"x"),
    ("bücher/日本.txt", b"y"),
    ("\U0001f600" * 40 + ".j", b""),
]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("files", [PLAIN, LONG, LONGEST, UNICODE], ids=["plain", "l", "ll", "u"])
def test_tars_of_python(files: Files, form: int) -> None:
    if form == tarfile.USTAR_FORMAT and files in (LONGEST, UNICODE):
        files = [(name[-90:] if name[0] != "b" else name, data) for name, data in files]
        files = [f for f in files if len(f[0].encode()) < 100]
    wanted: dict[str, dict[str, bytes]] = {}
    for name, data in files:
        key, field = split_member(name) or ("", "")
        wanted.setdefault(key, {})[field] = data
    assert contents(tar_bytes(files, form)) == wanted
    assert contents(tar_bytes(files, form, mtime=1.5, uname="ü" * 20)) == wanted


@pytest.mark.parametrize("form", ["ustar", "gnu", "pax", "v7", "oldgnu"])
def test_tar_of_gnu_tar_with_folders_and_links(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "sub.d").mkdir(parents=True)
    for name in ("0.jpg", "0.txt", "sub.d/1.jpg", "readme", ".hidden", "._0.jpg"):
        (folder / name).write_bytes(name.encode())
    (folder / "2.jpg").symlink_to("0.jpg")
    os.link(folder / "0.jpg", folder / "3.jpg")
    command = ["tar", f"--format={form}", "--sort=name", "-cf", tmp_path / "a.tar", "."]
    subprocess.run(command, cwd=folder, check=True)
    data = (tmp_path / "a.tar").read_bytes()
    assert contents(data) == {
        "./0": {"jpg": b"0.jpg", "txt": b"0.txt"},
        "./sub.d/1": {"jpg": b"sub.d/1.jpg"},
    }
    linked = scan(tape_of(data), links=True)
    links = {s.key: s.unread for s in linked if isinstance(s, TarSample) and s.unread}
    assert links == {"./2": {"jpg": "0.jpg"}, "./3": {"jpg": "0.jpg"}}


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_links_are_told_by_whole_names(form: int) -> None:
    long = "d" * (90 if form == tarfile.USTAR_FORMAT else 200) + ".jpg"
    links = [(tarfile.LNKTYPE, long, long), (tarfile.SYMTYPE, "../b.jpg", "x/b.jpg")]
    tars = (
        tar_bytes([(f"./x/y/{number}.jpg", b"")], form, type=kind, linkname=target)
        for number, (kind, target, _) in enumerate(links)
    )
    samples = scan(tape_of(b"".join(tars)), links=True)
    found = [s.unread["jpg"] for s in samples if isinstance(s, TarSample) and s.unread]
    assert found == [target for _, _, target in links]


def test_size_in_base_256_and_other_old_habits() -> None:
    head = header("0.jpg", 4)
    sizes = (b"\x80" + bytes(10) + b"\4", b"         4 \0", b"00000000004 ", b"4\0         ")
    for size in sizes:
        assert contents(patched(head, 124, size) + b"data" + bytes(508) + END) == {
            "0": {"jpg": b"data"}
        }
    v7 = patched(patched(head, 257, bytes(8)), 156, b"\0")
    assert contents(v7 + b"data" + bytes(508) + END) == {"0": {"jpg": b"data"}}


# Damage.


def test_truncation_anywhere_is_named_and_costs_only_the_cut_sample() -> None:
    starts = [s.start for s in read_samples(tape_of(SOUND), "it")]
    ends = [*starts[1:], len(SOUND) - len(END)]
    cuts = {offset + more for offset in range(0, ends[-1], 512) for more in (0, 1, 511)}
    for cut in sorted(cuts | set(range(ends[-1], ends[-1] + 512))):
        # A sample is whole once a header behind it says so: until then it may go on.
        whole = [f"{i:03d}" for i, end in enumerate(ends) if cut >= end + 512]
        key = f"{len(whole):03d}" if cut >= 512 else ""
        assert outcome(SOUND[:cut]) == [*whole, ("truncated", key)]
        with pytest.raises(BadSampleError) as caught:
            index_tar(tape_of(SOUND[:cut]), "it")
        assert caught.value.code == "truncated"


def test_missing_end_marker_is_a_truncation_and_half_of_one_is_enough() -> None:
    assert outcome(SOUND[:-1024]) == ["000", "001", ("truncated", "002")]
    assert outcome(SOUND[:-512]) == ["000", "001", "002"]
    assert outcome(SOUND + bytes(10_000)) == ["000", "001", "002"]


def test_every_bit_flip_in_a_header_is_caught_or_harmless() -> None:
    sound = read(SOUND)
    start = next(s.start for s in sound if isinstance(s, TarSample) and s.key == "001")
    caught = 0
    for bit in range(512 * 8):
        flipped = bytearray(SOUND)
        flipped[start + bit // 8] ^= 1 << bit % 8
        found = read(bytes(flipped))
        if found != sound:
            caught += 1
            assert outcome(bytes(flipped)) == [("bad_header", "000")]
    assert caught > 500 * 8  # what is harmless sits in the checksum's own padding


def test_a_hole_of_zeros_is_not_the_end() -> None:
    second = next(s.start for s in read(SOUND)[1:] if isinstance(s, TarSample))
    holed = SOUND[:second] + bytes(4096) + SOUND[second + 4096 :]
    assert outcome(holed) == [("bad_header", "000")]
    assert outcome(SOUND + bytes(MAX_PADDING_NBYTES) + SOUND) == [
        *("000", "001"),
        ("bad_header", "002"),
    ]
    assert outcome(SOUND + b"x") == ["000", "001", ("bad_header", "002")]


@pytest.mark.parametrize("padding", [0, 512, 10_240, 100_352])
def test_tars_joined_by_cat_are_read_to_their_end(padding: int, tmp_path: Path) -> None:
    other = b"".join(map(member, ("a.jpg", "a.txt", "b.jpg"))) + END
    joined = SOUND + bytes(padding) + other + bytes(padding)
    assert outcome(joined) == ["000", "001", "002", "a", "b"]
    (tmp_path / "a.tar").write_bytes(joined)
    with file_tape(tmp_path / "a.tar") as tape:
        assert list(scan(tape)) == read(joined)
        offsets = decode_index(index_tar(tape, "it"), "it")
    for start, end, key in zip(offsets, offsets[1:], ("000", "001", "002", "a", "b"), strict=False):
        assert outcome(joined[start:end] + END) == [key]


@pytest.mark.parametrize("is_gzipped", [False, True])
def test_a_tar_of_many_chunks_is_read_whole_and_watched(tmp_path: Path, is_gzipped: bool) -> None:
    """Members lie across the ends of chunks, and one is longer than any chunk."""
    chance = random.Random(0)
    sizes = [300_000] * 9 + [3 * LOCAL_CHUNK_NBYTES, 1, LOCAL_CHUNK_NBYTES]
    files = [(f"{n:03d}.jpg", chance.randbytes(size)) for n, size in enumerate(sizes)]
    data = b"".join(member(*file) for file in files) + END
    data = gzip.compress(data, 1) if is_gzipped else data
    (tmp_path / "it").write_bytes(data)
    seen: list[bytes] = []
    with open_unpacked_tape(LocalStore(tmp_path), "it", watch=seen.append) as tape:
        found = [(f"{s.key}.jpg", s.fields["jpg"]) for s in read_samples(tape, "it")]
    assert found == files
    assert b"".join(seen) == data


def test_a_gzipped_tar_is_read_whatever_its_name_and_damage_to_it_is_named(tmp_path: Path) -> None:
    def zipped(data: bytes) -> list[object]:
        (tmp_path / "it").write_bytes(data)
        with open_unpacked_tape(LocalStore(tmp_path), "it") as tape:
            return [f.key if isinstance(f, TarSample) else f.code for f in scan(tape)]

    data = gzip.compress(SOUND, mtime=0)
    assert zipped(data) == zipped(SOUND) == ["000", "001", "002"]
    assert zipped(data + gzip.compress(b"".join(map(member, ["a.jpg"])) + END)) == [
        *("000", "001", "002", "a")
    ]
    assert zipped(data[:-30])[-1] == "truncated"
    assert zipped(data[:40] + b"\xff" * 40 + data[80:])[-1] == "bad_header"
    assert zipped(data + b"garbage")[-1] == "bad_header"


def test_what_is_not_wanted_is_not_read_but_told() -> None:
    names = ["a.jpg", "a.mov", "README", "b.txt", "b.jpg"]
    strays: list[str] = []
    found = scan(
        tape_of(b"".join(map(member, names)) + END),
        wants=lambda name, nbytes, before: name == "jpg" and nbytes == 4 and not before,
        stray=strays.append,
    )
    assert [(s.fields, s.unread) for s in found if isinstance(s, TarSample)] == [
        ({"jpg": b"data"}, {"mov": 4}),
        ({"jpg": b"data"}, {"txt": 4}),
    ]
    assert strays == ["README"]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a.jpg", "b.jpg", "a.jpg", "c.jpg"], ["a", "b", ("repeated_key", "a"), "c"]),
        (["a.jpg", "b.jpg", "a.txt", "c.jpg"], ["a", "b", ("scattered", "a"), "c"]),
        (["a.jpg", "a.txt", "a.jpg", "c.jpg"], [("repeated_field", "a"), "c"]),
        (["a.jpg", "a.JPG", "c.jpg"], [("repeated_field", "a"), "c"]),
        (["a.jpg", "readme", "a.txt"], ["a"]),
    ],
)
def test_members_out_of_place(names: list[str], found: list[object]) -> None:
    data = b"".join(map(member, names)) + END
    assert outcome(data) == found
    bad = [f[0] for f in found if isinstance(f, tuple)]
    if bad:
        with pytest.raises(BadSampleError, match=r"^shard 7: ") as caught:
            list(read_samples(tape_of(data), "shard 7"))
        assert caught.value.code == bad[0]


# Hostile headers.


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    data = b"".join(records)
    return (
        patched(member("pax", data), 0, b"")
        if not data
        else (patched(header("pax", len(data)), 156, kind) + data + bytes(-len(data) % 512))
    )


def record(keyword: bytes, value: bytes) -> bytes:
    nbytes = len(keyword) + len(value) + 3
    while len(b"%d" % nbytes) + len(keyword) + len(value) + 3 != nbytes:
        nbytes = len(b"%d" % nbytes) + len(keyword) + len(value) + 3
    return b"%d %b=%b\n" % (nbytes, keyword, value)


REST = member("0.jpg") + END


def test_pax_records_that_are_sound() -> None:
    path = record(b"path", b"f/new.name.jpg")
    assert outcome(pax(path) + REST) == ["f/new"]
    assert outcome(pax(record(b"mtime", b"1.5"), path, record(b"comment", b"=\n=")) + REST) == [
        "f/new"
    ]
    assert outcome(pax(record(b"comment", b"by git"), kind=b"g") + REST) == ["0"]
    assert contents(pax(record(b"size", b"3")) + REST) == {"0": {"jpg": b"dat"}}
    assert outcome(pax(path, kind=b"X") + REST) == ["f/new"]


@pytest.mark.parametrize(
    "records",
    [
        b"garbage",
        b"0 path=a\n",
        b"9 path=a\n7 path",
        b"99 path=a.jpg\n",
        b"8 path=a.jpg\n",
        b"5 path=a.jpg\n",
        b"-14 path=a.jpg\n",
        b"99999999999999999999 path=a\n",
        b"12 path=a.jp",
        record(b"size", b"-1"),
        record(b"size", b"1e3"),
        record(b"size", b""),
        record(b"size", b"9" * 5000),
        record(b"GNU.sparse.major", b"1"),
    ],
)
def test_malformed_pax_records_are_bad_headers(records: bytes) -> None:
    assert outcome(pax(records) + REST) == [("bad_header", "")]


GLOBAL_NAME = pax(record(b"path", b"a.jpg"), kind=b"g")
SPARSE = patched(header("0.jpg", 4), 156, b"S")


@pytest.mark.parametrize(
    "data", [b"<!DOCTYPE html>" * 99, b"\x1f\x8b\x08" * 999, b"0" * 512, GLOBAL_NAME, SPARSE]
)
def test_garbage_a_global_name_and_a_sparse_file_are_bad_headers(data: bytes) -> None:
    assert outcome(data + REST) == [("bad_header", "")]


def test_huge_extension_header_is_refused_unread() -> None:
    for kind in (b"x", b"L", b"K", b"g"):
        head = patched(header("pax", MAX_EXTENSION_NBYTES + 1), 156, kind)
        assert outcome(head + REST) == [("bad_header", "")]
        assert outcome(patched(header("pax", 4096), 156, kind) + REST[:512]) == [("truncated", "")]


HUGE = [
    b"\x80" + b"\x7f" * 11,
    b"\x80\0\0\0" + b"\x7f" + b"\xff" * 7,
    b"\x80\0\0\0\0\0\0\x40" + bytes(4),
    b"7" * 11 + b"\0",
    b"7" * 12,
]


@pytest.mark.parametrize("size", HUGE)
def test_claim_of_exabytes_is_a_truncation(size: bytes, tmp_path: Path) -> None:
    for name in ("1.jpg", "no sample"):
        data = REST[:-1024] + patched(header(name, 0), 124, size) + b"data" * 999
        key = "1" if name == "1.jpg" else "0"
        wanted = ["0", ("truncated", "1")] if key == "1" else [("truncated", "0")]
        assert outcome(data) == wanted
        (tmp_path / "a.tar").write_bytes(data)
        with file_tape(tmp_path / "a.tar") as tape:
            found = [f.code if isinstance(f, BadSampleError) else f.key for f in scan(tape)]
            assert found == [w[0] if isinstance(w, tuple) else w for w in wanted]
        with file_tape(tmp_path / "a.tar") as tape, pytest.raises(BadSampleError):
            index_tar(tape, "it")
    assert outcome(pax(record(b"size", b"9" * 20)) + REST) == [("truncated", "0")]


@pytest.mark.parametrize(
    "size",
    [
        b"-0000001000\0",
        b"-1         \0",
        b"\xff" * 12,
        b"\xff" * 11 + b"\0",
        b"\x81" + bytes(11),
        b"00000000x00\0",
        b"00000000008\0",
        b"0x000000010\0",
    ],
)
def test_negative_or_absurd_size_is_a_bad_header(size: bytes) -> None:
    data = member("0.jpg") + patched(header("1.jpg", 0), 124, size) + REST
    assert outcome(data) == [("bad_header", "0")]


# Fuzz: whatever the bytes, samples and one of five codes come out, soon.

SEEDS = [
    SOUND,
    tar_bytes(LONGEST, tarfile.PAX_FORMAT, mtime=1.5),
    tar_bytes(LONGEST, tarfile.GNU_FORMAT),
    member("a.jpg") + patched(header("b.jpg", 0), 124, HUGE[0]) + END,
]


def harmless(data: bytes) -> None:
    started = time.monotonic()
    for found in read(data):
        assert isinstance(found, TarSample) or found.code in CODES
        if isinstance(found, TarSample):
            assert sum(map(len, found.fields.values())) <= len(data)
    with contextlib.suppress(BadSampleError):
        index_tar(tape_of(data), "it")
    assert time.monotonic() - started < 5


MUTATION = st.tuples(st.integers(0, 20), st.integers(0, 511), st.binary(min_size=1, max_size=12))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(SEEDS), st.lists(MUTATION, max_size=4), st.booleans())
def test_mutated_tars_do_no_harm(
    seed: bytes, edits: list[tuple[int, int, bytes]], sign: bool
) -> None:
    data = bytearray(seed)
    for block, offset, patch in edits:
        at = block % (len(data) // 512) * 512
        data[at + offset : at + offset + len(patch)] = patch[: 512 - offset]
        if sign:  # as an attacker would: with a checksum that holds
            data[at : at + 512] = fixed(bytes(data[at : at + 512]))
    harmless(bytes(data))
