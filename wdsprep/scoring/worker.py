"""The worker of `score`: that of `encode`, with an engine and a shard for scores.

In the engine, images are prepared by the processors of models, not cut. A batch has samples of one
shard alone, in their order, so the scores of a shard are the same after a kill. It ends with the
shard, or after so many samples that the rest of them cannot hold up the engine: most were rejected.
On a GPU it is padded, so that all batches are of one shape. On a CPU nothing is computed that
nobody asked for.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from wdsprep.dataset.manifest import Receipt
from wdsprep.dataset.npy_arrays import NUMBERS
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError, as_rejected
from wdsprep.dataset.settings import SCORES, Settings, columns_of
from wdsprep.encoding.batching import Batcher, DeviceBatches
from wdsprep.encoding.engine import Engine
from wdsprep.encoding.latent_shard import Files, LatentShard, npy_of
from wdsprep.encoding.models.base import Part
from wdsprep.encoding.models.device import DeviceBatch, ImageBatch
from wdsprep.encoding.role_images import DatasetCuts
from wdsprep.encoding.sample_chain import Block, EncodedSample, EncodingSample, Row
from wdsprep.encoding.worker import EncodeWorker
from wdsprep.encoding.worker_plan import EncodeJob
from wdsprep.images.crop import NO_PIXELS, Crop, decode_image
from wdsprep.images.nearest_shape import Fit
from wdsprep.runners.run import RunProgress
from wdsprep.scoring.languages import caption_columns, plain_caption
from wdsprep.scoring.networks import Prepared, ScoreEncoder
from wdsprep.sources.base import Columns

BATCH_NBYTES = 256 << 20
"""The most bytes of the prepared images of a batch: the engine holds a few batches of them."""
NO_FIT = Fit(0, 0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedImage(Crop):
    """An image that each processor has prepared, in place of a crop."""

    inputs: Sequence[Prepared]

    @property
    def is_for_batch(self) -> bool:
        return True


class ScoreBatcher(Batcher):
    """The prepared images of samples that wait for a batch, grouped by their shards."""

    encoder: ScoreEncoder

    def __init__(self, encoder: ScoreEncoder, devices: DeviceBatches) -> None:
        self.blank = encoder.inputs_of([encoder.blank], [""])
        """The rows of each input of a batch of one sample."""
        self.inputs = len(self.blank)
        self._shard = 0
        super().__init__(encoder, devices)

    def end_shard(self) -> None:
        """Note that the samples that come next are of another shard."""
        self._shard += 1

    def next_batch(
        self, *, now: bool, head: Block | None = None
    ) -> tuple[list[Row], DeviceBatch | None] | None:
        """Remove the rows of a batch that is ready, and return them with it.

        Whether it is ready depends on the samples of its shard alone, not on `now` and `head`.
        """
        del now, head
        return super().next_batch(now=False)

    def _group_of(self, _row: Row) -> Hashable:
        return self._shard

    def _is_whole(self, shard: Hashable) -> bool:
        return shard != self._shard

    def _size_of(self, _shard: Hashable) -> int:
        return self.devices.size

    def image_batch(self, rows: Sequence[Row], _shard: Hashable, size: int) -> ImageBatch:
        """Return a batch of samples, or of a blank image, padded to a size on a GPU."""
        prepared = [row.crop.inputs for row in rows if isinstance(row.crop, PreparedImage)]
        captions = [row.sample.sample.caption for row in rows]
        inputs = self.encoder.inputs_of(prepared, captions) if rows else self.blank
        if self.encoder.device.type != "cuda":
            size = len(inputs[0])
        stacks = []
        for tensors in inputs:
            stack = self.host_memory((size, *tensors[0].shape), tensors[0].dtype)
            torch.stack(list(tensors), out=stack[: len(tensors)])
            stack[len(tensors) :] = tensors[0]
            stacks.append(stack)
        return ImageBatch(len(inputs[0]), tuple(stacks))


class ScoreEngine(Engine):
    """An engine that computes scores on one device, of several image shards at once."""

    _encoder: ScoreEncoder
    _batcher: ScoreBatcher

    def __init__(self, encoder: ScoreEncoder, *, batch_size: int, **options: Any) -> None:
        """Start the engine, with a smaller `batch_size` if prepared images are that large."""
        rows = encoder.inputs_of([encoder.blank], [""])
        most = BATCH_NBYTES // max(1, sum(own[0].nbytes for own in rows))
        super().__init__(encoder, batch_size=max(1, min(batch_size, most)), **options)

    def _make_batcher(self) -> ScoreBatcher:
        return ScoreBatcher(self._encoder, self.batches)

    def _warm_up(self) -> None:
        if self._encoder.networks:
            self.batches.warm_up([self._batcher.image_batch([], 0, self.batches.size)])

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other shard feeds samples; what is fed until the end is one shard."""
        with super().turn():
            try:
                yield
            finally:
                self.fed.put(Block([]))

    def _collect(self, block: Block | None) -> None:
        if block is not None and not block.entries:
            self._batcher.end_shard()
        super()._collect(block)

    def _prepare(self, samples: Sequence[EncodingSample]) -> None:
        """Give each sample its image as each processor prepares it, or the reason to reject it.

        Each image is decoded once. What the processors do after scaling is done for all of them.
        """
        scaled = {}
        for sample in samples:
            shared: dict[str, torch.Tensor] = {}
            try:
                image = decode_image(sample.sample.image, max_area=self.max_area)
                parts = [processor.scale(image, shared) for processor in self._encoder.processors]
                scaled[sample] = image.size, parts
            except Exception as error:  # noqa: BLE001 (told apart by as_rejected)
                sample.crops[0] = as_rejected(error, Code.UNREADABLE)
            sample.drop_image()
        prepared = [
            processor.finish([parts[number] for _, parts in scaled.values()])
            for number, processor in enumerate(self._encoder.processors)
        ]
        blanks = self._encoder.blank
        for row, (sample, ((width, height), _)) in enumerate(scaled.items()):
            inputs = [images[row] for images in prepared]
            sample.crops[0] = PreparedImage(
                pixels=NO_PIXELS, width=width, height=height, fit=NO_FIT, inputs=inputs
            )
            for tensors, blank in zip(inputs, blanks, strict=True):
                if any(tensors[name].shape != blank[name].shape for name in blank):
                    why = "its processor makes another size of it"
                    sample.crops[0] = RejectedError(Code.UNREADABLE, why)


class ScoreShard(LatentShard):
    """The scores of an image shard, gathered until the last sample has come, and then written.

    A column says how often a caption occurs in the whole shard.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._entries: list[EncodedSample | Reject] = []

    @property
    def progress(self) -> RunProgress:
        rejects = (entry for entry in self._entries if isinstance(entry, Reject))
        codes = Counter(reject.code.value for reject in rejects)
        return self.progress_with(len(self._entries) - codes.total(), 0, codes)

    def refuse(self, reject: Reject) -> None:
        self._entries.append(reject)

    def add(self, scored: EncodedSample) -> None:
        self._entries.append(scored)

    def finish(self, files: Files) -> Receipt:
        columns, has_captions = columns_of(self.settings), self.settings[SCORES]["language"]
        scored = [entry.sample for entry in self._entries if not isinstance(entry, Reject)]
        counts = Counter(plain_caption(sample.caption) for sample in scored)
        for entry in self._entries:
            if isinstance(entry, Reject):
                super().refuse(entry)
                continue
            sample, arrays = entry.sample, entry.arrays
            # The shortest number that rounds to a value in fp32: 0.1, not 0.10000000149.
            numbers = (float(str(value.numpy())) for value in arrays.get(NUMBERS, ()))
            facts: dict[str, Any] = dict(zip(columns, numbers, strict=False))  # captions' come last
            if has_captions:
                facts |= caption_columns(sample.caption)
                facts["caption_repeats"] = counts[plain_caption(sample.caption)]
            facts |= {"key": entry.key, "source": sample.facts.get("source", sample.source)}
            members = [(field.name, npy_of(field, arrays[field.name])) for field in self.fields]
            try:
                self.add_members(entry.key, members, facts)
            except RejectedError as refused:
                super().refuse(refused.to_reject(sample.source, entry.key))
        return super().finish(files)


class ScoreWorker(EncodeWorker):
    """A worker of `score`: a process with its models, which scores several shards at once."""

    engine_class = ScoreEngine
    shard_class = ScoreShard
    _encoder: ScoreEncoder

    def __init__(self, job: EncodeJob, role: str) -> None:
        super().__init__(job)
        self._source = replace(self._source, columns=Columns(image=role))

    def _cuts_of(self, settings: Settings) -> DatasetCuts:
        """Return rules by which captions are not encoded by themselves."""
        part = Part.of(self._encoder.fields) & Part.IMAGE
        return replace(super()._cuts_of(settings), part=part)
