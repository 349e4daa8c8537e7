"""A sample that somebody made oddly is a reject: it ends no import, and takes no memory."""

import io
import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wdsprep
from tests.kit.mds import write_mds
from tests.kit.packs import tar_bytes
from tests.kit.paths import ROOT
from wdsprep.importing.column_arrays import array_of
from wdsprep.importing.column_names import CachedColumn

SHAPE = (4, 8, 8)
GOOD = np.arange(256, dtype="<f4").reshape(SHAPE)


def npy(array: Any = GOOD, **options: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


def npy_with(shape: str, dtype: str = "'<f4'") -> bytes:
    """A small file whose header claims another shape or dtype."""
    header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(1024)


def pth(tensor: Any) -> bytes:
    out = io.BytesIO()
    torch.save(tensor, out)
    return out.getvalue()


def zipped_pth() -> bytes:
    """What torch saves of 96 MB of zeros, compressed to a few hundred kB."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(pth(torch.zeros(24 << 20)))) as saved,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as small,
    ):
        for name in saved.namelist():
            small.writestr(name, saved.read(name))
    return out.getvalue()


class Code:
    def __reduce__(self) -> Any:
        return print, ("this ran",)


class Long:
    def __reduce__(self) -> Any:
        return bytearray, (10**15,)


ODD_NPY = {
    "huge": npy_with("(99999999999, 8, 8)"),
    "huge-and-empty": npy_with("(0, 99999999999)"),
    "overflowing": npy_with(f"({2**62}, {2**62})"),
    "negative": npy_with("(-4, -8, 8)"),
    "no-number": npy_with("(4, 'x')"),
    "many-sides": npy_with(f"({'1, ' * 100})"),
    "no-sides": npy_with("()"),
    "objects": npy_with("(4, 8, 8)", "'|O'"),
    "fields": npy_with("(4, 8, 8)", "[('a', '<f4')]"),
    "zero-wide": npy_with("(4, 8, 8)", "'<V0'"),
    "complex": npy(GOOD.astype(np.complex64)),
    "texts": npy(np.full(SHAPE, "x")),
    "cut": npy()[:-1],
    "cut-in-its-header": npy()[:40],
    "deep": npy_with(f"{'-' * 9000}1"),
    "brackets": npy_with(f"{'(' * 4000}{')' * 4000}"),
    "version-9": b"\x93NUMPY\x09\x00" + npy()[8:],
    "nothing": b"",
    "other": b"no array",
}
ODD_PTH: dict[str, Callable[[], bytes]] = {
    "float8": lambda: pth(torch.zeros(SHAPE).to(torch.float8_e4m3fn)),
    "quantised": lambda: pth(torch.quantize_per_tensor(torch.zeros(SHAPE), 0.1, 0, torch.qint8)),
    "meta": lambda: pth(torch.zeros(SHAPE, device="meta")),
    "sparse": lambda: pth(torch.zeros(SHAPE).to_sparse()),
    "complex": lambda: pth(torch.zeros(SHAPE, dtype=torch.complex64)),
    "stride-0": lambda: pth(torch.zeros(1).expand(60_000, 60_000)),
    "cut": lambda: pth(torch.zeros(SHAPE))[:-100],
    "no-numbers": lambda: pth(torch.zeros(0)),
    "list": lambda: pth([torch.zeros(SHAPE)]),
    "code": lambda: pth({"x": Code()}),
    "long": lambda: pth(Long()),
    "bomb": zipped_pth,
    "other": lambda: b"no tensor",
}


def write_tar(folder: Path, name: str, arrays: dict[str, bytes]) -> None:
    """Write a cache of one tar, whose samples have the member `name`."""
    folder.mkdir()
    members = [(f"{key}.{name}", data) for key, data in arrays.items()]
    (folder / "x.tar").write_bytes(tar_bytes(members))


def import_odd(cache: Path, name: str, good: bytes, odd: dict[str, bytes]) -> list[dict[str, str]]:
    """Return the rejects of an import of good samples around odd ones, which are all of these."""
    write_tar(cache, name, {"a": good, **odd, "z": good})
    out = cache.with_name("out")
    assert wdsprep.import_(cache, out, resolution=64).manifest.samples == 2
    assert not wdsprep.verify(str(out)).findings
    (path,) = (out / "rejects").rglob("*.jsonl")
    rejects = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(reject["key"] for reject in rejects) == sorted(odd)
    return rejects


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("form", ["npy", "pth"])
def test_each_odd_array_is_a_reject_and_the_rest_is_taken(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = ODD_NPY if form == "npy" else {kind: make() for kind, make in ODD_PTH.items()}
    good = npy() if form == "npy" else pth(torch.tensor(GOOD))
    for reject in import_odd(tmp_path / "cache", f"latent.{form}", good, odd):
        assert reject["code"] in ("unreadable", "other_shape"), reject
        assert "a bug" not in reject["detail"], reject
        assert len(reject["detail"]) < 300, reject
    assert "this ran" not in capsys.readouterr().out


LITTLE_MEMORY = """
import resource, sys, wdsprep, torch, pyarrow.parquet, wdsprep.importing.worker
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 500_000_000,) * 2)
for name in ("npy", "pth"):
    place = sys.argv[1] + "/" + name
    print(wdsprep.import_(place, place + "-out", resolution=64).manifest.samples)
"""


@pytest.mark.system
def test_what_an_array_claims_takes_no_memory(tmp_path: Path) -> None:
    """Each asks for 14 GB or more; there are 0.5."""
    expanded = pth(torch.zeros(1).expand(60_000, 60_000))
    good = pth(torch.tensor(GOOD))
    for name, good_one, odd in (("npy", npy(), ODD_NPY["huge"]), ("pth", good, expanded)):
        arrays = {"a": good_one, "b": good_one, "c": odd}
        write_tar(tmp_path / name, f"latent.{name}", arrays)
    words = [sys.executable, "-c", LITTLE_MEMORY, str(tmp_path)]
    run = subprocess.run(words, check=False, cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert run.stdout.split() == ["2", "2"], run.stderr


def test_fortran_order_and_other_byte_order_are_taken() -> None:
    for form in (np.asfortranarray(GOOD), GOOD.astype(">f4")):
        array = array_of(CachedColumn(role="latent", name="latent.npy"), npy(form))
        assert (array.dtype.str, array.tolist()) == ("<f4", GOOD.tolist())


def of_mds(code: int, shape: tuple[int, ...], data: bytes) -> bytes:
    """An array as MDS has it: its dtype, how many sides of how many bytes, the sides, values."""
    return struct.pack(f"<BB{len(shape)}I", code, len(shape) * 4 + 2, *shape) + data


FLOAT32 = 34
GOOD_ROW = [of_mds(FLOAT32, SHAPE, GOOD.tobytes()), b"a picture", b"5", b"{}"]
MDS = {"latent": "ndarray", "caption": "str", "width": "str_int", "more": "json"}
ODD_ROWS = {
    "unknown-dtype": {0: of_mds(99, SHAPE, GOOD.tobytes())},
    "empty-array": {0: b""},
    "no-values": {0: of_mds(FLOAT32, (0, 8, 8), b"")},
    "huge-array": {0: of_mds(FLOAT32, (2**31, 2**31), b"1234")},
    "wide-sides": {0: bytes([FLOAT32, 255]) + bytes(100)},
    "no-utf-8": {1: b"\xff\xfe"},
    "no-number": {2: b"five"},
    "long-number": {2: b"9" * 5000},
    "deep-json": {3: b"[" * 100_000 + b"]" * 100_000},
    "no-json": {3: b"{"},
}


def test_each_odd_sample_of_mds_is_a_reject_and_the_rest_is_taken(tmp_path: Path) -> None:
    odd = [[row.get(n, value) for n, value in enumerate(GOOD_ROW)] for row in ODD_ROWS.values()]
    write_mds(tmp_path / "mds", MDS, [*odd, GOOD_ROW, GOOD_ROW])
    imported = wdsprep.import_(tmp_path / "mds", tmp_path / "out", resolution=64)
    assert imported.manifest.samples == 2
    assert imported.manifest.rejects == {"bad_json": 2, "other_shape": 1, "unreadable": 7}
    (path,) = (tmp_path / "out/rejects").rglob("*.jsonl")
    assert "a bug" not in path.read_text()


def test_lengths_that_are_not_a_samples_own_are_its_reject(tmp_path: Path) -> None:
    place = write_mds(tmp_path / "mds", MDS, [GOOD_ROW] * 3)
    path = place / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    second = struct.unpack_from("<I", data, 8)[0]
    data[second : second + 4] = struct.pack("<I", 2**31)
    path.write_bytes(data)
    imported = wdsprep.import_(place, tmp_path / "out", resolution=64)
    assert (imported.manifest.samples, imported.manifest.rejects) == (2, {"unreadable": 1})


def test_a_member_that_is_too_large_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("wdsprep.importing.latent_caches.MAX_NBYTES", 2000)
    odd = {"b": npy(np.zeros(1000))}
    (reject,) = import_odd(tmp_path / "cache", "latent.npy", npy(), odd)
    assert reject["code"] == "too_many_bytes"
    assert "latent.npy has 8,128 bytes, more than 2,000" in reject["detail"]
