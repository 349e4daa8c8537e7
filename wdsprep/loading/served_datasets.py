"""An opened dataset as it is served: its shards, the selected samples, a digest, the arrays.

A digest of what the shards hold identifies a dataset, not its place. So the state of a loader stays
valid when the dataset moves to another disk or bucket. Names and sizes identify tars without a
manifest.

Latent shards are identified by the image shards they were made from, and by how many samples these
gave. Both are known before anything is encoded. So latents that are made on the fly come in the
order of stored ones, as long as encoding rejects nothing. The settings say how latents are made,
and a state carries a fingerprint of them.

The order does not know shapes and conditions. For the order, a dataset is a number of samples in
each run of its selection, and a place is a run and a number in it. `selection.locate` finds that
place in the tars.

What is read of each dataset (`WantedArrays`) is decided before anything is read. A *slot* is the
number of a dataset among those that are joined: 0 is the first, which gives the order, and those
joined to it follow. Where captions are picked by chance, each *choice* has its own dataset for
everything that is made of captions.

`Substitutes` replaces samples that cannot be served by other samples. The substitute depends on
nothing but the damaged sample. So it is the same on every rank and in every run.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.damage import verify_step
from wdsprep.dataset.npy_arrays import LATENT, MASK, Field, fields_of, mirrored_name, text_fields
from wdsprep.dataset.random_numbers import Ints, key_of
from wdsprep.dataset.sample_selection import SampleSelection
from wdsprep.dataset.samples import role_of
from wdsprep.dataset.settings import columns_of
from wdsprep.dataset.shapes import Size, fields_in_shape, shape_name
from wdsprep.encoding.captions.options import EMPTY, OWN
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.loading.order.global_order import OrderStream
from wdsprep.loading.order.mixing import StreamAmount
from wdsprep.loading.sample_layout import batch_name
from wdsprep.store.base import Store
from wdsprep.text import command

if TYPE_CHECKING:
    from wdsprep.loading.join import JoinedDataset
    from wdsprep.tables.joined_columns import LaidOut


TEXTS = ("txt", "caption")
TEXT_FIELDS = (*TEXTS, "json")
SHAPE = "shape"
"""The name in a batch for the shape of its images."""


def presence_name(role: str) -> str:
    """Return the name in a batch for the mask of the images in a role that its samples have."""
    return f"{role}_mask"


class ImageShape(NamedTuple):
    """The height and width that all images of a batch have, in pixels."""

    height: int
    width: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """An opened dataset, or a selection of its samples.

    `kind` is "latents", "images", or "tars" if there is no manifest. `names` and `contents`
    have an entry for each shard; an entry of `contents` changes when the bytes of the shard do.
    If something is joined, `made_of` has the digest of each shard's image shard, `inputs` the
    number of samples in that image shard, and `moved` says whether samples of the shard may have
    other numbers than there. `where` is the condition for samples, and `join` names the datasets to
    join.
    """

    store: Store
    kind: str
    names: tuple[str, ...]
    contents: tuple[str, ...]
    selection: SampleSelection
    nbytes: int
    digest: str
    amount: StreamAmount
    settings: Mapping[str, Any] = field(default_factory=dict)
    images: "Dataset | None" = None
    """The images that latents are made from on the fly, if they are not stored."""
    where: str = ""
    part_of: "Dataset | None" = None
    """The opened dataset, if this is a selection of its samples."""
    size: Size | None = None
    """The shape of all these samples, if the dataset has shapes."""
    role_sizes: Mapping[str, Size] | None = None
    """The sizes of the images that these samples have in roles, by name, if the dataset has any."""
    lacks_images: bool = False
    """Whether some of these samples lack some of these images, in whose place are zeros."""
    made_of: tuple[str, ...] = ()
    inputs: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    moved: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    join: tuple[str, ...] = ()
    joined: "tuple[JoinedDataset, ...]" = ()
    tables: "tuple[LaidOut, ...]" = ()
    """The joined tables."""

    @property
    def sizes(self) -> Ints:
        """The number of samples in each shard; in a selection, in each of its runs."""
        return self.selection.counts

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The arrays of a sample, which are its first members; empty unless these are latents."""
        if self.kind != "latents":
            return ()
        if self.size is None and self.role_sizes is None:
            return fields_of(self.settings["layout"])
        return fields_in_shape(self.settings, self.size, self.role_sizes)

    @property
    def is_of_one_shape(self) -> bool:
        """True if these are the samples of one shape, or of one size of each image in a role."""
        has_roles = any(part.role_sizes is not None for part in self.with_joined)
        return self.size is not None or has_roles

    @property
    def with_joined(self) -> "tuple[Dataset, ...]":
        """The datasets that a sample's arrays come from: this one, then those joined to it."""
        return self, *(joined.dataset for joined in self.joined)

    @cached_property
    def served(self) -> dict[str, Field]:
        """The arrays of a sample by their names in a batch: its own, then those that are joined."""
        slots, _ = self.array_sources()
        return {
            name: field
            for slot, part in enumerate(self.with_joined)
            for field in part.fields
            if slots.get(name := batch_name(field.name)) == slot
        }

    @property
    def mirrored(self) -> dict[str, Field]:
        """The arrays of mirror images, by the names of those in whose place they are served."""
        return {batch_name(item.mirrors): item for item in self.served.values() if item.mirrors}

    def variable_fields(self, names: Collection[str]) -> dict[str, Field]:
        """Return the arrays of variable length that a batch holds, or whose mask it holds."""
        variable = {name: item for name, item in self.served.items() if item.is_variable}
        wanted = {name: item for name, item in variable.items() if name in names}
        return wanted or (variable if batch_name(MASK) in names else {})

    def array_sources(self, choice: str = "") -> tuple[dict[str, int], int]:
        """Return which dataset gives each array of a batch, and which one gives the texts.

        Arrays are found by name, and datasets by their numbers in `with_joined`. An array of a
        later dataset replaces one of the same name, with that of its mirror images. If captions
        are picked by chance, or if dropped ones have an empty caption for each sample, each choice
        has its own dataset for everything that is made of captions.
        """
        slots: dict[str, int] = {}
        of_texts = 0
        for slot, texts in enumerate(served_text_fields(self.with_joined, choice)):
            fields = self.with_joined[slot].fields
            left_out = {*text_fields(fields)} - {*texts}
            for array in fields:
                slots.pop(batch_name(mirrored_name(array.name)), None)
            slots |= {batch_name(field.name): slot for field in fields if field not in left_out}
            if texts:
                of_texts = slot
        return slots, of_texts

    @property
    def columns(self) -> dict[str, str]:
        """The columns of the joined tables, with the type of each."""
        return {name: kind for table in self.tables for name, kind in table.numbers.items()}

    @property
    def has_columns(self) -> bool:
        """True if the samples have columns of scores."""
        return bool(columns_of(self.settings))

    @property
    def latents(self) -> "Dataset":
        """The dataset whose latents a batch has: this one, or one joined to it."""
        last_first = self.with_joined[::-1]
        has_latents = (any(field.name == LATENT for field in part.fields) for part in last_first)
        return next((part for part, has in zip(last_first, has_latents, strict=False) if has), self)

    @property
    def whole(self) -> "Dataset":
        """The opened dataset that these samples were selected from, or this one if it is whole."""
        return self.part_of or self

    @property
    def files(self) -> "Dataset":
        """The dataset whose files are read: the whole one, or the images to be encoded."""
        return self.whole.images or self.whole

    @property
    def place(self) -> str:
        """The name of these samples in messages: the URL, and their shapes if they have any."""
        return f"{self.store.url} ({self.shown_sizes})" if self.shown_sizes else self.store.url

    @property
    def shown_sizes(self) -> str:
        """The shape of these samples and the sizes of their images in roles, for messages."""
        shown = [] if self.size is None else [shape_name(self.size)]
        in_roles = chain.from_iterable((part.role_sizes or {}).items() for part in self.with_joined)
        shown += [f"{name} {shape_name(size)}" if all(size) else name for name, size in in_roles]
        return ", ".join(shown)

    @property
    def images_in_roles(self) -> tuple[str, ...]:
        """The names of the images in roles that a batch may have, such as `source_1`."""
        return tuple(dict.fromkeys(n for part in self.with_joined for n in part.role_sizes or ()))

    @cached_property
    def role_images(self) -> tuple[str, ...]:
        """The names of the images in roles that a batch has as they are stored, or their crops.

        They are those of image shards; arrays of joined datasets replace them.
        """
        images = self.role_sizes or () if self.kind == "images" else ()
        return tuple(name for name in images if name not in self.served)

    @property
    def shape(self) -> ImageShape:
        """The height and width of the images that the latents were made from."""
        side = self.latents.settings["resolution"]
        width, height = self.size or (side, side)
        return ImageShape(height, width)

    @cached_property
    def ends(self) -> Ints:
        """The number of samples up to the end of each shard."""
        return np.cumsum(self.sizes)

    @cached_property
    def samples(self) -> int:
        return self.selection.samples

    @property
    def sample_nbytes(self) -> int:
        """The mean size of a sample, which bounds reading ahead in bytes."""
        return max(1, self.nbytes // self.samples)

    @property
    def served_nbytes(self) -> int:
        """The mean size of a sample together with the samples joined to it."""
        return sum(part.sample_nbytes for part in self.with_joined)

    @property
    def has_moments(self) -> bool:
        return self.latents.settings.get("latents") == "moments"

    @property
    def patch(self) -> int:
        """The side of the square of cells that latents keep as channels."""
        return int(self.latents.settings.get("patch", 1))


def served_text_fields(parts: Sequence[Dataset], choice: str = "") -> list[tuple[Field, ...]]:
    """Return the text arrays that each dataset contributes to a batch.

    With a `choice`, only datasets whose captions have that name contribute any, if there are such.
    Otherwise empty captions contribute none, unless there are no others. If two datasets have a
    text array of the same name, the later one replaces all text arrays of the earlier. Otherwise a
    sample would have arrays of two captions.
    """
    names = {caption_name(part.settings) for part in parts if text_fields(part.fields)}
    contributing = {choice} & names or names - {EMPTY} or names
    by_part: list[tuple[Field, ...]] = []
    later: set[str] = set()
    for part in reversed(parts):
        texts = text_fields(part.fields)
        is_other = caption_name(part.settings) not in contributing
        if is_other or not later.isdisjoint(field.name for field in texts):
            texts = ()
        later |= {field.name for field in texts}
        by_part.append(texts)
    return by_part[::-1]


def caption_name(settings: Mapping[str, object]) -> str:
    """Return the name of the captions that a dataset was made from."""
    return str(settings.get("caption_name", OWN))


@dataclass(frozen=True, eq=False)
class WantedArrays:
    """The arrays and texts that are read of a dataset's samples.

    `fields` are all arrays of a sample, and `names` those that are kept. If `is_whole`, samples
    are read completely. The json of joined samples is merged; if `yields`, this one's values
    give way to those of the others.
    """

    fields: tuple[Field, ...]
    names: tuple[str, ...]
    texts: tuple[str, ...]
    is_whole: bool
    yields: bool

    def merge_json(self, others: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return `facts`, a sample's own json, with the json of the samples joined so far.

        Where both have a name, the value of `facts` is taken, or that of `others` if this dataset
        `yields`.
        """
        return {**facts, **others} if self.yields else {**others, **facts}


_make_wanted = lru_cache(512)(WantedArrays)
"""Returns the same object for the same arguments, so that rows of streams are read together."""

WantedBySlot = tuple[tuple[WantedArrays | None, ...], ...]
"""The arrays wanted of one stream, by slot and choice; None if nothing is read there."""


def find_wanted(
    dataset: Dataset, names: Sequence[str], choices: Sequence[str], *, raw: bool
) -> WantedBySlot:
    """Return the arrays to read from each dataset of a stream, by slot and choice.

    `choices` are the names of captions, or one empty name if none are picked.
    """
    asked_for = {n for n in dataset.images_in_roles if presence_name(role_of(n)[0]) in names}
    mirrored = (batch_name(item.name) for item in dataset.mirrored.values())
    wanted = {*names, *mirrored, *dataset.variable_fields(names), *asked_for}
    texts = tuple(name for name in TEXT_FIELDS if raw or name in names)
    facts = tuple(name for name in texts if name == "json")
    by_choice = [dataset.array_sources(choice) for choice in choices]
    by_slot = []
    for slot, part in enumerate(dataset.with_joined):
        row: list[WantedArrays | None] = []
        for slots, text_slot in by_choice:
            arrays = [name for name, giver in slots.items() if giver == slot]
            kept = tuple(name for name in arrays if raw or name in wanted)
            kept_texts = texts if slot == text_slot else facts if arrays or not slot else ()
            is_whole = raw or not part.fields or part.lacks_images
            arrays_wanted = _make_wanted(part.fields, kept, kept_texts, is_whole, slot > text_slot)
            row.append(arrays_wanted if slot == 0 or kept or kept_texts else None)
        by_slot.append(tuple(row))
    return tuple(by_slot)


def order_streams(datasets: Sequence[Dataset]) -> tuple[OrderStream, ...]:
    """Return the streams of the order: for each dataset its digest, its sizes and its amount.

    The amount of a dataset counts for all of its shapes together.
    """
    numbers = {whole: n for n, whole in enumerate(dict.fromkeys(d.whole for d in datasets))}
    return tuple(
        OrderStream(
            digest=dataset.digest,
            sizes=dataset.sizes,
            amount=dataset.amount,
            place=dataset.store.url,
            part_of=numbers[dataset.whole] if dataset.is_of_one_shape else None,
        )
        for dataset in datasets
    )


def missing_shard_advice(dataset: Dataset) -> str:
    """Return what to do about a missing shard, for a message.

    It is to bring the shard back, to make it again (not for tars that are no dataset), or to load
    with `skip_missing`.
    """
    repair = command("repair", dataset.store.url)
    again = f" or make it again ({repair}, then the command it is from)"
    return f"bring it back{again if dataset.kind != 'tars' else ''}, or load with skip_missing=True"


ATTEMPTS = 16  # substitutes tried for a damaged sample before the dataset is taken for lost
MISSING = "the shard is missing"
StreamChoice = tuple[int, int]
"""The number of a stream, and of the captions picked for a row."""
ShardPlace = tuple[int, int]
"""A shard, and the number of a sample in it."""
_log = logging.getLogger("wdsprep")


Fault = tuple[str, str, int]
"""The reason why a sample cannot be served, its tar, and its number in that tar."""


class Substitutes:
    """A source of samples to serve in place of damaged ones. It remembers missing shards."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self._datasets = datasets
        self._warned: set[tuple[str, int]] = set()
        # What stands beside a row may be missing, and be there beside another choice of captions:
        self._missing: dict[StreamChoice, set[int]] = {}

    def draw(self, stream: int, wanted: ShardPlace, attempt: int) -> ShardPlace:
        """Return the place of a sample of the stream that may replace the wanted one.

        A hash of the wanted place and the attempt chooses it among all samples.
        """
        dataset = self._datasets[stream]
        number = key_of("substitute", dataset.digest, *wanted, attempt) % int(dataset.ends[-1])
        runs = np.searchsorted(dataset.ends, [number], side="right")
        places = number - (dataset.ends[runs] - dataset.sizes[runs])
        shards, indices = dataset.selection.locate(runs, places)
        return int(shards[0]), int(indices[0])

    def next(self, choice: StreamChoice, wanted: ShardPlace, drawn: int) -> tuple[int, ShardPlace]:
        """Draw substitutes until one is in no shard that is known to be missing.

        Return the number of draws, including the `drawn` before, and the place of the last one.
        Raise NotFoundError if all shards are known to be missing. Passing over missing shards
        saves time, and does not change the substitute.
        """
        dataset, missing = self._datasets[choice[0]], self._missing.get(choice, set())
        while len(missing) < np.count_nonzero(dataset.sizes):
            place = self.draw(choice[0], wanted, drawn)
            drawn += 1
            if place[0] not in missing:
                return drawn, place
        places = " or ".join(part.store.url for part in dataset.with_joined)
        raise NotFoundError(f"{dataset.place}: all its shards are missing, in {places}")

    def warn(self, choice: StreamChoice, shard: int, fault: Fault) -> None:
        """Log once that a sample is replaced, or all samples of a missing shard.

        A missing shard is remembered, so that `next` passes over it.
        """
        reason, tar, number = fault
        if reason == MISSING:
            self._missing.setdefault(choice, set()).add(shard)
        place = (tar, number if reason != MISSING else -1)
        if place in self._warned:
            return
        self._warned.add(place)
        what = reason if reason == MISSING else f"sample {number} cannot be served ({reason})"
        _log.warning("%s: %s; others are served in its place", tar, what)

    def make_error(self, stream: int, fault: Fault) -> FormatError:
        """Return the error for a dataset with too many damaged samples."""
        datasets = self._datasets[stream].with_joined
        reason, tar, _ = fault
        damaged = next(part for part in datasets if tar.startswith(f"{part.store.url}/"))
        next_step = "" if damaged.kind == "tars" else verify_step(damaged.store.url)
        what = f"{ATTEMPTS} samples in a row cannot be served, the last ({reason})"
        return FormatError(f"{damaged.place}: {what}").with_next_step(next_step)
