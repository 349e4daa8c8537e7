"""Serves a dataset, or a mixture of several, to a trainer: one order, whatever the cluster.

    loader = wdsprep.load("shards/latents-256", global_batch=1024)
    for epoch in range(10):
        for batch in loader:                     # this rank's share: latent, emb, key
            train(batch)
            state = loader.state_dict()          # the same on every rank

The order is `wdsprep.order`'s, a function of seed and step in which each sample comes exactly once
a pass (the proof is in `wdsprep.passes`). So the whole state is the number of steps served. A state
may be resumed on any number of ranks, threads and workers, with nothing lost or repeated; one that
belongs to other data, another seed or batch is refused. It counts what was *yielded*, never what
was read ahead.

Threads read ahead by default. Inside `torch.utils.data.DataLoader(loader, batch_size=None,
num_workers=V)` each of the V workers takes every V-th step, and the DataLoader's taking turns gives
the order back. Workers are other processes, so there the count is the trainer's: set `loader.step`
before each epoch.

    for batch in DataLoader(loader, batch_size=None, num_workers=2):
        step += 1                                # resume: load(..., step=step)

torchdata's StatefulDataLoader asks each worker for its state, and needs as many workers again.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from wdsprep.catalog import Dataset, Stream, open_all
from wdsprep.effects import Effects, check_rate, empty_of
from wdsprep.errors import FingerprintError, UsageError
from wdsprep.grid import short
from wdsprep.order import Order
from wdsprep.serving import Plan, serve
from wdsprep.transfer import transferred

Numbered = Iterator[tuple[int, dict[str, Any]]]
THREADS = 3
OF_IMAGES = ("image", "txt", "key")
TEXTS = ("txt", "caption", "json", "key")


def load(
    streams: str | Stream | Iterable[str | Stream],
    *,
    global_batch: int,
    seed: int = 0,
    epochs: int | None = 1,
    step: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
    fields: Iterable[str] | None = None,
    raw: bool = False,
    pixels: int = 0,
    drop_text: float = 0.0,
    homogeneous: bool = False,
    window: int = 256,
    epoch_steps: int | None = None,
    threads: int = THREADS,
    ahead: int | None = None,
    skip_missing: bool = False,
    pin: bool = False,
    device: str | torch.device | None = None,
) -> "Loader":
    """A loader of one dataset or of a mixture; each step is `global_batch` samples over all ranks.

    `epochs` is the length of an iteration, None for one without end, and `step` where to begin.
    `rank` and `world_size` come from torch.distributed or the environment unless given. `fields`
    names what a batch holds: the arrays, `key`, `txt` (or `caption`), `json`; of images `image` or,
    with `pixels=256`, `pixels`. `raw` gives samples one by one, as webdataset has them.
    `drop_text` is the rate at which captions become the empty one; `homogeneous` keeps a step to
    one stream; `window` is how far the order shuffles inside a shard. `skip_missing` serves other
    samples in place of a missing shard's. `device` copies batches there, `pin` pins them.
    """
    datasets = open_all(streams)
    order = Order(
        streams=tuple(dataset.as_stream() for dataset in datasets),
        global_batch=global_batch,
        seed=seed,
        window=window,
        homogeneous=homogeneous,
        epoch_steps=epoch_steps,
    )
    if epochs is not None and epochs < 1:
        raise UsageError(f"epochs {epochs}: give 1 or more, or None for no end")
    rank, world = placed(rank, world_size)
    order.step(max(0, step), rank=rank, world=world)  # refuses what cannot be
    _check_alike(datasets, raw=raw, pixels=pixels, homogeneous=homogeneous)
    effects = Effects(
        datasets=datasets,
        seed=seed,
        global_batch=global_batch,
        drop_text=check_rate(drop_text),
        pixels=pixels,
        empty=tuple(map(empty_of, datasets)) if drop_text else (),
    )
    plan = Plan(
        datasets=datasets,
        order=order,
        rank=rank,
        world=world,
        epochs=epochs,
        names=() if raw else _names(datasets, fields, pixels),
        effects=effects,
        raw=raw,
        threads=threads,
        ahead=threads + 2 if ahead is None else ahead,
        pin=pin or (device is not None and torch.device(device).type == "cuda"),
        skip_missing=skip_missing,
    )
    return Loader(plan, step=step, device=device)


def placed(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: as given, from torch.distributed, from the environment, or 0 of 1."""
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise UsageError("give both rank and world_size, or none")
        return rank, world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _check_alike(
    datasets: tuple[Dataset, ...], *, raw: bool, pixels: int, homogeneous: bool
) -> None:
    """What is to stand in one batch must be of one kind and shape."""
    first = datasets[0]
    for dataset in datasets:
        if raw:
            continue
        if dataset.kind == "tars" and not pixels:
            raise UsageError(
                f"{dataset.store.url} holds tars without a manifest: load with raw=True or pixels="
            )
        if (dataset.kind == "latents") != (first.kind == "latents"):
            raise UsageError(f"{dataset.store.url} holds {dataset.kind}, others {first.kind}")
        same = (dataset.fields, dataset.has_moments) == (first.fields, first.has_moments)
        if not same and not homogeneous:
            raise UsageError(
                f"{dataset.store.url} has arrays of other shapes than {first.store.url}: "
                "homogeneous=True keeps each batch to one stream"
            )


def _names(
    datasets: tuple[Dataset, ...], fields: Iterable[str] | None, pixels: int
) -> tuple[str, ...]:
    """What a batch holds; where streams differ, what any of them has."""
    arrays = tuple(dict.fromkeys(short(f) for d in datasets for f in d.fields))
    if datasets[0].kind == "latents":
        usual, known = (*arrays, "key"), {*arrays, *TEXTS}
    else:
        usual, known = OF_IMAGES, {"image", *TEXTS}
        if pixels:
            usual, known = ("pixels", *OF_IMAGES[1:]), {"pixels", *known}
    if fields is None:
        return usual
    names = tuple(dict.fromkeys(name.removesuffix(".npy") for name in fields))
    if not names or not known.issuperset(names):
        raise UsageError(f"fields {', '.join(names)}: there are {', '.join(sorted(known))}")
    return names


class Loader(IterableDataset[dict[str, Any]]):
    """Yields this rank's share of each step. An iteration goes on where the last one stopped, and
    ends with the epoch; `step` is the number of steps served so far."""

    def __init__(
        self, plan: Plan, *, step: int = 0, device: "str | torch.device | None" = None
    ) -> None:
        self._plan, self._device = plan, device
        self._row = 0  # in raw mode, the samples of the step that were served
        self._worker: tuple[int, int, int] | None = None  # in one: its number, of how many, its end
        self.step = step

    def __len__(self) -> int:
        """The batches, or in raw mode the samples, of an iteration from its start."""
        if self._plan.epochs is None:
            raise TypeError("an endless loader has no length")
        steps = self._plan.epochs * self._plan.order.steps_per_epoch
        return steps * (self._plan.share if self._plan.raw else 1)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._plan.order.epoch(self.step)

    @property
    def steps_per_epoch(self) -> int:
        return self._plan.order.steps_per_epoch

    def urls(self) -> list[str]:
        """The shards, as `webdataset.WebDataset` takes them."""
        return [url for dataset in self._plan.datasets for url in dataset.urls()]

    def state_dict(self) -> dict[str, Any]:
        """Under 1 KB of JSON, the same on every rank: resume with `load_state_dict`."""
        state = self._plan.order.state(self.step)
        if self._row:
            state["row"] = [self._row, self._plan.world]
        if self._worker:
            state["worker"] = list(self._worker)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the step of a state, or say why it does not belong to this loader."""
        own = {name: state[name] for name in state if name not in ("row", "worker")}
        step = self._plan.order.resume(own)
        row, world = state.get("row", (0, self._plan.world))
        if row and (world != self._plan.world or not self._plan.raw):
            raise FingerprintError(
                f"the state was made {row} samples into a step by one of {world} ranks: resume raw "
                "mode with as many, or save states between steps"
            )
        worker = state.get("worker")
        self.step, self._row = step, row
        self._worker = (worker[0], worker[1], worker[2]) if worker else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        if info is not None and self._device is not None:
            raise UsageError("device= is for threads: copy in the trainer what workers read")
        if info is None and self._worker is not None:
            raise FingerprintError("the state is a worker's: only its DataLoader can resume it")
        stride = 1 if info is None else info.num_workers
        last = self._end(self.step) if info is None else self._enter(info.id, stride)
        batches = serve(self._plan, range(self.step, max(self.step, last), stride))
        if self._plan.raw:
            return self._one_by_one(batches, stride, last)
        if self._device is not None:
            batches = transferred(batches, torch.device(self._device))
        return self._counted(batches, stride, last)

    def _end(self, step: int) -> int:
        """The step at which an iteration that begins here ends."""
        epochs, length = self._plan.epochs, self._plan.order.steps_per_epoch
        return 1 << 39 if epochs is None else (step // (epochs * length) + 1) * epochs * length

    def _enter(self, number: int, workers: int) -> int:
        """Begin as a worker, whose step is its own next one from then on; where it ends."""
        if self._worker is None:
            self._worker = (number, workers, self._end(self.step))
            self.step += number
        elif self._worker[:2] != (number, workers):
            raise FingerprintError(
                f"the state is of worker {self._worker[0]} of {self._worker[1]}: resume with as "
                "many workers, or count steps in the trainer and set loader.step"
            )
        return self._worker[2]

    def _counted(self, batches: Numbered, stride: int, last: int) -> Iterator[dict[str, Any]]:
        for step, batch in batches:
            self.step = step + stride
            yield batch
        self.step, self._worker = last, None

    def _one_by_one(self, batches: Numbered, stride: int, last: int) -> Iterator[dict[str, Any]]:
        for step, batch in batches:
            samples = batch["samples"]
            for row in range(self._row, len(samples)):
                self._row = (row + 1) % len(samples)
                self.step = step if self._row else step + stride
                yield samples[row]
        self.step, self._worker = last, None
