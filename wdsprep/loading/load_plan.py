"""Check the arguments of a loader, and decide what it serves and how it reads.

All of this happens before any sample is read.

A batch does not hold a sample twice, unless the user wants that (`check_batch_size`). A batch that
is larger than all the samples is refused, and the error gives a size that fits. If each batch is of
one shape or stream, it is refused when none of these has enough samples for it. When only some of
them are smaller, a line in the log says so: among many shapes a few are rare. A user who sets the
steps of an epoch, or how much of each stream it holds, has asked for repeats.
"""

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from wdsprep.cpus import usable_cpus
from wdsprep.dataset.npy_arrays import FLIPPED, MASK, text_fields
from wdsprep.encoding.models.families import BY_ZEROS
from wdsprep.errors import UsageError
from wdsprep.loading.augmentation import Effects
from wdsprep.loading.options import LONGEST
from wdsprep.loading.order.global_order import Order, OrderStream
from wdsprep.loading.order.mixing import StreamAmount
from wdsprep.loading.sample_layout import batch_name
from wdsprep.loading.served_datasets import SHAPE, Dataset
from wdsprep.loading.shard_access.sample_cache import CacheDir, check_cache_size
from wdsprep.loading.wanted_arrays import TEXTS, check_choices, tensor_shapes, variable_fields
from wdsprep.text import examples, plural

if TYPE_CHECKING:
    from wdsprep.encoding.on_the_fly.image_preparation import Encoding
    from wdsprep.encoding.options import Encode


THREADS = 3
IMAGE_FIELDS = ("image", "txt", "key")
COMMON_FIELDS = (*TEXTS, "json", "key")
RESERVED = (*IMAGE_FIELDS, *COMMON_FIELDS, "pixels", SHAPE, "samples", "made", "__key__", "__url__")
"""The names that columns of a table may not have."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadPlan:
    """The plan of a loader: its datasets, their order and how they are read, but not its step."""

    datasets: tuple[Dataset, ...]
    order: Order
    rank: int
    world: int
    epochs: int | None
    names: tuple[str, ...]
    effects: Effects
    raw: bool
    threads: int
    ahead: int
    pin: bool
    device: torch.device | None
    pad: str
    skip_missing: bool
    cache: CacheDir | None

    def __post_init__(self) -> None:
        for part in (part for dataset in self.datasets for part in dataset.with_joined):
            if self.pad == LONGEST and part.settings.get("pipeline") in BY_ZEROS:
                raise UsageError(
                    f"{part.store.url} is for the denoiser of {part.settings['pipeline']}, which "
                    "takes no mask and needs zeros up to the full length: leave out pad="
                )
        if self.order.group % self.share and not self.raw:
            raise UsageError(
                f"shape_batch={self.order.group} must be a multiple of the {self.share:,} samples "
                "that a rank has in a step, which are of one shape: give a multiple, or more ranks"
            )
        _check_devices(pin=self.pin, device=self.device)
        if self.cache is not None:
            check_cache_size(self.cache, max(dataset.served_nbytes for dataset in self.datasets))
        _check_text(self.datasets, self.names, drop_text=self.effects.drop_text)
        _check_flips(self.datasets, self.names, flip=self.effects.flip)
        _check_captions(self.datasets, self.names, self.effects, raw=self.raw)
        for dataset in self.datasets:
            if dataset.has_columns and not dataset.fields:
                raise UsageError(
                    f"{dataset.store.url} has scores without embeddings, which are columns for "
                    "batches of other datasets: load images or latents, and give it to join="
                )
            if not self.raw:
                _check_kind(self.datasets[0], dataset, pixels=self.effects.pixels)
                if not self.order.homogeneous:
                    self._check_same_arrays(dataset)

    def __repr__(self) -> str:
        return f"<LoadPlan {self.summary}>"

    def _check_same_arrays(self, dataset: Dataset) -> None:
        """Raise UsageError if the arrays of a dataset differ from those of the first dataset.

        Their names and shapes are compared, of the arrays that batches hold.
        """
        first = self.datasets[0]
        flips = (batch_name(FLIPPED),) if self.effects.flip else ()
        own, others = (tensor_shapes(each, (*self.names, *flips)) for each in (dataset, first))
        if other := sorted(n for n in {*own, *others} if own.get(n) != others.get(n)):
            raise UsageError(
                f"the arrays of {dataset.store.url} and {first.store.url} differ in name or shape "
                f"({examples(other)}): give fields= that are the same in both, or "
                "homogeneous=True, which takes each batch from one stream"
            )

    @property
    def summary(self) -> str:
        """A text with the URLs, the number of samples and the steps of an epoch."""
        wholes = dict.fromkeys(dataset.whole for dataset in self.datasets)
        places = examples([repr(whole.store.url) for whole in wholes])
        samples = plural(sum(stream.samples for stream in self.order.streams), "sample")
        if sizes := {dataset.size for dataset in self.datasets if dataset.size}:
            samples += f" in {plural(len(sizes), 'shape')}"
        steps = plural(self.order.steps_per_epoch, "step")
        return f"{places}: {samples}, {steps} of {self.order.global_batch:,} an epoch"

    def describe(self, step: int) -> str:
        """Return the summary of this plan, followed by the rank, the step and the epoch."""
        rank = f"rank {self.rank} of {self.world}, " if self.world > 1 else ""
        return f"{self.summary}; {rank}at step {step:,}, epoch {self.order.epoch(step):,}"

    @property
    def share(self) -> int:
        """The number of samples that each rank has in a step."""
        return self.order.global_batch // self.world

    @property
    def pinned(self) -> bool:
        """True if batches are made in pinned memory, without which a copy to a GPU blocks."""
        return self.pin or (self.device is not None and self.device.type == "cuda")


def make_encoding(
    encode: "Encode | None",
    device: str | torch.device | None,
    *,
    raw: bool,
    pixels: int,
    tee: str,
) -> "Encoding | None":
    """Return how to encode images on the fly, or None if `encode` is None.

    Raise UsageError for `tee` without `encode`, and for `raw` or `pixels` with it.
    """
    if encode is None:
        if tee:
            raise UsageError("tee= keeps what encode= makes: give both, or neither")
        return None
    if raw or pixels:
        raise UsageError("encode= makes latents: leave out raw= and pixels=")
    # all that encoding needs, which stored latents do not
    from wdsprep.encoding.gpus import visible_gpus
    from wdsprep.encoding.on_the_fly.image_preparation import find_encoding

    own = str(device or encode.device)
    if own == "auto":
        own = "cuda" if visible_gpus() else "cpu"
    return find_encoding(encode, own)


def check_tee(datasets: tuple[Dataset, ...], where: str | None) -> None:
    """Raise UsageError unless whole shards of one dataset are served, which `tee` can keep."""
    if len({dataset.whole for dataset in datasets}) > 1:
        raise UsageError("tee= is for one dataset: encode a mixture without it")
    if where or datasets[0].where:
        raise UsageError("tee= keeps whole shards: leave out where=, or tee=")


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank and the world size.

    The arguments come first, then torch.distributed, then the environment, then 0 and 1.
    """
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise UsageError("give both rank and world_size, or neither")
        return rank, world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    own, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    here = f"the environment has RANK={own!r} and WORLD_SIZE={size!r}"
    try:
        rank, world = int(own or 0), int(size or 1)
    except ValueError:
        raise UsageError(f"{here}: set both to whole numbers") from None
    if (rank and not size) or (world > 1 and not own):
        raise UsageError(f"{here}: set both, or give rank= and world_size=")
    return rank, world


def default_threads(encoding: "Encoding | None") -> int:
    """Return the number of threads that read and decode samples.

    Decoding takes all cores. Threads that only read slow each other down if there are more of
    them than cores.
    """
    cpus = usable_cpus()
    return max(2, min(THREADS, cpus)) if encoding is None else max(THREADS, cpus)


def _check_devices(*, pin: bool, device: torch.device | None) -> None:
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={device}: torch finds no such GPU here: leave out device=")
    if pin and not torch.accelerator.is_available():
        raise UsageError(
            "pin=True is for copies to a GPU, and torch finds none on this machine: leave it out"
        )


def _check_text(datasets: tuple[Dataset, ...], names: tuple[str, ...], *, drop_text: float) -> None:
    """Raise UsageError if `drop_text` is set for batches of latents without captions."""
    has_texts = not {*TEXTS, "json"}.isdisjoint(names)
    has_texts = has_texts or any(text_fields(dataset.served) for dataset in datasets)
    if drop_text and datasets[0].kind == "latents" and not has_texts:
        raise UsageError(
            f"{datasets[0].store.url} was made with --text none: leave out drop_text, or ask for "
            'the captions (fields=("latent", "txt"))'
        )


def _check_flips(datasets: tuple[Dataset, ...], names: tuple[str, ...], *, flip: float) -> None:
    for dataset in datasets:
        if dataset.has_moments and batch_name(FLIPPED) in names:
            raise UsageError(
                f"{dataset.store.url} stores moments, from which only latent can be sampled: ask "
                "for latent in fields=, and give flip= for mirror images"
            )
        is_stored = "made" not in names  # and no image that is mirrored before it is encoded
        if flip and is_stored and FLIPPED not in {field.name for field in dataset.served}:
            raise UsageError(
                f"{dataset.store.url} has no latents of mirror images: leave out flip, or encode "
                "with --flip"
            )


def _check_captions(
    datasets: tuple[Dataset, ...], names: tuple[str, ...], effects: Effects, *, raw: bool
) -> None:
    """Raise UsageError if captions cannot be picked, or if a batch would need two masks."""
    if effects.captions and raw:
        raise UsageError(
            "captions= picks texts for batches, and raw=True makes none: leave out one of them"
        )
    if effects.paths and datasets[0].kind == "latents":
        raise UsageError(
            f"captions= cannot pick from {datasets[0].store.url}, which has neither arrays of "
            "texts nor the json of its images: join text datasets made with --caption-name"
        )
    if effects.paths and {*TEXTS}.isdisjoint(names):
        raise UsageError('captions= picks texts, and batches hold none: ask for "txt" in fields=')
    for dataset in datasets:
        if any(effects.choices):
            check_choices(dataset, names, effects.choices)
        lengths = [batch_name(field.name) for field in variable_fields(dataset, names)]
        if len(lengths) > 1:
            raise UsageError(
                f"{dataset.place} and the datasets joined to it have {' and '.join(lengths)} of "
                "varying length, and a batch has one mask: ask for one of them in fields="
            )


def _check_kind(first: Dataset, dataset: Dataset, *, pixels: int) -> None:
    """Raise UsageError if batches cannot hold a dataset, or cannot hold it beside the first one.

    Tars without a manifest need `pixels`, latents refuse it, and latents and images do not mix.
    """
    if dataset.kind == "tars" and not pixels:
        raise UsageError(
            f"{dataset.store.url} holds tars without a manifest: load with raw=True or pixels="
        )
    if (dataset.kind == "latents") != (first.kind == "latents"):
        raise UsageError(
            f"{dataset.store.url} holds {dataset.kind} and {first.store.url} holds {first.kind}: "
            "load them apart"
        )
    if pixels and dataset.kind == "latents":
        raise UsageError(f"{dataset.store.url} holds latents: pixels= is for images")


def choose_fields(
    datasets: tuple[Dataset, ...], fields: Iterable[str] | None, pixels: int
) -> tuple[str, ...]:
    """Return the names of the entries of a batch: those in `fields`, or the usual ones.

    If datasets differ, a batch may hold what any of them has. Raise UsageError for a field that
    none has, or if a column of a joined table has a name that batches use.
    """
    arrays = tuple(dict.fromkeys(batch_name(f.name) for d in datasets for f in d.served))
    if any(field.is_variable for dataset in datasets for field in dataset.served):
        arrays = tuple(dict.fromkeys((*arrays, batch_name(MASK))))
    if datasets[0].kind == "latents":
        shape = (SHAPE,) if any(dataset.size for dataset in datasets) else ()
        straight = (name for name in arrays if name != batch_name(FLIPPED))
        usual, known = (*straight, *shape, "key"), {*arrays, SHAPE, *COMMON_FIELDS}
    else:
        first = "pixels" if pixels else IMAGE_FIELDS[0]
        usual, known = (
            (first, *arrays, *IMAGE_FIELDS[1:]),
            {first, "image", *arrays, *COMMON_FIELDS},
        )
    columns = tuple(dict.fromkeys(name for d in datasets for name in d.columns))
    if taken := sorted(
        n for n in columns if batch_name(n) in {*known, *RESERVED, batch_name(MASK)}
    ):
        raise UsageError(
            f"a joined table has a column {taken[0]}, which batches use for something else: "
            "rename the column"
        )
    usual, known = (*usual, *columns), {*known, *columns}
    if fields is None:
        return usual
    given = (fields,) if isinstance(fields, str) else fields
    names = tuple(dict.fromkeys(batch_name(str(name)) for name in given))
    if not names or not known.issuperset(names):
        raise UsageError(
            f"fields={', '.join(names) or '()'}: {datasets[0].store.url} holds "
            f"{datasets[0].kind}; ask for some of {', '.join(sorted(known))}"
        )
    return names


_log = logging.getLogger("wdsprep")


def check_batch_size(plan: LoadPlan) -> None:
    """Raise UsageError if a batch would hold samples twice and the user did not ask for it.

    If only some of several shapes or streams are too small, log a warning instead.
    """
    order = plan.order
    unweighted = [stream for stream in order.streams if stream.amount == StreamAmount()]
    if order.epoch_steps is not None or not unweighted:
        return
    if order.epoch_samples < order.global_batch:
        raise UsageError(_explain_too_large(plan))
    if order.homogeneous:
        _check_groups(plan, unweighted)


def _check_groups(plan: LoadPlan, unweighted: Sequence[OrderStream]) -> None:
    """Raise UsageError if no stream or shape fills its part of a step; warn if some do not."""
    group = plan.order.group
    small = [stream for stream in unweighted if stream.samples < group]
    largest = max(stream.samples for stream in plan.order.streams)
    name = "shape_batch" if group < plan.order.global_batch else "global_batch"
    what = "shape" if any(stream.part_of is not None for stream in small) else "stream"
    if largest < group:
        few = f"the largest {what} has {plural(largest, 'sample')}, fewer than {name}={group}"
        raise UsageError(f"{_places(plan)}: {few}, {_remedy(plan, largest)}")
    if small and plan.rank == 0:
        of = f"{len(small):,} of {plural(len(plan.order.streams), what)}"
        samples = plural(sum(stream.samples for stream in small), "sample")
        _log.warning(
            "%s: %s (%s in all) have fewer samples than %s=%d, and repeat some in a batch: a "
            "smaller %s repeats fewer",
            *(_places(plan), of, samples, name, group, name),
        )


def _explain_too_large(plan: LoadPlan) -> str:
    order = plan.order
    samples = plural(order.epoch_samples, "sample")
    few = f"{samples} to serve, fewer than global_batch={order.global_batch}"
    largest = max(s.samples for s in order.streams) if order.homogeneous else order.epoch_samples
    return f"{_places(plan)}: {few}, {_remedy(plan, largest)}"


def _remedy(plan: LoadPlan, most: int) -> str:
    """Return advice for a batch larger than `most` samples: a size that fits, or `epoch_steps=`."""
    order = plan.order
    group = order.group if order.group < order.global_batch and order.group <= most else 1
    unit = math.lcm(plan.world, group)
    most = order.epoch_samples if group > 1 else most
    fits = most // unit * unit
    steps = max(1, order.epoch_samples // order.global_batch)
    repeats = f"epoch_steps={steps} if a batch may hold samples several times"
    if not fits:
        return f"and too few for {plural(plan.world, 'rank')}: give {repeats}"
    alone = " without shape_batch" if group == 1 and order.group < order.global_batch else ""
    return f"which would repeat some: give global_batch={fits}{alone} or less, or {repeats}"


def _places(plan: LoadPlan) -> str:
    return ", ".join(dict.fromkeys(dataset.store.url for dataset in plan.datasets))
