"""The work of `import` as workers receive it, without the packages that a worker needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wdsprep.dataset.receipts import Settings
from wdsprep.importing.import_plan import ImportPlan
from wdsprep.importing.latent_caches import LatentCache

if TYPE_CHECKING:
    from wdsprep.importing.worker import ImportWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportWork:
    """The work of an import, which can be pickled.

    Its units are `ImageShard`s, each of which is a file of the cache.
    """

    cache: LatentCache
    plan: ImportPlan
    latents: str
    settings: Settings
    edition: str = ""
    """The mark of the dataset's edition."""
    caption_col: str = ""
    empty: Mapping[str, bytes] = field(default_factory=dict)
    """The arrays of the empty caption by the name of their member, if the user gives them."""

    def open(self) -> "ImportWorker":
        from wdsprep.importing.worker import ImportWorker  # torch: for workers alone

        return ImportWorker(self)
