"""The work of `score`: one image shard becomes a shard of scores, rejects, and last a receipt.

Images are decoded once, and prepared by each processor, in a pool of threads that take blocks of a
few samples; batches of one size go to each network in turn. Batches never span shards, so the
scores of a shard are the same after a kill. A CPU computes several batches at once, each on one
core: a sum that is split between cores depends on their number. A worker has two shards under way,
so that one is read while the other is computed.
"""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wdsprep.dataset.draft import Draft
from wdsprep.dataset.npy_arrays import fields_of
from wdsprep.dataset.receipts import Receipt
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Refusal, Reject, RejectedError
from wdsprep.dataset.samples import Sample, facts_bytes
from wdsprep.dataset.stored_dataset import find_receipt
from wdsprep.dataset.tar.member_names import leads_out
from wdsprep.dataset.tar.write import Data
from wdsprep.dataset.unit_locks import Edition
from wdsprep.encoding.captions.sources import replace_surrogates
from wdsprep.encoding.feeder import BLOCK_NBYTES
from wdsprep.encoding.image_shards import ImageShard, tars_of
from wdsprep.encoding.latent_shard import LatentShard, npy_of
from wdsprep.encoding.shard_rows import ShardRows
from wdsprep.images import formats
from wdsprep.images.crop import decode_image
from wdsprep.runners.base import PROGRESS_S, BrokenWorkerError
from wdsprep.runners.run import RunProgress, share_done
from wdsprep.runners.worker import error_line
from wdsprep.scoring.image_processors import DecodedImage
from wdsprep.scoring.languages import RepeatedCaptions, caption_columns
from wdsprep.scoring.models import check_here
from wdsprep.scoring.networks import BatchScores, load_networks
from wdsprep.sources.base import make_or_refuse
from wdsprep.sources.fingerprints import Content
from wdsprep.store import open_store

if TYPE_CHECKING:
    from wdsprep.scoring.work import ScoreWork

UNITS_AT_ONCE = 2
MOST_IN_BLOCK = 8
WAITING_NBYTES = 256 << 20
"""The bytes of images that may wait to be decoded."""


@dataclass(frozen=True, slots=True)
class PreparedSample:
    """A sample with its image prepared for each network, and the columns of its caption."""

    key: str
    sample: Sample
    images: Sequence[Any]
    """The prepared images, or what a processor makes them of, by the number of the processor."""
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample with its columns, and an embedding of each network that keeps one."""

    key: str
    sample: Sample
    columns: dict[str, Any]
    embeddings: Sequence[Tensor]


Found = PreparedSample | Reject


Block = list[tuple[str, Sample | Refusal]]
"""Consecutive samples of a shard, with their keys, which are prepared together."""


class ScoreWorker:
    """A worker of `score`: a process with its models, which scores several shards at once."""

    units_at_once = UNITS_AT_ONCE

    def __init__(self, work: "ScoreWork") -> None:
        self._work = work
        self._edition = Edition(store=open_store(work.scores), mark=work.edition)
        self._fields = fields_of(work.settings["layout"])
        here = [check_here(model) for model in work.models]
        self._networks = load_networks(here, work.device, work.dtype)
        self._processors = list(dict.fromkeys(each.processor for each in self._networks))
        threads = work.threads or _own_cores(work.gpus)
        # A network of half precision may turn to fp32 for a batch, so nothing else computes there.
        lanes = threads if work.device == "cpu" and work.dtype == "fp32" else 1
        self._size = work.batch_size
        self._ahead = 2 * threads + self._size
        self._pool = ThreadPoolExecutor(threads, "decode", torch.set_num_threads, (1,))
        self._lanes = ThreadPoolExecutor(lanes, "score", torch.set_num_threads, (1,))
        self._most = 1 + lanes

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._lanes.shutdown(cancel_futures=True)

    def __call__(self, shard: ImageShard) -> Generator[RunProgress, None, Receipt]:
        """Score an image shard, and return its receipt. Progress is yielded meanwhile.

        If the shard has been scored already, only its receipt is returned.
        """
        work = self._work
        if done := find_receipt(self._edition.store, shard.name, shard.input, work.settings):
            return done
        content = Content(is_kept=shard.is_foreign)
        rows = ShardRows(
            source=tars_of(work.images, work.max_nbytes),
            shard=shard,
            content=content,
            has_images=bool(self._networks),
        )
        with (
            Draft(self._edition, shard.name) as draft,
            closing(LatentShard(draft, shard, self._fields)) as output,
        ):
            scored: list[ScoredSample | Reject] = []
            told = time.monotonic()
            for each in self._scored(rows):
                if each is not None:
                    scored.append(each)
                if each is None or time.monotonic() - told > PROGRESS_S:
                    told = time.monotonic()
                    yield _progress(shard, scored)
            yield _progress(shard, scored)
            self._write(scored, output)
            output.counts.update(rows.left_out.counts())
            files = content.file if shard.is_foreign else {}
            return output.finish(work.settings, files)

    def _scored(self, rows: ShardRows) -> Iterator[ScoredSample | Reject | None]:
        """Yield each sample with its scores, or its reject, in order.

        Yield None while results are awaited.
        """
        batch: list[PreparedSample] = []
        going: deque[tuple[list[Found], Future[list[ScoredSample]]]] = deque()
        span: list[Found] = []
        try:
            for found in self._prepared(rows):
                if found is None:
                    yield None
                    continue
                span.append(found)
                if isinstance(found, PreparedSample):
                    batch.append(found)
                if len(batch) == self._size:
                    yield from self._make_room(going)
                    going.append((span, self._lanes.submit(self._run, batch)))
                    batch, span = [], []
            going.append((span, self._lanes.submit(self._run, batch)))
            while going:
                yield from self._first_of(going)
        finally:
            for _, future in going:
                future.cancel()

    def _make_room(
        self, going: "deque[tuple[list[Found], Future[list[ScoredSample]]]]"
    ) -> Iterator[ScoredSample | Reject | None]:
        """Yield the results of the oldest batches, until there is room for another batch."""
        while len(going) > self._most or (going and going[0][1].done()):
            yield from self._first_of(going)

    def _first_of(
        self, going: "deque[tuple[list[Found], Future[list[ScoredSample]]]]"
    ) -> Iterator[ScoredSample | Reject | None]:
        """Wait for the oldest batch, yield its samples and the rejects among them, and remove it.

        Yield None while its results are awaited.
        """
        span, future = going[0]
        while not wait([future], PROGRESS_S).done:
            yield None
        scored = iter(future.result())
        for found in span:
            yield found if isinstance(found, Reject) else next(scored)
        going.popleft()

    def _prepared(self, rows: ShardRows) -> Iterator[Found | None]:
        """Yield each sample with its prepared images, or its reject, in order.

        The next ones are decoded meanwhile. Yield None while results are awaited.
        """
        waiting: deque[tuple[Future[list[Found]], int, int]] = deque()
        samples = nbytes = 0
        try:
            for block, size in _blocks(rows):
                while waiting and (samples > self._ahead or nbytes + size > WAITING_NBYTES):
                    yield from _waited(waiting[0][0])
                    _, done, freed = waiting.popleft()
                    samples, nbytes = samples - done, nbytes - freed
                waiting.append((self._pool.submit(self._prepare, block), len(block), size))
                samples, nbytes = samples + len(block), nbytes + size
            while waiting:
                yield from _waited(waiting[0][0])
                waiting.popleft()
        finally:
            for future, *_ in waiting:
                future.cancel()

    def _prepare(self, block: Block) -> list[Found]:
        """Return the samples of a block with their prepared images, or their rejects."""
        with formats.quiet:  # once for all of them
            found = [self._scale(key, row) for key, row in block]
        samples = [each for each in found if isinstance(each, PreparedSample)]
        images = [
            processor.finish([each.images[number] for each in samples])
            for number, processor in enumerate(self._processors)
        ]
        finished = (
            replace(each, images=[own[row] for own in images]) for row, each in enumerate(samples)
        )
        return [each if isinstance(each, Reject) else next(finished) for each in found]

    def _scale(self, key: str, row: Sample | Refusal) -> Found:
        """Return a sample with its images scaled for each processor, or its reject."""
        if isinstance(row, Refusal):
            return row.to_reject(key)
        if leads_out(key):
            return Reject(key=key, source=row.source, code=Code.BAD_KEY)
        made = make_or_refuse(row.source, lambda: self._scaled(key, row))
        return made.to_reject(key) if isinstance(made, Refusal) else made

    def _scaled(self, key: str, row: Sample) -> PreparedSample:
        caption = replace_surrogates(row.caption)
        images: list[Any] = []
        if self._processors:
            image = DecodedImage(decode_image(row.image, max_area=self._work.max_area))
            images = [each.scale(image) for each in self._processors]
        columns = caption_columns(caption) if self._work.has_captions else {}
        sample = Sample(source=row.source, image=b"", captions=(caption,), facts=row.facts)
        return PreparedSample(key, sample, images, columns)

    def _run(self, batch: Sequence[PreparedSample]) -> list[ScoredSample]:
        """Return the samples of a batch with the scores of all networks.

        Raise BrokenWorkerError if a network fails: its device may be lost.
        """
        if not batch:
            return []
        captions = [each.sample.caption for each in batch]
        made: list[BatchScores] = []
        for network in self._networks:
            images = [each.images[self._processors.index(network.processor)] for each in batch]
            try:
                made.append(network.run(images, captions))
            except (RuntimeError, MemoryError) as error:
                raise BrokenWorkerError(error_line(error)) from error
        return [_scored_sample(each, made, row) for row, each in enumerate(batch)]

    def _write(self, scored: Sequence[ScoredSample | Reject], output: LatentShard) -> None:
        """Write the samples and rejects of a shard in its order.

        If captions are scored, samples get the column of repeated captions here. A sample whose
        numbers are not finite is rejected.
        """
        repeats = RepeatedCaptions()
        if self._work.has_captions:
            repeats.add(e.sample.caption for e in scored if isinstance(e, ScoredSample))
        for each in scored:
            if isinstance(each, Reject):
                output.rejects.add(each)
                continue
            columns = dict(each.columns)
            if self._work.has_captions:
                columns["caption_repeats"] = repeats.of(each.sample.caption)
            try:
                self._add(output, each, columns)
            except RejectedError as refused:
                source, code, detail = each.sample.source, refused.code, refused.detail
                output.rejects.add(Reject(key=each.key, source=source, code=code, detail=detail))

    def _add(self, output: LatentShard, scored: ScoredSample, columns: dict[str, Any]) -> None:
        numbers = [value for value in columns.values() if not isinstance(value, str)]
        arrays = [*scored.embeddings]
        if not all(map(_is_finite, numbers)) or not all(a.isfinite().all() for a in arrays):
            raise RejectedError(Code.NOT_FINITE)
        source = scored.sample.facts.get("source", scored.sample.source)
        facts = {**columns, "key": scored.key, "source": source}
        members: list[tuple[str, Data]] = [
            *((item.name, npy_of(item, a)) for item, a in zip(self._fields, arrays, strict=True)),
            ("json", facts_bytes(facts)),
            ("txt", b""),
        ]
        output.add_members(scored.key, members, cut=None)


def _is_finite(value: float) -> bool:
    return value - value == 0


def _blocks(rows: ShardRows) -> Iterator[tuple[Block, int]]:
    """Yield the samples of a shard in blocks, each with the bytes of its images."""
    block: Block = []
    nbytes = 0
    for key, row in rows.read():
        block.append((key, row))
        nbytes += 0 if isinstance(row, Refusal) else len(row.image)
        if len(block) == MOST_IN_BLOCK or nbytes > BLOCK_NBYTES:
            yield block, nbytes
            block, nbytes = [], 0
    if block:
        yield block, nbytes


def _waited(future: "Future[list[Found]]") -> Iterator[Found | None]:
    while not wait([future], PROGRESS_S).done:
        yield None
    yield from future.result()


def _scored_sample(prepared: PreparedSample, made: Sequence[BatchScores], row: int) -> ScoredSample:
    """Return a sample with the scores in one row of a batch, written with the digits of fp32."""
    columns = dict(prepared.columns)
    for each in made:
        for name, numbers in each.columns.items():
            columns[name] = short_number(numbers[row])
    embeddings = [each.embeddings[row] for each in made if each.embeddings is not None]
    return ScoredSample(prepared.key, prepared.sample, columns, embeddings)


def short_number(value: Tensor) -> float:
    """Return the number with the fewest digits that is equal to a value in fp32."""
    return float(str(value.numpy()))


def _progress(shard: ImageShard, scored: Sequence[ScoredSample | Reject]) -> RunProgress:
    samples = sum(isinstance(each, ScoredSample) for each in scored)
    codes: dict[str, int] = {}
    for each in scored:
        if isinstance(each, Reject):
            codes[each.code.value] = codes.get(each.code.value, 0) + 1
    return RunProgress(
        samples=samples,
        nbytes=0,
        share=share_done(len(scored), shard.item.take or shard.item.samples),
        rejects=codes,
    )


def _own_cores(gpus: float) -> int:
    from wdsprep.runners.ray.cluster import node_share  # where nobody else could know

    return max(1, int(node_share(gpus)))
