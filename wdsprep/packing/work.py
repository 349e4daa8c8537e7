"""The picklable work of `pack`, without what its workers load."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wdsprep.dataset.receipts import Settings
from wdsprep.fetch.options import FetchRules
from wdsprep.packing.options import PackRules
from wdsprep.sources.base import Source

if TYPE_CHECKING:
    from wdsprep.packing.worker import PackWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class PackWork:
    """The picklable description of a worker of `pack`, which a runner opens."""

    source: Source
    images: str
    rules: PackRules
    settings: Settings
    edition: str = ""
    """The mark of the dataset's edition."""
    generations: tuple[int, ...] = (0,)
    threads: int = 1
    """True if receipts record the content of their slices."""
    retries: frozenset[str] = frozenset()
    """The names of the retry slices that are known."""
    fetch_rules: FetchRules | None = None
    """The rules of downloads, for a table of URLs."""
    allowed_more: tuple[str, ...] = ()
    """The policies that these rules allow beyond the settings of the dataset."""

    def open(self) -> "PackWorker":
        from wdsprep.packing.worker import PackWorker  # images and the client: for workers alone

        return PackWorker(self)
