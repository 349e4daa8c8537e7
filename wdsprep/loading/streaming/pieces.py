"""Number the pieces of a stream: all its parts agree which samples a number stands for.

A *piece* is a run of samples of one step and one trainer. Pieces are numbered in the order in which
trainers need them: part by part of a step, one for each trainer in turn. So every W-th number is a
trainer's own, and dealing pieces out one after the other gives each trainer its steps in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from wdsprep.dataset.npy_arrays import Field
from wdsprep.encoding.on_the_fly.image_preparation import Encoding
from wdsprep.loading.load_plan import LoadPlan

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
