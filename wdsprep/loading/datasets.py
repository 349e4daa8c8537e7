"""A dataset as it is served: its shards, which of their samples, a digest, the layout.

A dataset is known by what its shards hold, never by where it lies, so a state of the loader
outlives a move to another disk or bucket. Tars without a manifest are known by names and sizes.

Latent shards are known by the image shards they were made of, and by how many samples these gave.
Both are known before anything is encoded, so latents that are made on the way to the trainer come
in the order of those that are stored, as long as encoding rejects nothing. How they were made, the
settings say: a state carries their fingerprint.

The order knows nothing of shapes and conditions: to it a dataset is so many samples in each run of
its selection, and a place in it is a run and a number there. `selection.locate` says where that is
in the tars.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wdsprep.dataset.arrays import LATENT, Field, fields_of, text_fields
from wdsprep.dataset.chance import Ints
from wdsprep.dataset.scores import columns_of
from wdsprep.dataset.selection import SampleSelection
from wdsprep.dataset.shapes import Size, fields_in_shape, shape_name
from wdsprep.encoding.captions.sources import OWN
from wdsprep.loading import order
from wdsprep.loading.grid import short
from wdsprep.loading.join_positions import JoinPositions
from wdsprep.loading.order.mixing import Want
from wdsprep.store.base import Store
from wdsprep.text import command

if TYPE_CHECKING:
    from wdsprep.loading.tables import KeyedTable

SHAPE = "shape"
"""What a batch calls the shape that its images have."""


class ImageShape(NamedTuple):
    """The pixels of the images that a batch is of."""

    height: int
    width: int


class Joined(NamedTuple):
    """A dataset whose arrays stand beside those of another, and where in it the samples are."""

    dataset: "Dataset"
    positions: JoinPositions


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """An opened stream, or some samples of it.

    `kind` is latents, images, or tars where there is no manifest. Of each shard, `names` and
    `contents`, which change when its bytes do. Where something is to be joined, `made_of` is the
    digest of the image shard that it is made of or that it is, and `inputs` are the samples of that
    image shard that were looked at. `where` is the condition that samples are to meet, or that
    these do; `join` says where the datasets are that are to stand beside it."""

    store: Store
    kind: str
    names: tuple[str, ...]
    contents: tuple[str, ...]
    selection: SampleSelection
    nbytes: int
    digest: str
    want: Want
    settings: Mapping[str, Any] = field(default_factory=dict)
    images: "Dataset | None" = None
    """What the latents are made from on the way, where they are not stored."""
    where: str = ""
    part_of: "Dataset | None" = None
    """The opened stream, where these are some samples of it."""
    size: Size | None = None
    """The shape of all these samples, where the dataset has shapes."""
    made_of: tuple[str, ...] = ()
    inputs: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    join: tuple[str, ...] = ()
    joined: tuple[Joined, ...] = ()
    tables: "tuple[KeyedTable, ...]" = ()
    """The tables whose columns stand beside it."""

    @property
    def sizes(self) -> Ints:
        """The samples of each shard; of some samples, those of each run."""
        return self.selection.counts

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The arrays of a sample, the first members of it; none but in latent shards."""
        if self.kind != "latents":
            return ()
        if self.size is not None:
            return fields_in_shape(self.settings, self.size)
        return fields_of(self.settings["layout"])

    @property
    def beside(self) -> "tuple[Dataset, ...]":
        """The datasets that its samples are of: itself, and what is joined."""
        return self, *(joined.dataset for joined in self.joined)

    @cached_property
    def served(self) -> tuple[Field, ...]:
        """The arrays of a sample in a batch: its own, then those of what is joined."""
        given, _ = self.givers()
        return tuple(
            field
            for slot, part in enumerate(self.beside)
            for field in part.fields
            if given.get(short(field.name)) == slot
        )

    def givers(self, choice: str = "") -> tuple[dict[str, int], int]:
        """Return which dataset gives each array of a batch, by its name, and which gives texts.

        Datasets go by their places in `beside`. An array of a later one takes the place of one of
        the same name. Where captions are picked by chance, each choice has its own dataset for all
        that is made of captions."""
        given: dict[str, int] = {}
        of_texts = 0
        for slot, own in enumerate(_texts_served(self.beside, choice)):
            fields = self.beside[slot].fields
            left_out = {*text_fields(fields)} - {*own}
            given |= {short(field.name): slot for field in fields if field not in left_out}
            if own:
                of_texts = slot
        return given, of_texts

    @property
    def columns(self) -> dict[str, str]:
        """Those of the tables, with what they hold."""
        return {name: kind for table in self.tables for name, kind in table.columns.items()}

    @property
    def has_columns(self) -> bool:
        """Whether the json of its samples has columns of scores."""
        return bool(columns_of(self.settings))

    @property
    def latents(self) -> "Dataset":
        """The one of those whose latents a batch has."""
        names = [{field.name for field in part.fields} for part in self.beside]
        return next(
            (p for p, own in zip(self.beside[::-1], names[::-1], strict=True) if LATENT in own),
            self,
        )

    @property
    def whole(self) -> "Dataset":
        """All of the opened stream, whose files these are."""
        return self.part_of or self

    @property
    def files(self) -> "Dataset":
        """What is read: the whole, or the images that its latents are made from on the way."""
        return self.whole.images or self.whole

    @property
    def place(self) -> str:
        """Which samples these are, for messages."""
        url = self.store.url
        return url if self.size is None else f"{url} ({shape_name(self.size)})"

    @property
    def shape(self) -> ImageShape:
        """Of latents: that of all their images."""
        side = self.latents.settings["resolution"]
        width, height = self.size or (side, side)
        return ImageShape(height, width)

    @cached_property
    def ends(self) -> Ints:
        """Where each shard ends, if the samples of all are counted through."""
        return np.cumsum(self.sizes)

    @cached_property
    def samples(self) -> int:
        return self.selection.samples

    @cached_property
    def filled(self) -> int:
        """The shards that hold samples."""
        return int(np.count_nonzero(self.sizes))

    @property
    def sample_nbytes(self) -> int:
        """The mean, so that reading ahead can be bounded in bytes."""
        return max(1, self.nbytes // self.samples)

    @property
    def served_nbytes(self) -> int:
        """The same with what stands beside."""
        return sum(part.sample_nbytes for part in self.beside)

    @property
    def has_moments(self) -> bool:
        return self.latents.settings.get("latents") == "moments"

    @property
    def patch(self) -> int:
        """The cells a side that latents have as channels."""
        return int(self.latents.settings.get("patch", 1))

    def urls(self) -> list[str]:
        """Of a folder from the root on, wherever the program goes."""
        place = self.store.root or self.store.url
        return [f"{place}/{name}" for name in self.names]


def _texts_served(parts: Sequence[Dataset], choice: str = "") -> list[tuple[Field, ...]]:
    """Return the text arrays of each dataset that are served.

    One takes the place of the text of an earlier one as a whole where both have an array of one
    name: else a sample would have arrays of two captions."""
    found: list[tuple[Field, ...]] = []
    later: set[str] = set()
    for part in reversed(parts):
        own = text_fields(part.fields)
        is_other = bool(choice) and caption_name(part.settings) != choice
        if is_other or not later.isdisjoint(field.name for field in own):
            own = ()
        later |= {field.name for field in own}
        found.append(own)
    return found[::-1]


def caption_name(settings: Mapping[str, object]) -> str:
    """Return what the captions of a dataset are called."""
    return str(settings.get("caption_name", OWN))


def order_streams(datasets: Sequence[Dataset]) -> tuple[order.OrderStream, ...]:
    """Return what the order is to know of datasets; the shapes of one have its share together."""
    numbers = {whole: n for n, whole in enumerate(dict.fromkeys(d.whole for d in datasets))}
    return tuple(
        order.OrderStream(
            digest=dataset.digest,
            sizes=dataset.sizes,
            want=dataset.want,
            place=dataset.store.url,
            part_of=None if dataset.size is None else numbers[dataset.whole],
        )
        for dataset in datasets
    )


def bring_back(dataset: Dataset) -> str:
    """Return what to do about a shard that is missing."""
    repair = command("repair", dataset.store.url)
    again = f" or make it again ({repair}, then the command it is from)"
    return f"bring it back{again if dataset.kind != 'tars' else ''}, or load with skip_missing=True"
