"""Decode and encode pieces: two stages, whose workers call a class for each piece.

A decoder reads a piece's images and crops them, one core for each worker; an encoder makes arrays
of the crops. Pieces travel as rows of Ray Data: the bytes of pixels, then those of arrays, together
with what else is known of the samples. Arrays of variable length stand one after another. Neither
stage keeps anything between calls, so a worker that dies is replaced, and its piece is made again,
the same.

All parts of a stream agree which samples the number of a piece stands for (`Pieces`). A *piece* is
a run of samples of one step and one trainer. Pieces are numbered in the order in which trainers
need them: part by part of a step, one for each trainer in turn. So every W-th number is a trainer's
own, and dealing pieces out one after the other gives each trainer its steps in order.
"""

import os
import pickle
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from wdsprep.dataset.npy_arrays import FLIPPED, OF_SIZES, Field
from wdsprep.encoding.on_the_fly.image_preparation import Encoding
from wdsprep.encoding.on_the_fly.step_batches import BatchEncoder
from wdsprep.loading.batch_memory import Batch
from wdsprep.loading.load_plan import LoadPlan
from wdsprep.loading.on_the_fly.encoded_batches import EncodedRow, EncodingReader, reading_plan
from wdsprep.loading.order.global_order import Samples
from wdsprep.loading.prefetch import NOTHING, locate_in_tars, open_reader

PIECE = 64  # samples at most: 12 MB of pixels at 256, 10 MB of embeddings


FILL = 0.5  # the share used of Ray's object store, which spills to disk above 0.8


@dataclass(frozen=True, kw_only=True)
class StreamRoom:
    """The part of Ray's object store that a stream may use, counted in samples.

    A sample takes the room of its pixels or of its arrays, whichever is more.
    """

    samples: int

    @classmethod
    def from_store(cls, nbytes: float, resolution: int, fields: Iterable[Field]) -> "StreamRoom":
        """Return the room in an object store of `nbytes` bytes."""
        arrays = sum(field.array_nbytes for field in fields)
        return cls(samples=int(FILL * nbytes / max(3 * resolution**2, arrays)))

    def piece_limit(self, pieces: int) -> int:
        """Return how many samples a piece may have if this many pieces are under way at once."""
        return max(1, min(PIECE, self.samples // pieces))


@dataclass(frozen=True, kw_only=True)
class PiecePlace:
    """The place of a piece: rows [start, end) of a trainer's share of a step."""

    number: int
    step: int
    rank: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces into which a plan is cut, for all workers of a stream; picklable."""

    plan: LoadPlan
    encoding: Encoding
    most: int
    kept: bool = False
    """True if everything is made that `encode` would store."""

    @cached_property
    def size(self) -> int:
        """The number of samples in a piece; the last piece of a share may have fewer."""
        return _divide_up(self.plan.share, _divide_up(self.plan.share, self.most))

    @property
    def parts(self) -> int:
        """The number of pieces in a trainer's step."""
        return _divide_up(self.plan.share, self.size)

    @property
    def per_step(self) -> int:
        return self.parts * self.plan.world

    def place(self, number: int) -> PiecePlace:
        step, rest = divmod(number, self.per_step)
        part, rank = divmod(rest, self.plan.world)
        start = part * self.size
        end = min(start + self.size, self.plan.share)
        return PiecePlace(number=number, step=step, rank=rank, start=start, end=end)

    def numbers(self, step: int, rank: int) -> list[int]:
        """Return the numbers of the pieces of a trainer's step."""
        first = step * self.per_step + rank
        return [first + part * self.plan.world for part in range(self.parts)]

    def plan_of(self, rank: int) -> LoadPlan:
        return replace(self.plan, rank=rank)


def _divide_up(count: int, size: int) -> int:
    return -(-count // size)


PackedPiece = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class WorkerStats:
    """The work of one worker since its first piece."""

    stage: str
    worker: str
    samples: int = 0
    busy_s: float = 0.0
    wall_s: float = 0.0
    _began: float = field(default=0.0, repr=False)

    @classmethod
    def start(cls, stage: str) -> "WorkerStats":
        return cls(stage=stage, worker=f"{socket.gethostname()}:{os.getpid()}")

    @contextmanager
    def measure(self, samples: int) -> Iterator[None]:
        started = time.monotonic()
        self._began = self._began or started
        yield
        now = time.monotonic()
        self.samples += samples
        self.busy_s += now - started
        self.wall_s = now - self._began


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceMetadata:
    """The metadata that travels with the pixels or arrays of a piece."""

    batch: Batch
    rows: tuple[EncodedRow, ...] = ()
    lengths: tuple[int, ...] = ()
    """The length of each row's array of variable length, if there is one."""
    worked: tuple[WorkerStats, ...] = ()


class DecodeStage:
    def __init__(self, pieces: Pieces) -> None:
        torch.set_num_threads(1)
        self._pieces = pieces
        self._reader = open_reader(reading_plan(pieces.plan, torch.device("cpu")))
        self._worked = WorkerStats.start("decode")
        self._share = lru_cache(maxsize=4)(self._find_samples)

    def __call__(self, wire: PackedPiece) -> PackedPiece:
        place = self._pieces.place(int(wire["number"][0]))
        with self._worked.measure(place.end - place.start):
            batch = self._read(place)
        pixels = batch.out.pop("pixels")
        batch.views.clear()
        facts = PieceMetadata(batch=batch, worked=(self._worked,))
        return pack_piece(place.number, facts, {"pixels": pixels})

    def _read(self, place: PiecePlace) -> Batch:
        share = self._share(place.step, place.rank)
        rows = slice(place.start, place.end)
        batch = Batch(
            step=place.step,
            first=place.rank * self._pieces.plan.share + place.start,
            stream=share.stream[rows].tolist(),
            shard=share.shard[rows].tolist(),
            index=share.index[rows].tolist(),
        )
        for number, sources in enumerate(self._reader.sources):
            here = share.stream[rows] == number
            sources[0].expect((share.shard[rows][here], share.index[rows][here]), NOTHING)
        self._reader.fill(self._reader.begin(batch), range(len(batch)))
        return batch

    def _find_samples(self, step: int, rank: int) -> Samples:
        plan = self._pieces.plan
        found = plan.order.step(step, rank=rank, world=plan.world)
        locate_in_tars(plan.datasets, found)
        return found


class EncodeStage:
    def __init__(self, pieces: Pieces) -> None:
        encoding = pieces.encoding
        is_cuda = encoding.device.startswith("cuda")
        encoder = BatchEncoder(
            encoding.load(),
            seed=encoding.recipe.seed,
            most=min(pieces.plan.share, PIECE),  # whatever the object store has room for
            batch_size=encoding.batch_size,
        )
        self._encoding = EncodingReader(pieces.plan, encoder, kept=pieces.kept)
        fields = pieces.plan.datasets[0].fields
        not_made = OF_SIZES if pieces.kept else (FLIPPED, *OF_SIZES)
        self._fields = tuple(field for field in fields if field.name not in not_made)
        self._pin = is_cuda
        self._encoder = encoder

    def _worked(self) -> WorkerStats:
        """Return the work of this worker, measured on the device, which its threads share."""
        stats, worked = self._encoder.stats, WorkerStats.start("encode")
        worked.samples, worked.busy_s, worked.wall_s = stats.samples, stats.busy_s, stats.wall_s
        return worked

    def __call__(self, wire: PackedPiece) -> PackedPiece:
        """Encode a piece.

        Two threads may call this: while one waits for the device, the other prepares.
        """
        number, facts, tensors = unpack_piece(wire)
        batch = facts.batch
        pixels = tensors["pixels"]
        batch.out["pixels"] = pixels.pin_memory() if self._pin else pixels
        rows = self._encoding.collect_rows(batch, self._encoding.begin(batch))
        arrays, lengths = join_rows(self._fields, [row.result.arrays for row in rows])
        facts = PieceMetadata(
            batch=_without_arrays(batch),
            rows=tuple(replace(row, result=replace(row.result, arrays={})) for row in rows),
            lengths=lengths,
            worked=(*facts.worked, self._worked()),
        )
        return pack_piece(number, facts, arrays)


def encode_empty_caption(pieces: Pieces) -> dict[str, torch.Tensor]:
    """Return the encoded arrays of the empty caption."""
    encoder = BatchEncoder(pieces.encoding.load(), seed=0, most=1)
    try:
        return encoder.empty()
    finally:
        encoder.close()


def _without_arrays(batch: Batch) -> Batch:
    """Return a batch of the same rows, without the arrays that were read."""
    return Batch(
        batch.step,
        batch.first,
        batch.stream,
        batch.shard,
        batch.index,
        keys=batch.keys,
        refused=batch.refused,
    )


def join_rows(
    fields: Sequence[Field], rows: Sequence[Mapping[str, torch.Tensor]]
) -> tuple[dict[str, torch.Tensor], tuple[int, ...]]:
    """Return the arrays of all rows as one tensor for each field, and the variable lengths.

    Arrays of variable length stand one after another. Without any, the lengths are ().
    """
    arrays: dict[str, torch.Tensor] = {}
    lengths: tuple[int, ...] = ()
    for item in fields:
        own = [row[item.name] for row in rows]
        arrays[item.name] = torch.cat(own) if item.is_variable else torch.stack(own)
        if item.is_variable:
            lengths = tuple(map(len, own))
    return arrays, lengths


def pack_piece(
    number: int, facts: PieceMetadata, tensors: Mapping[str, torch.Tensor]
) -> PackedPiece:
    """Return a piece as one row of Ray Data.

    Tensors travel as bytes, since NumPy does not know all dtypes of torch.
    """
    arrays = {name: tensor.view(torch.uint8).numpy()[None] for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    data = np.empty(1, object)
    data[0] = pickle.dumps((facts, dtypes))
    return {"number": np.array([number]), "facts": data, **arrays}


def unpack_piece(
    wire: PackedPiece, row: int = 0
) -> tuple[int, PieceMetadata, dict[str, torch.Tensor]]:
    """Return the number, the metadata and the tensors of a packed piece.

    The tensors are copies: nobody may write to what comes out of Ray's memory.
    """
    facts: PieceMetadata
    dtypes: dict[str, torch.dtype]
    facts, dtypes = pickle.loads(wire["facts"][row])  # noqa: S301  made by `pack_piece`
    tensors = {
        name: torch.from_numpy(np.array(wire[name][row])).view(dtype)
        for name, dtype in dtypes.items()
    }
    return int(wire["number"][row]), facts, tensors
