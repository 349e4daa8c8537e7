"""Open the datasets of a report: at most one of images, and latents made of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wdsprep.dataset.buckets import buckets_encoded
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.receipts import Receipt, Shard
from wdsprep.dataset.score_columns import SCORES, columns_of
from wdsprep.dataset.stored_dataset import open_dataset, refresh_manifest
from wdsprep.errors import NotFoundError, UsageError
from wdsprep.reporting.overview import overview
from wdsprep.store import open_store, split_url
from wdsprep.store.base import Store, absolute, is_web
from wdsprep.store.schemes import ANY_PLACE

NAME = "wdsprep report"
MARK = f" · {NAME}</title>".encode()
"""The text near the start of each report that distinguishes it from other pages."""
HEAD_NBYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ReportDataset:
    """One dataset of a report. `shown` is its path as the user gave it."""

    shown: str
    store: Store
    manifest: Manifest

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def samples(self) -> int:
        return self.manifest.samples

    @property
    def nbytes(self) -> int:
        return self.manifest.nbytes

    @property
    def inputs(self) -> int:
        return self.manifest.inputs

    @property
    def rejected(self) -> int:
        return sum(self.manifest.rejects.values())

    @property
    def resolution(self) -> int:
        """Return the resolution at which latents were encoded."""
        return int(self.manifest.settings["resolution"])

    @property
    def is_of_text(self) -> bool:
        return self.manifest.is_of_text

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
        return "text" if self.is_of_text else f"latents {self.resolution}"

    @cached_property
    def overview(self) -> dict[str, Any]:
        """Return the facts that `inspect` shows too."""
        return overview(self.manifest)

    @property
    def shapes(self) -> dict[str, int]:
        """Return the number of samples of each shape, for latents of several shapes."""
        found: dict[str, int] = self.overview["shapes"]
        return found

    def encoded_buckets(self, images: "ReportDataset") -> tuple[int, ...]:
        """Return the buckets of a dataset of images that these latents are made of."""
        of, made = images.manifest.settings["buckets"], self.manifest.ledger.units()
        return buckets_encoded(self.manifest.settings, of, made=made)

    @cached_property
    def buckets(self) -> dict[str, list[Shard]]:
        """Return the shards by the folder that they are in."""
        found: dict[str, list[Shard]] = {}
        for shard in self.manifest.shards:
            found.setdefault(shard.name.partition("/")[0], []).append(shard)
        return found

    @cached_property
    def units(self) -> dict[str, Receipt]:
        return {receipt.unit: receipt for receipt in self.manifest.receipts}


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasets:
    """The datasets of a report, sorted by kind."""

    images: ReportDataset | None
    latents: tuple[ReportDataset, ...]

    @property
    def every(self) -> tuple[ReportDataset, ...]:
        return (*((self.images,) if self.images else ()), *self.latents)


def open_all(urls: Sequence[str]) -> Datasets:
    """Open the datasets of a report. An unfinished dataset is read as far as it has come.

    Raise UsageError if there is no dataset, if two are of images, or if one was made of other
    images than those of the report.
    """
    every = open_each(urls)
    images = [given for given in every if given.manifest.dataset == "images"]
    if not every:
        raise UsageError("nothing to report on: give the path or URL of a dataset")
    if len(images) > 1:
        names = " and ".join(given.shown for given in images)
        raise UsageError(f"{names} are both datasets of images: give a report one of them")
    latents = tuple(given for given in every if given.manifest.dataset != "images")
    for each in latents if images else ():
        _check_images(each, images[0])
    return Datasets(images=images[0] if images else None, latents=latents)


def _check_images(latents: ReportDataset, images: ReportDataset) -> None:
    """Raise UsageError if no shard of latents, text or scores was made of these images.

    Keys may be the same in other images, so the report would show the wrong pictures.
    """
    made_of = latents.manifest.image_digests()
    if made_of and made_of.isdisjoint(images.manifest.image_digests()):
        raise UsageError(
            f"{latents.shown} was not made of {images.shown} as it is now: give it the images that "
            "it was made of, or a report of its own"
        )


def open_each(urls: Sequence[str]) -> tuple[ReportDataset, ...]:
    return tuple(_open_dataset(url) for url in dict.fromkeys(urls))


def _open_dataset(url: str) -> ReportDataset:
    store, manifest = open_dataset(url)
    return ReportDataset(shown=url, store=store, manifest=refresh_manifest(store, manifest))


def check_output(output: str, datasets: Datasets, *, replaces: Callable[[], bool]) -> None:
    """Raise UsageError if a report must not be written to `output`.

    The name has to end in .html or .htm, and the place must be neither a web address nor within a
    dataset, where `verify` would find the report foreign. A file that is there has to be a report
    or empty, unless `replaces` returns true.
    """
    if not output.lower().endswith((".html", ".htm")):
        raise UsageError(f"-o {output}: give the report a name that ends in .html")
    check_folder(output, datasets.every, "report")
    if _is_foreign_file(output) and not replaces():
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
        raise UsageError(f"-o {output}: a web address is only read: give {ANY_PLACE}")
    where = _folder(output)
    for given in every:
        folder = _folder(given.url)
        if f"{where}/".startswith(f"{folder}/") and where[len(folder) + 1 :] not in besides:
            raise UsageError(
                f"{output} is inside the dataset {given.shown}: write the {what} somewhere else"
            )


def _is_foreign_file(output: str) -> bool:
    """Return whether a file exists that is neither a report nor empty."""
    store, name = split_url(output)
    try:
        start = store.read(name, nbytes=HEAD_NBYTES)
    except NotFoundError:
        return False
    return bool(start) and MARK not in start


def _folder(url: str) -> str:
    return absolute(open_store(url).url).rstrip("/")
