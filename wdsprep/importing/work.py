"""What a worker of `import` is made from, without loading what it works with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wdsprep.dataset.receipts import Settings
from wdsprep.importing.cache import LatentCache
from wdsprep.importing.layout import ImportPlan

if TYPE_CHECKING:
    from wdsprep.importing.worker import ImportWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportWork:
    """The work of an import, which can be pickled.

    A unit is an `ImageShard` that is a file of the cache.
    """

    cache: LatentCache
    plan: ImportPlan
    latents: str
    settings: Settings
    edition: str = ""
    """The mark of the dataset's."""
    caption_col: str = ""
    empty: Mapping[str, bytes] = field(default_factory=dict)
    """The arrays of the empty caption by their members, where the user gives them."""

    def open(self) -> "ImportWorker":
        from wdsprep.importing.worker import ImportWorker  # torch: for workers alone

        return ImportWorker(self)
