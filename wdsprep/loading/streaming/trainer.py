"""Make batches of the pieces that arrive in a trainer, in order, and count them.

Ray Data gives a trainer its pieces in their order, also when workers die. Each piece is checked for
that: one that is lost, repeated or out of turn is an error here, never a wrong batch.
"""

import atexit
import re
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import ray
import torch
from ray.data.collate_fn import NumpyBatchCollateFn
from ray.exceptions import RayError

from wdsprep import errors
from wdsprep.encoding.on_the_fly.latent_writer import LatentWriter
from wdsprep.encoding.progress import Stats
from wdsprep.errors import WdsprepError, WorkError
from wdsprep.loading.encoded_batches import BatchBuilder, open_tee, with_empty_caption
from wdsprep.loading.streaming.stages import PackedPiece, Piece, Pieces, unpack_piece
from wdsprep.loading.streaming.workers import THEN, new_trainer
from wdsprep.runners.worker_versions import find_refusal
from wdsprep.version import __version__

READY = 2  # batches that are fetched before they are wanted, if there is room for them
RECENT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The state of a stage: its workers and how fast they are.

    `workers` lists all workers so far (host:process), also those that have ended. `rate` is the
    number of samples that they make in a second together, and `busy` the share of time in which
    they work rather than wait. Both count only workers whose pieces came in the last two
    minutes.
    """

    name: str
    workers: tuple[str, ...]
    rate: float
    busy: float


class PieceCollate(NumpyBatchCollateFn):  # type: ignore[misc]
    """A function that unpacks pieces, in a thread beside the trainer.

    Each piece leaves Ray's memory on its own. A whole step may be more than that has room for.
    """

    def __call__(self, packed: PackedPiece) -> Piece:
        return unpack_piece(packed)


class Trainer:
    """A trainer of a stream: an iterable over the batches of one rank.

    It is picklable until it is iterated. An iteration may be left and continued. It ends with
    the stream.
    """

    def __init__(
        self,
        pieces: Pieces,
        source: Any,
        pace: Any,
        *,
        step: int,
        end: int,
        ready: int,
        empty: Mapping[str, torch.Tensor],
    ) -> None:
        """Make a trainer that fetches up to `ready` pieces before they are asked for."""
        self._pieces, self._source, self._pace = pieces, source, pace
        self.plan = pieces.plan
        self._ready = ready
        self._empty = empty
        self._end = end
        self.step = step
        self._workers: dict[tuple[str, str], tuple[Stats, float]] = {}
        """The work of each worker, and the time of its last piece, by stage and worker."""

    def __len__(self) -> int:
        """Return how many batches are left."""
        return self._end - self.step

    def __repr__(self) -> str:
        return f"<Trainer {self.plan.summary}; at step {self.step:,}>"

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, the same on every trainer.

        A loader of the stored latents would have the same state.
        """
        return self.plan.order.state(self.step)

    def stages(self) -> list[Stage]:
        """Return the state of both stages, as known from the batches so far."""
        stages = []
        for name in ("decode", "encode"):
            workers = {worker: work for (of, worker), work in self._workers.items() if of == name}
            last = max((at for _, at in workers.values()), default=0.0)
            recent = [stats for stats, at in workers.values() if at > last - RECENT_S]
            wall = sum(stats.wall_s for stats in recent)
            stage = Stage(
                name=name,
                workers=tuple(workers),
                rate=sum(stats.samples / stats.wall_s for stats in recent if stats.wall_s),
                busy=sum(stats.busy_s for stats in recent) / wall if wall else 0.0,
            )
            stages.append(stage)
        return stages

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.step < self._end:
            numbers = self._pieces.numbers(self.step, self.plan.rank)
            pieces = [self._take_piece(number) for number in numbers]
            batches = [piece.batch for piece in pieces]
            rows = [row for piece in pieces for row in piece.rows]
            out = self._builder.build(batches, rows, [piece.arrays for piece in pieces]).out
            if (tee := self._tee) is not None:
                for piece in pieces:
                    for number, (encoded, row_shard, row_index) in enumerate(piece.rows):
                        kept = {name: of_all[number] for name, of_all in piece.arrays.items()}
                        tee.add(row_shard, row_index, replace(encoded, arrays=kept))
                    tee.refuse(piece.batch.refused)
            self.step += 1
            yield out
        self.close()

    def close(self) -> None:
        """Stop the iteration. With a tee, list the complete latent shards in their manifest."""
        opened = vars(self)
        with ExitStack() as stack:  # from the last one on, whatever fails
            if tee := opened.get("_tee"):
                stack.callback(tee.close)
                stack.callback(tee.publish)
            if "_made" in opened:
                atexit.unregister(self._at_exit)
                stack.callback(self._made.close)

    @property
    def actors(self) -> tuple[Any, Any]:
        """The two actors that a stream cannot do without: the pipeline and the pace."""
        return self._source._coord_actor, self._pace

    def _take_piece(self, wanted: int) -> Piece:
        try:
            piece = next(self._made)
        except StopIteration:
            raise WorkError(
                f"the stream ended at step {self.step} of {self._end}: {THEN}"
            ) from None
        except RayError as error:
            raise worker_error(error) from error
        if piece.number != wanted:
            raise WorkError(
                f"step {self.step} of the stream is lost, as piece {piece.number} came in place of "
                f"piece {wanted}: {THEN}"
            )
        self._pace.note_done.remote(self.plan.rank, wanted + self.plan.world)
        for stage, worker, stats in piece.worked:
            known = self._workers.get((stage, worker))
            if known is None or known[0].samples < stats.samples:
                self._workers[stage, worker] = stats, time.monotonic()
        return piece

    @cached_property
    def _made(self) -> "Generator[Piece, None, None]":
        pieces: Generator[Piece, None, None] = iter(
            self._source.iter_torch_batches(
                batch_size=1, collate_fn=PieceCollate(), prefetch_batches=self._ready
            )
        )
        self._at_exit = partial(_close_on_ray, pieces)
        atexit.register(self._at_exit)
        return pieces

    @cached_property
    def _builder(self) -> BatchBuilder:
        return BatchBuilder(with_empty_caption(self.plan, self._empty))

    @cached_property
    def _tee(self) -> LatentWriter | None:
        return open_tee(self.plan, self._pieces.encoding, lambda: self._empty)

    def __reduce__(self) -> tuple[Any, ...]:
        return new_trainer, (__version__,), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        opened = ("_made", "_at_exit", "_builder", "_tee")
        return {name: value for name, value in vars(self).items() if name not in opened}


def _close_on_ray(pieces: "Generator[Piece, None, None]") -> None:
    """Close a stream that the program left open, unless Ray has ended.

    If Ray has ended, closing the stream would start Ray again.
    """
    if ray.is_initialized():
        pieces.close()


def worker_error(error: RayError) -> WdsprepError:
    """Return a worker's own error, without what Ray wraps around it.

    The error is found in the text of Ray's error, as only the text comes here. If the text has no
    error of wdsprep, return a WorkError with its last line.
    """
    text = str(error).strip()
    if refusal := find_refusal(text):
        return WorkError(refusal)
    for name, message in re.findall(r"^wdsprep\.errors\.(\w+): (.+)$", text, re.MULTILINE):
        return cast(WdsprepError, getattr(errors, name)(message))
    return WorkError(f"the stream has failed: {text.splitlines()[-1]}")
