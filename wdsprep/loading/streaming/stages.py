"""Decode and encode pieces: two stages, whose workers call a function for each piece.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from wdsprep.dataset.npy_arrays import FLIPPED, OF_SIZES, Field
from wdsprep.encoding.on_the_fly.encode_steps import BatchEncoder, Encoding
from wdsprep.encoding.progress import Stats
from wdsprep.loading.batch_memory import Batch
from wdsprep.loading.encoded_batches import EncodedRow, EncodingReader, reading_plan
from wdsprep.loading.load_plan import LoadPlan
from wdsprep.loading.order.global_order import Samples
from wdsprep.loading.prefetch import (
    NO_ROWS,
    begin_batch,
    locate_in_tars,
    open_reader,
    wanted_by_source,
)

PIECE = 64  # samples at most: 12 MB of pixels at 256, 10 MB of embeddings
FILL = 0.5  # the share used of Ray's object store, which spills to disk above 0.8


def samples_in_store(nbytes: float, resolution: int, fields: Iterable[Field]) -> int:
    """Return how many samples a stream may have at once in Ray's object store of `nbytes` bytes.

    A sample takes the room of its pixels or of its arrays, whichever is more.
    """
    arrays = sum(item.array_nbytes for item in fields)
    return int(FILL * nbytes / max(3 * resolution**2, arrays))


def piece_limit(samples: int, pieces: int) -> int:
    """Return how many samples a piece may have if this many pieces share the room of `samples`."""
    return max(1, min(PIECE, samples // pieces))


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """The pieces into which a plan is cut, for all workers of a stream; picklable."""

    plan: LoadPlan
    encoding: Encoding
    most: int

    @property
    def kept(self) -> bool:
        """True if everything is made that `encode` would store."""
        return bool(self.plan.options.tee)

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

    def place(self, number: int) -> tuple[int, int, range]:
        """Return the step and the rank of a piece, and its rows in the rank's share of the step."""
        step, rest = divmod(number, self.per_step)
        part, rank = divmod(rest, self.plan.world)
        start = part * self.size
        return step, rank, range(start, min(start + self.size, self.plan.share))

    def numbers(self, step: int, rank: int) -> list[int]:
        """Return the numbers of the pieces of a trainer's step."""
        first = step * self.per_step + rank
        return [first + part * self.plan.world for part in range(self.parts)]


def _divide_up(count: int, size: int) -> int:
    return -(-count // size)


Work = tuple[str, str, Stats]
"""The name of a stage, one of its workers (host:process), and its work since its first piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A piece on its way: its samples and what was made of them.

    `batch` has their places but no arrays, and `rows` each of them once it is encoded. The arrays
    are the pixels, or those of all rows as one tensor for each field; on the way, `rows` have none.
    """

    number: int
    batch: Batch
    rows: tuple[EncodedRow, ...] = ()
    arrays: Mapping[str, Any]
    lengths: Mapping[str, list[int]] = field(default_factory=dict)
    """The length of each row of the arrays whose lengths vary."""
    worked: tuple[Work, ...] = ()


PackedPiece = dict[str, Any]
StageFunction = Callable[[PackedPiece], PackedPiece]


def make_decoder(pieces: Pieces) -> StageFunction:
    """Return the function of the decode stage."""
    torch.set_num_threads(1)
    plan, stats, began = pieces.plan, Stats(), 0.0
    reader = open_reader(reading_plan(plan))

    @lru_cache(4)
    def find_samples(step: int, rank: int) -> Samples:
        samples = plan.order.step(step, rank=rank, world=plan.world)
        locate_in_tars(plan.datasets, samples)
        return samples

    def decode(packed: PackedPiece) -> PackedPiece:
        nonlocal began
        started = time.monotonic()
        began = began or started
        number = int(packed["number"][0])
        step, rank, rows = pieces.place(number)
        samples = find_samples(step, rank)[rows.start : rows.stop]
        batch = begin_batch(step, rank * plan.share + rows.start, samples)
        for source, places in wanted_by_source(reader, samples, None).items():
            source.expect(places, NO_ROWS)
        reader.fill(reader.begin(batch), range(len(batch)))
        now = time.monotonic()
        stats.samples += len(rows)
        stats.busy_s += now - started
        stats.wall_s = now - began
        pixels = batch.out.pop("pixels")
        batch.views.clear()
        worked = (("decode", worker_name(), stats),)
        return pack_piece(
            Piece(number=number, batch=batch, arrays={"pixels": pixels}, worked=worked)
        )

    return decode


def make_encoder(pieces: Pieces) -> StageFunction:
    """Return the function of the encode stage.

    Two threads may call it: while one waits for the device, the other prepares. The work is
    measured on the device, which they share.
    """
    most = min(pieces.plan.share, PIECE)  # whatever the object store has room for
    encoder = BatchEncoder(pieces.encoding, most=most, kept=pieces.kept)
    reader = EncodingReader(pieces.plan, encoder)
    not_made = OF_SIZES if pieces.kept else (FLIPPED, *OF_SIZES)
    fields = [item for item in pieces.plan.datasets[0].fields if item.name not in not_made]

    def encode(packed: PackedPiece) -> PackedPiece:
        piece = unpack_piece(packed)
        batch = piece.batch
        batch.out["pixels"] = piece.arrays["pixels"]
        rows = reader.collect_rows(batch, reader.begin(batch))
        arrays: dict[str, torch.Tensor] = {}
        lengths: dict[str, list[int]] = {}
        for item in fields:
            tensors = [encoded.arrays[item.name] for encoded, _ in rows]
            arrays[item.name] = torch.cat(tensors) if item.is_variable else torch.stack(tensors)
            if item.is_variable:
                lengths[item.name] = [*map(len, tensors)]
        encoded_piece = replace(
            piece,
            batch=replace(batch, out={}),
            rows=tuple((replace(encoded, arrays={}), place) for encoded, place in rows),
            arrays=arrays,
            lengths=lengths,
            worked=(*piece.worked, ("encode", worker_name(), encoder.batches.stats)),
        )
        return pack_piece(encoded_piece)

    return encode


def worker_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def pack_piece(piece: Piece) -> PackedPiece:
    """Return a piece as one row of Ray Data.

    Tensors travel as bytes, since NumPy does not know all dtypes of torch.
    """
    arrays = {name: a.view(torch.uint8).numpy()[None] for name, a in piece.arrays.items()}
    facts = np.empty(1, object)
    facts[0] = pickle.dumps(replace(piece, arrays={n: a.dtype for n, a in piece.arrays.items()}))
    return {"number": np.array([piece.number]), "facts": facts, **arrays}


def unpack_piece(packed: PackedPiece) -> Piece:
    """Return a packed piece, whose rows have their arrays again.

    The arrays are copies: nobody may write to what comes out of Ray's memory.
    """
    piece: Piece = pickle.loads(packed["facts"][0])  # noqa: S301  made by `pack_piece`
    arrays: dict[str, Any] = {
        name: torch.from_numpy(np.array(packed[name][0])).view(dtype)
        for name, dtype in piece.arrays.items()
    }
    arrays |= {name: torch.split(arrays[name], lengths) for name, lengths in piece.lengths.items()}
    rows = (
        (replace(encoded, arrays={name: of_all[row] for name, of_all in arrays.items()}), place)
        for row, (encoded, place) in enumerate(piece.rows)
    )
    return replace(piece, arrays=arrays, rows=tuple(rows))
