"""A network that is compiled for each shape that it is given.

By default, torch.compile compiles a function eight times at most, and computes all further shapes
uncompiled without telling the user. Here it may be more: each shape of a run in batches of the full
size, of half of it and so on, and each once more if another thread meanwhile changes what fp32
means in this process (`precision`).
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from wdsprep.encoding.models.batch_size import MAX_BATCH
from wdsprep.encoding.models.load_networks import cause_of
from wdsprep.encoding.recipe_options import MOST_COMPILED
from wdsprep.errors import WorkError

MOST_VARIANTS = MOST_COMPILED * 2 * MAX_BATCH.bit_length()
NAMES = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
OLD_NAMES = ("cache_size_limit", "accumulated_cache_size_limit", "fail_on_cache_limit_hit")
"""The limits for one function and for all together, and whether exceeding them is an error."""
_log = logging.getLogger("wdsprep")


class CompiledNetwork:
    """A network that is compiled in up to MOST_VARIANTS, and computes other batches uncompiled."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._compiled = torch.compile(network, dynamic=False)
        self._uncompiled: set[torch.Size] = set()

    def __call__(self, batch: Tensor) -> Any:
        if batch.shape not in self._uncompiled:
            try:
                with _limit_variants(MOST_VARIANTS):
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
                MOST_VARIANTS,
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


def check_compiler(device: torch.device) -> None:
    """Raise WorkError if torch.compile does not work here, which the first batch would show else.

    Where networks take turns on a GPU, that would be in the middle of a shard.
    """
    try:
        torch.compile(nn.ReLU(), dynamic=False)(torch.ones(1, device=device))
    except Exception as error:
        cause = cause_of(getattr(error, "inner_exception", error))  # of what compiles for torch
        raise WorkError(
            f"--compile does not work here ({cause}): install a C++ compiler, and Triton "
            "for a GPU, or leave --compile out"
        ) from error
