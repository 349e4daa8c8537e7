"""The datasets of a report or a card: at most one of images, and latents, text or scores of them.

`open_all` opens them and refuses what does not belong together, and `check_output` says where a
report may be written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from wdsprep.dataset.buckets import buckets_encoded
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.receipts import Receipt, Shard
from wdsprep.dataset.score_columns import SCORES, columns_of
from wdsprep.dataset.score_reader import open_shard
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.dataset.stored_dataset import open_dataset, refresh_manifest
from wdsprep.errors import NotFoundError, UsageError
from wdsprep.reporting.overview import overview
from wdsprep.store import open_store, split_url
from wdsprep.store.base import Store, absolute, is_web
from wdsprep.store.schemes import WRITABLE_PLACE

NAME = "wdsprep report"
MARK = f" · {NAME}</title>".encode()
"""The text near the start of each report that distinguishes it from other pages."""
HEAD_NBYTES = 1 << 16
KEPT = 16
"""The shards whose readers are kept: samples are read in the order of shards."""


@dataclass(frozen=True, kw_only=True)
class ReportDataset:
    """One dataset of a report. `shown` is its path as the user gave it."""

    shown: str
    store: Store
    manifest: Manifest

    @property
    def is_of_images(self) -> bool:
        return self.manifest.dataset == "images"

    @property
    def has_latents(self) -> bool:
        return self.manifest.kind == "latents"

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns of scores, with the kind of value that each holds."""
        return columns_of(self.manifest.settings)

    @property
    def label(self) -> str:
        """Return the name of latents, text or scores in a report, such as `latents 256`."""
        if self.manifest.is_scored:
            return SCORES
        if self.manifest.is_of_text:
            return "text"
        return f"latents {self.manifest.settings['resolution']}"

    @cached_property
    def overview(self) -> dict[str, Any]:
        """Return the facts that `inspect` shows too."""
        return overview(self.manifest)

    def encoded_buckets(self, images: "ReportDataset") -> tuple[int, ...]:
        """Return the buckets of a dataset of images that these latents are made of."""
        return buckets_encoded(self.manifest.settings, images.manifest.settings["buckets"])

    @cached_property
    def buckets(self) -> dict[str, list[Shard]]:
        """Return the shards by the folder that they are in."""
        shards: dict[str, list[Shard]] = {}
        for shard in self.manifest.shards:
            shards.setdefault(shard.name.partition("/")[0], []).append(shard)
        return shards

    @cached_property
    def open(self) -> Callable[[Shard], ShardReader]:
        """Return a function that opens a shard; the last ones are kept, as tables are read whole.

        It may be called by many threads.
        """
        settings = self.manifest.settings
        return lru_cache(KEPT)(lambda shard: open_shard(self.store, shard, settings))

    @cached_property
    def units(self) -> dict[str, Receipt]:
        return {receipt.unit: receipt for receipt in self.manifest.receipts}


class Datasets(NamedTuple):
    """The datasets of a report, sorted by kind. All but the images count as latents."""

    images: ReportDataset | None
    latents: tuple[ReportDataset, ...]

    @property
    def every(self) -> tuple[ReportDataset, ...]:
        return (*((self.images,) if self.images else ()), *self.latents)

    @property
    def title(self) -> str:
        """Return the paths of the datasets as the user gave them: `a, b and c`."""
        *names, last = [dataset.shown for dataset in self.every]
        return " and ".join(filter(None, (", ".join(names), last)))


def open_all(urls: Sequence[str]) -> Datasets:
    """Open the datasets of a report. An unfinished dataset is read as far as it has come.

    Raise UsageError if there is no dataset, if two are of images, or if one was made of other
    images than those of the report: keys may be the same in these, and the report would show the
    wrong pictures.
    """
    every = open_each(urls)
    images = [dataset for dataset in every if dataset.is_of_images]
    if not every:
        raise UsageError("nothing to report on: give the path or URL of a dataset")
    if len(images) > 1:
        names = " and ".join(dataset.shown for dataset in images)
        raise UsageError(f"{names} are both datasets of images: give a report one of them")
    latents = tuple(dataset for dataset in every if not dataset.is_of_images)
    for dataset in latents if images else ():
        made_of = dataset.manifest.image_digests()
        if made_of and made_of.isdisjoint(images[0].manifest.image_digests()):
            raise UsageError(
                f"{dataset.shown} was not made of {images[0].shown} as it is now: give it the "
                "images that it was made of, or a report of its own"
            )
    return Datasets(images[0] if images else None, latents)


def open_each(urls: Sequence[str]) -> tuple[ReportDataset, ...]:
    opened = ((url, *open_dataset(url)) for url in dict.fromkeys(urls))
    return tuple(
        ReportDataset(shown=url, store=store, manifest=refresh_manifest(store, manifest))
        for url, store, manifest in opened
    )


def check_output(output: str, datasets: Datasets, *, replaces: Callable[[], bool]) -> None:
    """Raise UsageError if a report must not be written to `output`.

    The name has to end in .html or .htm, and the place must be neither a web address nor within a
    dataset, where `verify` would find the report foreign. A file that is there has to be a report
    or empty, unless `replaces` returns true.
    """
    if not output.lower().endswith((".html", ".htm")):
        raise UsageError(f"-o {output}: give the report a name that ends in .html")
    check_folder(output, datasets.every, "report")
    store, name = split_url(output)
    try:
        start = store.read(name, nbytes=HEAD_NBYTES)
    except NotFoundError:
        return
    if start and MARK not in start and not replaces():
        raise UsageError(
            f"{output} exists already and is not a report: give another -o, or --yes to replace it"
        )


def check_folder(
    output: str, every: Sequence[ReportDataset], what: str, *, besides: Sequence[str] = ()
) -> None:
    """Raise UsageError if `output` is inside one of the datasets, or is a web address.

    Names in `besides` are allowed inside. `what` is the noun for the output in the message.
    """
    if is_web(output):
        raise UsageError(f"-o {output}: a web address is only read: give {WRITABLE_PLACE}")
    place = _folder(output)
    for dataset in every:
        folder = _folder(dataset.store.url)
        if f"{place}/".startswith(f"{folder}/") and place[len(folder) + 1 :] not in besides:
            raise UsageError(
                f"{output} is inside the dataset {dataset.shown}: write the {what} somewhere else"
            )


def _folder(url: str) -> str:
    return absolute(open_store(url).url).rstrip("/")
