"""The batch that a loader yields: a dict that a DataLoader does not make batches of again.

`DataLoader(loader)` and `DataLoader(loader, batch_size=4)` would stack whole batches to arrays of
one more dimension, and train on them without a word. torch asks `default_collate_fn_map` how a type
is put together, and this one refuses. `batch_size=None` takes batches as they are, and never asks.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

from torch.utils import _pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from wdsprep.errors import UsageError


class WholeBatch(dict[str, Any]):
    """A batch of a loader, which a DataLoader must not join with others."""


def _refuse(_batches: object, **_: object) -> NoReturn:
    raise UsageError(
        "a loader's batches are whole already: give DataLoader(loader, batch_size=None), and "
        "their size as global_batch= to wdsprep.load"
    )


def _flatten(batch: WholeBatch) -> tuple[list[Any], list[str]]:
    return list(batch.values()), list(batch)


def _unflatten(values: Iterable[Any], names: Any) -> WholeBatch:
    return WholeBatch(zip(names, values, strict=True))


default_collate_fn_map[WholeBatch] = _refuse
_pytree.register_pytree_node(WholeBatch, _flatten, _unflatten)  # as a dict is
