"""What fp32 means in a process: whole, or TF32 in convolutions, whatever its trainer has allowed.

TF32 has the range of fp32 and a mantissa of 10 bits. Whether it is used is a setting of the whole
process, so it is changed around our own work alone, and put back. Meanwhile it holds for the
trainer's fp32 too, and what it has compiled may be compiled once more. TF32 in convolutions alone
is what torch does by default, so most trainers notice nothing of it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from wdsprep.encoding import TF32


class _Fp32:
    """A context in which fp32 is computed in a chosen way.

    Any number of threads may be in it together. One that wants the other way waits for them, or the
    bits of a result would depend on who came first. The last one restores the settings.
    """

    def __init__(self) -> None:
        self._left = threading.Condition()
        self._inside = 0
        self._has_tf32 = False
        self._before: list[str | bool] = []

    @contextlib.contextmanager
    def __call__(self, *, tf32: bool) -> Iterator[None]:
        """Let convolutions use TF32 in this context, or nothing at all."""
        with self._left:
            self._left.wait_for(lambda: not self._inside or self._has_tf32 is tf32)
            if not self._inside:
                self._has_tf32 = tf32
                name, operators = _settings(tf32=tf32)
                self._before = [getattr(operator, name) for operator, _ in operators]
                for operator, value in operators:
                    setattr(operator, name, value)
            self._inside += 1
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                if not self._inside:
                    name, operators = _settings(tf32=tf32)
                    for (operator, _), value in zip(operators, self._before, strict=True):
                        _restore_setting(operator, name, value)
                    self._left.notify_all()


def _restore_setting(operator: Any, name: str, value: str | bool) -> None:
    """Restore a setting of an operator.

    If it equals the common setting, the operator follows that again and has none of its own.
    """
    if name == "fp32_precision":
        operator.fp32_precision = "none"
        if operator.fp32_precision == value:
            return
    setattr(operator, name, value)


def _settings(*, tf32: bool) -> tuple[str, list[tuple[Any, str | bool]]]:
    """Return the name of the setting, and the operators to set, each with its value.

    Settings of single operators override common ones. Both operators of cuDNN are set, since torch
    refuses to tell `allow_tf32` if they differ. Until torch 2.9 there was only `allow_tf32`.
    """
    backends: Any = torch.backends
    if not hasattr(backends.cudnn, "conv"):
        return "allow_tf32", [(backends.cuda.matmul, False), (backends.cudnn, tf32)]
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    of_cudnn = "tf32" if tf32 else "ieee"
    return "fp32_precision", [
        (backends.cuda.matmul, "ieee"),
        (mkldnn.matmul, "ieee"),
        (mkldnn.conv, "ieee"),
        (cudnn.conv, of_cudnn),
        (cudnn.rnn, of_cudnn),
    ]


_fp32 = _Fp32()
Precision = Callable[[], "contextlib.AbstractContextManager[None]"]
whole_fp32: Precision = partial(_fp32, tf32=False)


def precision_of(dtype: str) -> Precision:
    """Return the context in which a network of a dtype computes; half precision needs none."""
    if dtype in (TF32, "fp32"):
        return partial(_fp32, tf32=dtype == TF32)
    return contextlib.nullcontext
