"""A network that is compiled for each shape that it is given.

By default, torch.compile compiles a function eight times at most, and computes all further shapes
uncompiled without telling the user (an aspect-ratio list has 40). The number of variants is known
here: each shape in batches of the full size, of half of it and so on, and each once more if another
thread meanwhile changes what fp32 means in this process (`precision`).
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wdsprep.encoding.models.batch_size import MAX_BATCH

PER_SHAPE = 2 * MAX_BATCH.bit_length()
NAMES = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
OLD_NAMES = ("cache_size_limit", "accumulated_cache_size_limit", "fail_on_cache_limit_hit")
"""The limits for one function and for all together, and whether exceeding them is an error."""
_log = logging.getLogger("wdsprep")


class CompiledNetwork:
    """A network that is compiled for a given number of shapes, and computes others uncompiled."""

    def __init__(self, network: nn.Module, shapes: int) -> None:
        self._network, self._most = network, shapes * PER_SHAPE
        self._compiled = torch.compile(network, dynamic=False)
        self._uncompiled: set[torch.Size] = set()

    def __call__(self, batch: Tensor) -> Any:
        if batch.shape not in self._uncompiled:
            try:
                with _limit_variants(self._most):
                    return self._compiled(batch)
            except Exception as error:
                if not type(error).__name__.endswith("LimitHit"):
                    raise
                self._warn_once(batch.shape)
        return self._network(batch)

    def _warn_once(self, shape: torch.Size) -> None:
        if not self._uncompiled:
            shown = "x".join(map(str, shape))
            _log.warning(
                "--compile: %d variants are compiled, so batches of further shapes (%s) are "
                "computed uncompiled, which is slower",
                self._most,
                shown,
            )
        self._uncompiled.add(shape)


@contextlib.contextmanager
def _limit_variants(variants: int) -> Iterator[None]:
    """Let torch compile a function into a number of variants, and raise an error beyond it.

    A trainer in this process keeps its own limits, which had other names in torch 2.6.
    """
    config: Any = torch._dynamo.config
    names = NAMES if hasattr(config, NAMES[0]) else OLD_NAMES
    limits = {name: max(variants, getattr(config, name)) for name in names[:2]}
    with config.patch({**limits, names[2]: True}):
        yield
