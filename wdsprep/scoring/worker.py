"""The worker of `score`: that of `encode`, with an engine and a shard for scores.

In the engine, images are prepared by the processors of models, not cut. A batch has samples of one
shard alone, in their order, so the scores of a shard are the same after a kill. It ends with the
shard, or after so many samples that the rest of them cannot hold up the engine: most were rejected.
On a GPU it is padded, so that all batches are of one shape. On a CPU nothing is computed that
nobody asked for.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wdsprep.dataset.npy_arrays import NUMBERS
from wdsprep.dataset.receipts import Receipt
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError, as_rejected
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.settings import SCORES, columns_of
from wdsprep.dataset.shapes import Size
from wdsprep.encoding.batching import Batcher
from wdsprep.encoding.encoded_samples import PendingBlock, Result, Row, SampleInput, SampleUnderWay
from wdsprep.encoding.engine import SPARE_BATCHES, Engine
from wdsprep.encoding.latent_shard import Files, LatentShard, npy_of
from wdsprep.encoding.models.base import Part
from wdsprep.encoding.models.device import Arrays, ImageBatch
from wdsprep.encoding.worker import EncodeWorker
from wdsprep.encoding.worker_plan import EncodeTarget
from wdsprep.images.crop import NO_PIXELS, Crop, decode_image
from wdsprep.images.nearest_shape import Fit
from wdsprep.scoring.languages import RepeatedCaptions, caption_columns
from wdsprep.scoring.networks import DecodedImage, Prepared, ScoreEncoder

BATCH_NBYTES = 256 << 20


"""The most bytes of the prepared images of a batch: the engine holds a few batches of them."""


NO_FIT = Fit(0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedImage(Crop):
    """An image that each processor has prepared, in place of a crop."""

    inputs: Sequence[Prepared]


@dataclass(slots=True)
class ShardRows:
    """The samples of a shard that wait for a batch."""

    rows: list[Row] = field(default_factory=list)
    is_whole: bool = False
    """True if no more samples of the shard come."""


class ScoreBatcher(Batcher):
    """The prepared images of samples that wait for a batch, with their captions."""

    def __init__(self, encoder: ScoreEncoder) -> None:
        refuse = lambda _row, _code: None  # noqa: E731  no caption is without tokens here
        super().__init__(encoder, refuse, flips=False, image_window=0, text_window=0)
        self._shards = deque([ShardRows()])

    def add(self, sample: SampleUnderWay) -> None:
        sample.parts = [part & Part.IMAGE for part in sample.parts]
        super().add(sample)

    def _add_cut(self, sample: SampleUnderWay, number: int, _cut: Crop) -> None:
        self._shards[-1].rows.append(Row(sample, number))
        sample.missing += 1

    def end_shard(self) -> None:
        """Note that the samples that come next are of another shard."""
        self._shards[-1].is_whole = True
        self._shards.append(ShardRows())

    def next_images(
        self, size: int, _size_of: Callable[[Size], int], *, now: bool, head: PendingBlock | None
    ) -> tuple[Size, list[Row], int] | None:
        """Remove a batch of samples; return it and its size, or None if none is ready.

        Whether it is ready depends on the samples of its shard alone, not on `now` and `head`.
        """
        del now, head
        while len(self._shards) > 1 and not self._shards[0].rows:
            self._shards.popleft()
        shard = self._shards[0]
        rows, shard.rows = shard.rows[:size], shard.rows[size:]
        if rows and (
            len(rows) == size or shard.is_whole or self.count_after(rows[0].sample) >= 2 * size - 1
        ):
            return (0, 0), rows, size
        shard.rows = rows
        return None


class ScoreEngine(Engine):
    """An engine that computes scores on one device, of several image shards at once."""

    _encoder: ScoreEncoder
    _batcher: ScoreBatcher

    def __init__(self, encoder: ScoreEncoder, *, batch_size: int, **options: Any) -> None:
        """Start the engine, with a smaller `batch_size` if prepared images are that large."""
        rows = encoder.inputs_of([encoder.blank], [""])
        most = BATCH_NBYTES // max(1, sum(own[0].nbytes for own in rows))
        super().__init__(encoder, batch_size=max(1, min(batch_size, most)), **options)

    def _make_batcher(self, most_waiting: int) -> ScoreBatcher:
        del most_waiting
        return ScoreBatcher(self._encoder)

    def _warm_up(self) -> None:
        if self._encoder.networks:
            self.batches.warm_up([self.fill(self._blank_inputs, self.batches.size)])

    @property
    def _blank_inputs(self) -> list[Sequence[Tensor]]:
        """Return the rows of each input of a batch of one sample."""
        return self._encoder.inputs_of([self._encoder.blank], [""])

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other shard feeds samples; what is fed until the end is one shard."""
        with super().turn():
            try:
                yield
            finally:
                self.fed.put(PendingBlock(lambda _block: None))

    def _collect(self, block: PendingBlock | None) -> None:
        if block is not None and not block.samples:
            self._batcher.end_shard()
        super()._collect(block)

    def _prepare(self, samples: Sequence[SampleInput], made: Sequence[SampleUnderWay]) -> None:
        """Give each sample its image as each processor prepares it, or the reason to reject it.

        Each image is decoded once. What the processors do after scaling is done for all of them.
        """
        scaled = {}
        for sample, own in zip(samples, made, strict=True):
            try:
                image = DecodedImage(decode_image(sample.image, max_area=self.max_area))
                scaled[own] = image, [each.scale(image) for each in self._encoder.processors]
            except Exception as error:  # noqa: BLE001 (told apart by as_rejected)
                own.cuts[0] = as_rejected(error, Code.UNREADABLE)
        prepared = [
            processor.finish([parts[number] for _, parts in scaled.values()])
            for number, processor in enumerate(self._encoder.processors)
        ]
        for row, (own, (image, _)) in enumerate(scaled.items()):
            inputs = [each[row] for each in prepared]
            own.cuts[0] = self._check(image, inputs)

    def _check(self, image: DecodedImage, inputs: Sequence[Prepared]) -> Crop | RejectedError:
        """Return an image with what processors made of it, or why it fits into no batch."""
        for made, blank in zip(inputs, self._encoder.blank, strict=True):
            if any(made[name].shape != blank[name].shape for name in blank):
                return RejectedError(Code.UNREADABLE, "its processor makes another size of it")
        width, height = image.image.size
        return PreparedImage(
            pixels=NO_PIXELS, width=width, height=height, fit=NO_FIT, inputs=inputs
        )

    def _image_batch(self, rows: Sequence[Row], _shape: tuple[int, int], size: int) -> ImageBatch:
        prepared = [row.crop.inputs for row in rows if isinstance(row.crop, PreparedImage)]
        inputs = self._encoder.inputs_of(prepared, [row.sample.caption for row in rows])
        self.release_pixels(rows)
        return self.fill(inputs, size)

    def fill(self, inputs: Sequence[Sequence[Tensor]], size: int) -> ImageBatch:
        """Return a batch of samples, given the rows of each input, padded to `size` on a GPU."""
        if self._encoder.device.type != "cuda":
            size = len(inputs[0])
        stacks = []
        for rows in inputs:
            stack = self.host_memory((size, *rows[0].shape), rows[0].dtype)
            torch.stack(list(rows), out=stack[: len(rows)])
            stack[len(rows) :] = rows[0]
            stacks.append(stack)
        return ImageBatch(len(inputs[0]), tuple(stacks))

    @property
    def _most_spare(self) -> int:
        return SPARE_BATCHES * len(self._blank_inputs)

    def keep_memory(self, batch: ImageBatch) -> None:
        self.spare.extend(batch.inputs)


class ScoreShard(LatentShard):
    """The scores of an image shard, gathered until the last sample has come, and then written.

    A column says how often a caption occurs in the whole shard.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._entries: list[tuple[str, Sample, Arrays] | Reject] = []

    @property
    def so_far(self) -> tuple[int, int, Mapping[str, int]]:
        codes = Counter(own.code.value for own in self._entries if isinstance(own, Reject))
        return len(self._entries) - codes.total(), 0, codes

    def refuse(self, reject: Reject) -> None:
        self._entries.append(reject)

    def add(self, key: str, sample: Sample, result: Result) -> None:
        self._entries.append((key, sample, result.arrays))

    def finish(self, files: Files) -> Receipt:
        columns, repeats = columns_of(self.settings), RepeatedCaptions()
        if has_captions := bool(self.settings[SCORES]["language"]):
            repeats.add(own[1].caption for own in self._entries if not isinstance(own, Reject))
        for entry in self._entries:
            if isinstance(entry, Reject):
                super().refuse(entry)
                continue
            key, sample, arrays = entry
            numbers = map(short_number, arrays.get(NUMBERS, ()))
            facts: dict[str, Any] = dict(zip(columns, numbers, strict=False))  # captions' come last
            if has_captions:
                facts |= caption_columns(sample.caption)
                facts["caption_repeats"] = repeats.of(sample.caption)
            try:
                self._write(key, sample, facts, arrays)
            except RejectedError as refused:
                code, detail = refused.code, refused.detail
                super().refuse(Reject(key=key, source=sample.source, code=code, detail=detail))
        return super().finish(files)

    def _write(self, key: str, sample: Sample, facts: dict[str, Any], arrays: Arrays) -> None:
        facts |= {"key": key, "source": sample.facts.get("source", sample.source)}
        members = [(field.name, npy_of(field, arrays[field.name])) for field in self.fields]
        self.add_members(key, members, facts)


class ScoreWorker(EncodeWorker):
    """A worker of `score`: a process with its models, which scores several shards at once."""

    engine_class = ScoreEngine
    shard_class = ScoreShard
    _encoder: ScoreEncoder

    def _part_of(self, _target: EncodeTarget) -> Part:
        return Part.of(self._encoder.fields)


def short_number(value: Tensor) -> float:
    """Return the number with the fewest digits that is equal to a value in fp32."""
    return float(str(value.numpy()))
