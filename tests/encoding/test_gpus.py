"""GPUs that the driver has and torch cannot use, by a stub of the driver's library."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.kit.encodes import packed, pictures
from tests.kit.gpus import pretend_cuda
from wdsprep.encoding import gpus
from wdsprep.errors import UsageError, WorkError

STUB = """
int cuInit(unsigned flags) {{ return {code}; }}
int cuDriverGetVersion(int *version) {{ *version = 11040; return 0; }}
int cuDeviceGetCount(int *count) {{ *count = {count}; return 0; }}
"""

needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


def stub_driver(folder: Path, *, code: int = 0, count: int = 1) -> Path:
    """Make a libcuda that says how CUDA begins, and how many GPUs there are."""
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(STUB.format(code=code, count=count))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@needs_compiler
@pytest.mark.parametrize(
    ("code", "count", "visible", "is_refused"),
    [
        (0, 2, None, True),
        (0, 2, "1", True),
        (802, 0, None, True),  # the fabric manager is down
        (100, 0, None, False),
        (0, 2, "", False),
        (0, 2, "-1", False),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_refused_unless_the_user_hides_it(
    code: int,
    count: int,
    visible: str | None,
    is_refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("The driver is too old (found version 11040). Please update it.")

    pretend_cuda(monkeypatch, is_available=False, init=fail)
    monkeypatch.setattr(gpus, "NVIDIA", str(stub_driver(tmp_path, code=code, count=count)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not is_refused:
        assert gpus.visible_gpus() == ()
        return
    with pytest.raises(UsageError, match=r"The driver is too old \(found version 11040\): install"):
        gpus.visible_gpus()


def test_a_file_of_a_gpu_speaks_for_one_though_its_library_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cuda(monkeypatch, is_available=False)
    monkeypatch.setattr(gpus, "NVIDIA", "libnone.so.1")
    monkeypatch.setattr(gpus, "NVIDIA_DEVICES", f"{tmp_path}/nvidia[0-9]*")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.visible_gpus() == ()
    (tmp_path / "nvidia0").touch()
    with pytest.raises(UsageError, match=r"--device cpu$"):
        gpus.visible_gpus()


def test_without_a_gpu_that_works_a_precision_is_chosen_without_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_available() -> bool:
        warnings.warn("CUDA initialization: the driver is too old", stacklevel=1)
        return False

    pretend_cuda(monkeypatch, is_available=is_available)
    monkeypatch.setattr(gpus, "has_driver", lambda: True)
    assert gpus.has_bf16()
    assert gpus.has_tf32()


def test_a_worker_that_was_promised_a_gpu_does_not_take_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_cuda(monkeypatch, is_available=False)
    gpus.require_gpu("cpu")
    with pytest.raises(WorkError, match=r"^torch .* cannot use the GPU of this machine: "):
        gpus.require_gpu("cuda")


SCRIPT = """
import sys, wdsprep
images, out = sys.argv[1:]
toy = wdsprep.Encode(resolution=64, model="tiny")
for use in (
    lambda: wdsprep.encode(images, out, resolution=64, model="tiny"),
    lambda: wdsprep.score(images, out, language=True),
    lambda: wdsprep.load(images, encode=toy, global_batch=1),
):
    try:
        print("done:", use())
    except wdsprep.errors.UsageError as error:
        print(error)
"""


@needs_compiler
@pytest.mark.system
def test_encode_score_and_load_refuse_in_one_line_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """With a driver that is too old for the torch that is installed."""
    images = packed(pictures(tmp_path / "in", range(3)), tmp_path / "images")
    env = {**os.environ, "LD_LIBRARY_PATH": str(stub_driver(tmp_path).parent)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(images), str(tmp_path / "out")],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    for line in lines:
        assert "cannot use the GPU of this machine: " in line
        assert line.endswith("or take the CPU, with --device cpu")
    assert not (tmp_path / "out").exists()
