"""Tars of strangers: headers that lie, whose sums are right, and every kind of member there is."""

import contextlib
import gzip
import io
import json
import tarfile
from pathlib import Path
from random import Random

import wdsprep
from tests.kit.fuzz.cases import TOY, Kind, Run, command, library, serve
from tests.kit.fuzz.mutations import mutate
from tests.kit.packs import BUCKETS, jpeg

BLOCK = 512
FORMS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
FIELDS = ((0, 100), (100, 8), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155))
"""Where a header has its name, mode, size, kind, target, magic and prefix, and how long."""
VALUES = (
    *(b"", b"\0", b"7" * 11, b"-1", b"99999999999", b"\xff" * 12, b"\x80" + b"\xff" * 11, b" 12 "),
    *(b"\x80" + b"\0" * 7 + b"\x7f\xff\xff\xff", b"../../out", b"/etc/passwd", b"a" * 100, b".."),
    *(
        b"/",
        b"a//b",
        b"\n",
        b".jpg",
        b"x.",
        b"\x1b[2J",
        *(bytes([kind]) for kind in b"0123gxLKSX\xff"),
    ),
)
RECORDS = {  # of PAX
    "path": ("../../out.jpg", "/etc/passwd", "a\nb.jpg", "x" * 5000, ""),
    "linkpath": ("/etc/passwd", "../..", "0.jpg", ""),
    "size": ("-1", "0", str(10**18), str(2**63), "9" * 4000, "1e9", " 7 "),
    "GNU.sparse.map": ("0,10", "0,1000000000000", "x"),
    "GNU.sparse.realsize": (str(10**15), "x"),
    "GNU.sparse.major": ("1", "9" * 50),
    "hdrcharset": ("BINARY", "x"),
    "mtime": ("nan", "1e400"),
}


class Member(tarfile.TarInfo):
    """A member with its bytes."""

    data = b""


def _make(_sound: Path, place: Path, rng: Random) -> None:
    """Write two tars: one as the format has it, and one with odd members."""
    place.mkdir()
    (place / "0.tar").write_bytes(tar_of(samples(0, 3), tarfile.USTAR_FORMAT))
    (place / "1.tar").write_bytes(tar_of(samples(3, 3), rng.choice(FORMS)))


def samples(first: int, count: int) -> list[Member]:
    """Return the members of so many samples."""
    found = []
    for number in range(first, first + count):
        said = {"caption": f"picture {number}", "width": number}
        for ending, data in (
            ("jpg", jpeg(number)),
            ("txt", b"picture"),
            ("json", json.dumps(said).encode()),
        ):
            info = Member(f"{number:04d}.{ending}")
            info.size, info.data = len(data), data
            found.append(info)
    return found


def tar_of(members: list[Member], form: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for info in members:
            tar.addfile(info, io.BytesIO(info.data))
    return out.getvalue()


def _change_members(place: Path, rng: Random) -> str:
    """Write a tar with links, devices, long names and PAX records of any kind."""
    members = samples(3, 4)
    for _ in range(rng.randint(1, 3)):
        info = rng.choice(members)
        way = rng.randrange(4)
        if way == 0:
            info.type = rng.choice((b"1", b"2", b"3", b"5", b"L", b"S", b"x", b"\xff"))
            info.linkname = rng.choice(("0003.jpg", "/etc/passwd", "../..", info.name))
        elif way == 1:
            name = rng.choice([*RECORDS])
            info.pax_headers = {**info.pax_headers, name: rng.choice(RECORDS[name])}
        elif way == 2:
            info.name = rng.choice(("../../out.jpg", "/abs.jpg", "x" * 300 + ".jpg", ".jpg"))
        else:
            members.insert(rng.randrange(len(members)), rng.choice(members))
    data = b""
    for form in (rng.choice(FORMS), tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with contextlib.suppress(ValueError, OverflowError):  # what tarfile does not write
            data = tar_of(members, form)
            break
    _write(place, data, rng)
    return "1.tar: members"


def _change_headers(place: Path, rng: Random) -> str:
    """Change fields of headers, and mend their sums."""
    data = bytearray((place / "1.tar").read_bytes())
    heads = [at for at in range(0, len(data), BLOCK) if data[at + 257 : at + 262] == b"ustar"]
    for _ in range(rng.randint(1, 3)):
        at, (start, length) = rng.choice(heads), rng.choice(FIELDS)
        value = rng.choice(VALUES)[:length].ljust(length, b"\0")
        data[at + start : at + start + length] = value
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + BLOCK])
    _write(place, bytes(data), rng)
    return "1.tar: headers"


def _change_bytes(place: Path, rng: Random) -> str:
    _write(place, mutate((place / "1.tar").read_bytes(), rng), rng)
    return "1.tar"


def _write(place: Path, data: bytes, rng: Random) -> None:
    """Write a tar, at times in gzip, which may be changed too, or joined with itself."""
    way = rng.random()
    if way < 0.1:
        data = gzip.compress(data)
    elif way < 0.15:
        data = mutate(gzip.compress(data), rng)
    elif way < 0.2:
        data += data
    (place / "1.tar").write_bytes(data)


def _runs(place: Path, out: Path) -> list[Run]:
    one = ("--workers", "1")
    return [
        command("pack", place, out, *one, *BUCKETS),
        command("pack", place / "1.tar", out, *one, *BUCKETS, "--samples-per-shard", "2"),
        command("index", place),
        command("encode", place, out, "--resolution", "32", *TOY),
        library("load(raw=)", lambda: _serve(place, raw=True)),
        library("load(pixels=)", lambda: _serve(place, pixels=32)),
    ]


def _serve(place: Path, **options: bool | int) -> None:
    index = command("index", place)
    if index.act() == 0:
        serve(wdsprep.load(place, global_batch=2, **options))  # type: ignore[arg-type]


KINDS = tuple(
    Kind(name=f"tar-{name}", make=_make, change=change, runs=_runs, most=4, is_ours=True)
    for name, change in (
        ("members", _change_members),
        ("headers", _change_headers),
        ("bytes", _change_bytes),
    )
)
