"""Stand-ins for the functions of `torch.cuda`, for decisions that are made where there is a GPU."""

from typing import Any

import pytest
import torch


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Have functions of `torch.cuda` return these answers, or take other functions for them."""
    for name, answer in answers.items():
        own = answer if callable(answer) else lambda *_, answer=answer: answer
        monkeypatch.setattr(torch.cuda, name, own)
