"""Whole fp32, without TF32, in a process whose trainer may have allowed TF32.

TF32 has the range of fp32 and a mantissa of 10 bits. Whether it is used is a setting of the whole
process, so it is changed around our own work alone, and put back. Meanwhile the trainer's fp32 is
exact too, and what it has compiled may be compiled once more.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch


class _WholeFp32:
    """A context in which fp32 is computed whole, without TF32.

    The settings are restored when the last of the threads in it has left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: list[str | bool] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                name, exact, operators = _settings()
                self._before = [getattr(each, name) for each in operators]
                for each in operators:
                    setattr(each, name, exact)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    name, _, operators = _settings()
                    for each, value in zip(operators, self._before, strict=True):
                        _restore_setting(each, name, value)


def _restore_setting(operator: Any, name: str, value: str | bool) -> None:
    """Restore a setting of an operator.

    If it equals the common setting, the operator follows that again and has none of its own.
    """
    if name == "fp32_precision":
        operator.fp32_precision = "none"
        if operator.fp32_precision == value:
            return
    setattr(operator, name, value)


def _settings() -> tuple[str, str | bool, list[Any]]:
    """Return the name of the setting, its value for whole fp32, and the operators to set.

    Settings of single operators override common ones. Both operators of cuDNN are set, since torch
    refuses to tell `allow_tf32` if they differ. Until torch 2.9 there was only `allow_tf32`.
    """
    backends: Any = torch.backends
    if not hasattr(backends.cudnn, "conv"):
        return "allow_tf32", False, [backends.cuda.matmul, backends.cudnn]
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    operators = [backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv]
    return "fp32_precision", "ieee", operators


whole_fp32 = _WholeFp32()
