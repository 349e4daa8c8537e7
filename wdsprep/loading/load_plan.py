"""Check the arguments of a loader, and decide what it serves and how it reads.

All of this happens before any sample is read.

A batch does not hold a sample twice, unless the user wants that (`_check_batch_size`). A batch that
is larger than all the samples is refused, and the error gives a size that fits. If each batch is of
one shape or stream, it is refused when none of these has enough samples for it. When only some of
them are smaller, a line in the log says so: among many shapes a few are rare. A user who sets the
steps of an epoch, or how much of each stream it holds, has asked for repeats.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from wdsprep.dataset.npy_arrays import FLIPPED, LATENT, MASK, patched_shape, text_fields
from wdsprep.dataset.random_numbers import Ints, Words, draw, key_of
from wdsprep.dataset.samples import is_mask, role_of
from wdsprep.encoding.captions.options import EMPTY, PER_SAMPLE
from wdsprep.encoding.models.base import TENSORS
from wdsprep.encoding.models.families import BY_ZEROS
from wdsprep.errors import UsageError
from wdsprep.images.nearest_shape import Shapes
from wdsprep.limits import MAX_NBYTES
from wdsprep.loading.batch_memory import Batch
from wdsprep.loading.options import LONGEST, LoadOptions
from wdsprep.loading.order.global_order import Order
from wdsprep.loading.order.mixing import StreamAmount
from wdsprep.loading.sample_cache import SHARERS, CacheDir
from wdsprep.loading.sample_layout import batch_name
from wdsprep.loading.served_datasets import SHAPE, TEXTS, Dataset, caption_name, presence_name
from wdsprep.text import examples, plural

if TYPE_CHECKING:
    from wdsprep.encoding.on_the_fly.encode_steps import Encoding


COMMON_FIELDS = (*TEXTS, "json", "key")
RESERVED = (*COMMON_FIELDS, "image", "pixels", SHAPE, "samples", "made", "__key__", "__url__")
"""The names that columns of a table may not have."""
Captions = tuple[tuple[str, float], ...]
"""The names of captions, each with its share."""
Empty = dict[str, torch.Tensor]
"""The arrays of the empty caption."""
COLUMNS = {"<i8": torch.int64, "<f4": torch.float32, "<f8": torch.float32, "|b1": torch.bool}
"""The torch dtype of a table's column, by its NumPy dtype."""
SAMPLED = ""
"""The name for the latents that are sampled from moments, while a batch begins."""
TensorKinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""The dtype of each tensor of a batch, and the shape of one of its rows."""
_log = logging.getLogger("wdsprep")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LoadPlan:
    """The plan of a loader: its datasets, their order and how they are read, but not its step.

    `captions` has names of text datasets, or paths in the json; one of them is picked for each
    sample. `empty` is by stream and choice of captions. `cut` says how images are cropped for the
    models.
    """

    options: LoadOptions
    datasets: tuple[Dataset, ...]
    order: Order
    rank: int
    world: int
    names: tuple[str, ...]
    cut: Shapes | None = None
    max_nbytes: int = MAX_NBYTES
    captions: Captions
    empty: tuple[tuple[Empty, ...], ...] = ()
    threads: int
    ahead: int
    cache: CacheDir | None

    @property
    def summary(self) -> str:
        """A text with the first URLs, the number of samples and the steps of an epoch."""
        wholes = dict.fromkeys(dataset.whole for dataset in self.datasets)
        places = examples([repr(whole.store.url) for whole in wholes])
        samples = plural(sum(stream.samples for stream in self.order.streams), "sample")
        steps = plural(self.order.steps_per_epoch, "step")
        return f"{places}: {samples}, {steps} of {self.order.global_batch:,} an epoch"

    @cached_property
    def choices(self) -> tuple[str, ...]:
        """The names of the text datasets from which one is picked for each sample.

        They are ("",) if no captions are picked, or if they are picked by `paths`. If a dataset
        has an empty caption for each sample, it is the choice for samples whose text is dropped.
        """
        names = tuple(name for name, _ in self.captions)
        choices = names if names and self.has_text_arrays else ("",)
        parts = (part for dataset in self.datasets for part in dataset.with_joined)
        has_empty = any(caption_name(part.settings) == EMPTY for part in parts)
        is_added = self.options.drop_text and has_empty and EMPTY not in choices
        return (*choices, EMPTY) if is_added else choices

    @property
    def picks_captions(self) -> bool:
        """Return whether chance picks a caption for each sample."""
        return bool(self.captions) or len(self.choices) > 1

    @property
    def drops_by_choice(self) -> bool:
        """Return whether dropped texts are read from a dataset of empty captions."""
        return self.options.drop_text > 0 and EMPTY in self.choices

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths in the json to the captions from which one is picked for each sample.

        They are () if datasets have arrays of text: then arrays are picked, by `choices`.
        """
        return () if self.has_text_arrays else tuple(name for name, _ in self.captions)

    @property
    def has_text_arrays(self) -> bool:
        return any(text_fields(dataset.served.values()) for dataset in self.datasets)

    def choice_of(self, batch: Batch, row: int) -> int:
        """Return the number of the text dataset that was picked for a row."""
        return batch.choice[row] if len(self.choices) > 1 else 0

    def pick_captions(self, step: int, first: int, count: int) -> Ints:
        """Return the number of the caption that is picked at random for each row.

        The rows begin at place `first` of the global batch.
        """
        places = np.arange(count) + (step * self.order.global_batch + first)
        chance = draw(key_of("captions", self.order.seed), places)
        numbers = np.searchsorted(self._bounds, chance, side="right")
        if self.drops_by_choice:
            dropped = self._is_picked("drop_text", places)
            numbers[dropped] = self.choices.index(EMPTY)
        return numbers

    @cached_property
    def _bounds(self) -> Words:
        """The 64-bit numbers at which one caption's share ends and the next begins."""
        ends = np.cumsum([weight for _, weight in self.captions]).tolist()
        words = [min(int(end / ends[-1] * 2.0**64), 2**64 - 1) for end in ends[:-1]]
        return np.array(words, np.uint64)

    def pick_rows(self, what: str, batch: Batch, rows: range) -> Sequence[int]:
        """Return the rows that are picked at random at the rate of this option.

        Each option picks rows of its own.
        """
        if not getattr(self.options, what):
            return ()
        first = batch.step * self.order.global_batch + batch.first
        places = np.arange(rows.start, rows.stop) + first
        hit: list[int] = np.flatnonzero(self._is_picked(what, places)).tolist()
        return [rows.start + number for number in hit]

    def _is_picked(self, what: str, places: Ints) -> NDArray[np.bool_]:
        """Return a mask of the places in the order that are picked at the rate of an option."""
        rate = float(getattr(self.options, what))
        if rate == 1:  # no number is beyond the last one that may be drawn
            return np.ones(len(places), np.bool_)
        chance = draw(key_of(what, self.order.seed), places)
        return np.asarray(chance < np.uint64(rate * 2.0**64), np.bool_)

    def tensors_of(self, dataset: Dataset) -> TensorKinds:
        """Return the tensors of a batch of a dataset, but for an array of variable length."""
        names = {*self.names}
        arrays = {*names, *self.flipped_names(dataset).values()}
        tensors: TensorKinds = {
            name: (TENSORS[item.dtype], item.shape)
            for name, item in dataset.served.items()
            if name in arrays and not item.is_variable
        }
        latent = batch_name(LATENT)
        if dataset.has_moments and latent in names:
            dtype, (channels, height, width) = tensors[latent]
            tensors[SAMPLED] = dtype, patched_shape((channels // 2, height, width), dataset.patch)
        others: TensorKinds = {n: (COLUMNS[kind], ()) for n, kind in dataset.columns.items()}
        for item in dataset.variable_fields(names).values():
            others[batch_name(MASK)] = torch.bool, item.shape[:1]
        if self.options.pixels:
            width, height = dataset.size or (self.options.pixels,) * 2
            for name in ("pixels", *dataset.role_images):
                others[name] = torch.uint8, (*(() if is_mask(name) else (3,)), height, width)
        others |= self.presence_masks(dataset)
        return tensors | {name: kind for name, kind in others.items() if name in names}

    def presence_masks(self, dataset: Dataset) -> TensorKinds:
        """Return the masks that say which images in roles the samples have."""
        if not self.options.pad_roles:
            return {}
        roles = groupby(dataset.images_in_roles, lambda name: role_of(name)[0])
        return {presence_name(role): (torch.bool, (len([*images]),)) for role, images in roles}

    def flipped_names(self, dataset: Dataset) -> dict[str, str]:
        """Return the arrays in whose place some rows take those of mirror images, with the latter.

        All are named as in a batch.
        """
        flipped = dataset.mirrored if self.options.flip else {}
        return {n: batch_name(item.name) for n, item in flipped.items() if n in self.names}

    @property
    def share(self) -> int:
        """The number of samples that each rank has in a step."""
        return self.order.global_batch // self.world

    @property
    def device(self) -> torch.device | None:
        """The device that batches are copied to, if one was given."""
        return None if self.options.device is None else torch.device(self.options.device)

    @property
    def pinned(self) -> bool:
        """True if batches are made in pinned memory, without which a copy to a GPU blocks."""
        return self.options.pin or (self.device is not None and self.device.type == "cuda")


def make_encoding(options: LoadOptions) -> "Encoding | None":
    """Return how to encode images on the fly, or None if latents are stored."""
    if options.encode is None:
        if options.tee:
            raise UsageError("tee= keeps what encode= makes: give both, or neither")
        return None
    if options.raw or options.pixels:
        raise UsageError("encode= makes latents: leave out raw= and pixels=")
    # all that encoding needs, which stored latents do not
    from wdsprep.encoding.gpus import visible_gpus
    from wdsprep.encoding.on_the_fly.encode_steps import find_encoding

    device = str(options.device or options.encode.device)
    if device == "auto":
        device = "cuda" if visible_gpus() else "cpu"
    return find_encoding(options.encode, device)


def choose_fields(datasets: tuple[Dataset, ...], options: LoadOptions) -> tuple[str, ...]:
    """Return the names of the entries of a batch: those of `fields=`, or the usual ones.

    If datasets differ, a batch may hold what any of them has. Raise UsageError for a field that
    none has, or if a column of a joined table has a name that batches use.
    """
    served = [pair for dataset in datasets for pair in dataset.served.items()]
    arrays = dict.fromkeys(name for name, _ in served)
    if any(item.is_variable for _, item in served):
        arrays[batch_name(MASK)] = None
    in_roles = dict.fromkeys(name for dataset in datasets for name in dataset.images_in_roles)
    if options.pad_roles:
        arrays |= dict.fromkeys(presence_name(role_of(name)[0]) for name in in_roles)
    if datasets[0].kind == "latents":
        others: tuple[str, ...] = (SHAPE,)
        shape = others if any(dataset.size for dataset in datasets) else ()
        mirrored = {name for name, item in served if item.mirrors}
        usual = (*(name for name in arrays if name not in mirrored), *shape, "key")
    else:
        others = ("pixels", "image") if options.pixels else ("image",)
        usual = (others[0], *in_roles, *arrays, "txt", "key")
    known = {*others, *in_roles, *arrays, *COMMON_FIELDS}
    columns = dict.fromkeys(name for dataset in datasets for name in dataset.columns)
    taken = {*known, *RESERVED, batch_name(MASK)}
    if clashing := sorted(name for name in columns if batch_name(name) in taken):
        raise UsageError(
            f"a joined table has a column {clashing[0]}, which batches use for something else: "
            "rename the column"
        )
    usual, known = (*usual, *columns), {*known, *columns}
    if options.fields is None:
        return usual
    names = tuple(dict.fromkeys(batch_name(str(name)) for name in options.fields))
    if not names or not known.issuperset(names):
        raise UsageError(
            f"fields={', '.join(names) or '()'}: {datasets[0].store.url} holds "
            f"{datasets[0].kind}; ask for some of {', '.join(sorted(known))}"
        )
    return names


def check_plan(plan: LoadPlan) -> None:
    """Raise UsageError if options do not fit each other, the datasets or this machine."""
    _check_unique_arrays(plan)
    for part in (part for dataset in plan.datasets for part in dataset.with_joined):
        if plan.options.pad == LONGEST and part.settings.get("pipeline") in BY_ZEROS:
            raise UsageError(
                f"{part.store.url} is for the denoiser of {part.settings['pipeline']}, which "
                "takes no mask and needs zeros up to the full length: leave out pad="
            )
    if plan.order.group % plan.share and not plan.options.raw:
        raise UsageError(
            f"shape_batch={plan.order.group} must be a multiple of the {plan.share:,} samples "
            "that a rank has in a step, which are of one shape: give a multiple, or more ranks"
        )
    is_for_cuda = plan.device is not None and plan.device.type == "cuda"
    lacks_gpu = plan.options.pin and not torch.accelerator.is_available()
    if lacks_gpu or (is_for_cuda and not torch.cuda.is_available()):
        raise UsageError("torch finds no such GPU here: leave out device= and pin=")
    if plan.cache is not None:
        least = SHARERS * max(dataset.served_nbytes for dataset in plan.datasets)
        if plan.cache[1] < least:
            raise UsageError(
                f"cache_nbytes={plan.cache[1]:,} is too small for such samples: give "
                f"{least:,} or more"
            )
    _check_captions(plan)
    for dataset in plan.datasets:
        if dataset.has_columns and not dataset.fields:
            raise UsageError(
                f"{dataset.store.url} has scores without embeddings, which are columns for "
                "batches of other datasets: load images or latents, and give it to join="
            )
        _check_flips(dataset, plan)
        if plan.options.raw:
            continue
        first, url = plan.datasets[0], dataset.store.url
        if dataset.kind == "tars" and not plan.options.pixels:
            raise UsageError(f"{url} holds tars without a manifest: load with raw=True or pixels=")
        if (dataset.kind == "latents") != (first.kind == "latents"):
            raise UsageError(
                f"{url} holds {dataset.kind} and {first.store.url} holds {first.kind}: load them "
                "apart"
            )
        if plan.options.pixels and dataset.kind == "latents":
            raise UsageError(f"{url} holds latents: pixels= is for images")
        if not plan.order.homogeneous:
            _check_same_arrays(plan, dataset)
    _check_batch_size(plan)


def _check_captions(plan: LoadPlan) -> None:
    """Raise UsageError if captions cannot be dropped or picked, or share a batch.

    A batch has one mask, so it cannot have two arrays of variable length.
    """
    names, first = plan.names, plan.datasets[0]
    has_texts = plan.has_text_arrays or not {*TEXTS, "json"}.isdisjoint(names)
    if plan.options.drop_text and first.kind == "latents" and not has_texts:
        raise UsageError(
            f"{first.store.url} was made with --text none: leave out drop_text, or ask for "
            'the captions (fields=("latent", "txt"))'
        )
    if plan.paths and (first.kind == "latents" or {*TEXTS}.isdisjoint(names)):
        raise UsageError(
            f"captions= picks no texts of {first.store.url}: join text datasets made with "
            '--caption-name, or ask for "txt" of images in fields='
        )
    for dataset in plan.datasets:
        if any(plan.choices):
            _check_choices(dataset, plan)
        lengths = dataset.variable_fields(names)
        if len(lengths) > 1:
            raise UsageError(
                f"{dataset.place} and the datasets joined to it have {' and '.join(lengths)} of "
                "varying length, and a batch has one emb_mask: ask for one of them in fields="
            )


def _check_choices(dataset: Dataset, plan: LoadPlan) -> None:
    """Raise UsageError if no dataset has the captions of a choice, or if arrays of these differ."""
    parts = dataset.with_joined
    captions = [caption_name(part.settings) for part in parts if text_fields(part.fields)]
    for choice, _ in plan.captions:
        if choice not in captions:
            known = ", ".join(dict.fromkeys(captions))
            option = f"--empty {PER_SAMPLE}" if choice == EMPTY else f"--caption-name {choice}"
            raise UsageError(
                f"captions={choice}: {dataset.store.url} and the datasets joined to it have "
                f"{known}; join the text dataset that was made with {option}"
            )
    wanted = {*plan.names, *dataset.variable_fields(plan.names)}
    texts = text_fields(dataset.served.values())
    for choice in plan.choices:
        slots, _ = dataset.array_sources(choice)
        for name, item in dataset.served.items():
            slot = slots.get(name)
            is_wanted = name in wanted and item in texts
            if is_wanted and (slot is None or item not in parts[slot].fields):
                raise UsageError(
                    f"the captions {choice} have no {name} like that of others ({item}): pick "
                    "among captions that were encoded alike, or leave it out of fields="
                )


def _check_unique_arrays(plan: LoadPlan) -> None:
    """Raise UsageError if two joined datasets have the same array in one choice of captions."""
    for dataset in plan.datasets:
        for choice in plan.choices:
            known: dict[str, str] = {}
            for part in dataset.with_joined[1:]:
                name = caption_name(part.settings)
                is_served = name == choice if choice else name != EMPTY
                left_out = () if is_served else text_fields(part.fields)
                names = [batch_name(field.name) for field in part.fields if field not in left_out]
                if twice := [name for name in names if name in known]:
                    raise UsageError(
                        f"{known[twice[0]]} and {part.store.url} are joined, and both have "
                        f"{examples(twice)}: leave one of them out, or give captions= if they hold "
                        "captions of different names"
                    )
                known |= dict.fromkeys(names, part.store.url)


def _check_flips(dataset: Dataset, plan: LoadPlan) -> None:
    """Raise UsageError if images of samples cannot be mirrored, all of a sample together."""
    if batch_name(FLIPPED) in plan.names and (dataset.has_moments or dataset.images is not None):
        raise UsageError(
            f"{dataset.store.url} has no arrays of mirror images alone for fields=: ask for "
            "latent, and give flip="
        )
    if not plan.options.flip:
        return
    if dataset.images is None:
        latents = (n for n, f in dataset.served.items() if f.holds_latents and not f.mirrors)
        fixed = [name for name in latents if name not in dataset.mirrored]
    else:  # nothing that is joined is mirrored here
        fixed = [name for name, item in dataset.served.items() if item.role]
    if fixed or not dataset.mirrored:
        is_stored = dataset.kind == "latents" and dataset.images is None
        on_the_fly = "give encode=Encode(..., flip=True), and join no images in roles"
        raise UsageError(
            f"{dataset.store.url} has no latents of mirror images{' of ' * bool(fixed)}"
            f"{', '.join(fixed)}, and all images of a sample are mirrored or none: leave out flip, "
            f"or {'encode with --flip' if is_stored else on_the_fly}"
        )
    for part in dataset.with_joined:
        texts = {batch_name(field.name) for field in text_fields(part.fields)}
        if "text_roles" in part.settings and texts.intersection(plan.names):
            raise UsageError(
                f"{part.store.url}: its text depends on the images of each sample, and there is "
                "none of their mirror images: leave out flip"
            )


def _check_same_arrays(plan: LoadPlan, dataset: Dataset) -> None:
    """Raise UsageError if the arrays of a dataset differ from those of the first dataset.

    Their names and shapes are compared, of the arrays that batches hold.
    """
    first = plan.datasets[0]
    arrays, others = (
        {**plan.tensors_of(part), **part.variable_fields(plan.names)} for part in (dataset, first)
    )
    differing = {n for n in {*arrays, *others} if arrays.get(n) != others.get(n)}
    if differing:
        names = sorted({batch_name(LATENT) if name == SAMPLED else name for name in differing})
        raise UsageError(
            f"the arrays of {dataset.store.url} and {first.store.url} differ in name or shape "
            f"({examples(names)}): give fields= that are the same in both, or "
            "homogeneous=True, which takes each batch from one stream"
        )


def _check_batch_size(plan: LoadPlan) -> None:
    """Raise UsageError if a batch would hold samples twice and the user did not ask for it.

    If each batch is of one shape or stream, some of which are too small, log a warning instead.
    """
    order, group = plan.order, plan.order.group
    unweighted = [stream for stream in order.streams if stream.amount == StreamAmount()]
    if order.epoch_steps is not None or not unweighted:
        return
    places = ", ".join(dict.fromkeys(dataset.store.url for dataset in plan.datasets))
    largest = max(stream.samples for stream in order.streams)
    what = "shape" if any(stream.part_of is not None for stream in unweighted) else "stream"
    name = "shape_batch" if group < order.global_batch else "global_batch"
    has_groups = group < order.global_batch and group <= largest
    if order.epoch_samples < order.global_batch or (order.homogeneous and largest < group):
        most = order.epoch_samples if has_groups or not order.homogeneous else largest
        unit = math.lcm(plan.world, group if has_groups else 1)
        steps = max(1, order.epoch_samples // order.global_batch)
        alone = " without shape_batch" if name == "shape_batch" and not has_groups else ""
        size = f"global_batch={most // unit * unit}{alone} or less, or " if most >= unit else ""
        raise UsageError(
            f"{places}: {plural(order.epoch_samples, 'sample')} to serve, {largest:,} of them in "
            f"the largest {what}, and a batch would repeat some: give {size}epoch_steps={steps} if "
            "a batch may hold samples several times"
        )
    small = [stream for stream in unweighted if stream.samples < group]
    if order.homogeneous and small and plan.rank == 0:
        _log.warning(
            "%s: %d of %s have fewer samples than %s=%d, and repeat some in a batch",
            *(places, len(small), plural(len(order.streams), what), name, group),
        )
