"""Two GPUs of which one is lost. There are none: workers compute on the CPU, all else is real."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.encodes import packed, pictures
from tests.kit.packs import tree
from tests.kit.scores import score_here
from tests.kit.scoring_models import small
from wdsprep.encoding import worker_plan
from wdsprep.encoding.worker_plan import Machine
from wdsprep.scoring.score import score
from wdsprep.scoring.work import ScoreWork

pytestmark = pytest.mark.system

SAMPLES, LOST_GPU, FAILS_FROM = 60, "1", 3


class WorkOnLostGpu(ScoreWork):
    """The work of `score`. On one GPU the third batch fails, and all after it.

    The other waits until then with its first batch, however long either takes to open.
    """

    __slots__ = ()

    def open(self) -> Any:
        from torch.nn.modules.module import register_module_forward_pre_hook
        from transformers import ViTForImageClassification

        batches, failed = 0, Path(self.images).with_name("failed")

        def hook(module: object, _inputs: object) -> None:
            nonlocal batches
            if isinstance(module, ViTForImageClassification):
                batches += 1
                is_lost = os.environ["CUDA_VISIBLE_DEVICES"] == LOST_GPU
                if is_lost and batches >= FAILS_FROM:
                    failed.touch()
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
                until = time.monotonic() + 120
                while not (is_lost or failed.exists()) and time.monotonic() < until:
                    time.sleep(0.01)

        register_module_forward_pre_hook(hook)
        return ScoreWork.open(replace(self, device="cpu"))


def test_a_lost_gpu_costs_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    images = packed(pictures(tmp_path / "in", range(SAMPLES)), tmp_path / "images")
    model = small("vit", tmp_path / "vit")
    wish: dict[str, Any] = {"model": str(model), "dtype": "fp32", "batch_size": 4}
    score_here(images, tmp_path / "undisturbed", **wish)
    monkeypatch.setattr("wdsprep.scoring.score.ScoreWork", WorkOnLostGpu)
    monkeypatch.setattr(worker_plan, "this_machine", lambda _d: Machine(cpus=2, gpus=("0", "1")))
    outcome = score(str(images), str(tmp_path / "out"), runner="local", **wish)
    assert (outcome.samples, outcome.quarantined) == (SAMPLES, ())
    assert "illegal memory access" in caplog.text
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")
