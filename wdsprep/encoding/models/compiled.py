"""A network that is compiled for each shape that it is given.

Without more, torch.compile compiles a function eight times at most, and computes all further shapes
without it and without a word to the user (an aspect-ratio list has 40). How many there may be is
known here: each shape in batches of the full size, of half of it and so on, and each once more
where another thread changes meanwhile what fp32 means in this process (`precision`).
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
"""The limits for one function and for all together, and whether more are an error."""
_log = logging.getLogger("wdsprep")


class CompiledNetwork:
    """A network for batches of so many shapes, and as many others as torch allows."""

    def __init__(self, network: nn.Module, shapes: int) -> None:
        self._network, self._most = network, shapes * PER_SHAPE
        self._compiled = torch.compile(network, dynamic=False)
        self._uncompiled: set[torch.Size] = set()

    def __call__(self, batch: Tensor) -> Any:
        if batch.shape not in self._uncompiled:
            try:
                with _at_most(self._most):
                    return self._compiled(batch)
            except Exception as error:
                if not type(error).__name__.endswith("LimitHit"):
                    raise
                self._say(batch.shape)
        return self._network(batch)

    def _say(self, shape: torch.Size) -> None:
        if not self._uncompiled:
            shown = "x".join(map(str, shape))
            _log.warning(
                "--compile: %d variants are compiled, so batches of further shapes (%s) are "
                "computed without: slower",
                self._most,
                shown,
            )
        self._uncompiled.add(shape)


@contextlib.contextmanager
def _at_most(variants: int) -> Iterator[None]:
    """Let torch compile a function so often, and raise an error instead of more.

    A trainer in this process keeps its own limits. In torch 2.6 they had other names.
    """
    config: Any = torch._dynamo.config
    names = NAMES if hasattr(config, NAMES[0]) else OLD_NAMES
    limits = {name: max(variants, getattr(config, name)) for name in names[:2]}
    with config.patch({**limits, names[2]: True}):
        yield
