"""The work of `encode`: one image shard becomes a latent shard, rejects, and last a receipt.

A `Feeder` reads one image shard in a thread of its own and gives its images to the engine, in
order. What comes back is written here in that order. A worker has several shards under way at once.
If several datasets lack a shard, it is read once: the engine cuts each image for all of them, and
each gets its own files and receipt. A dataset of text alone gets the text of each sample, whatever
its image is: no image is cut for it, so a damaged image does not matter. The worker of `score` is
one of these, with another engine and another kind of shard.
"""

import os
import socket
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from queue import Empty
from typing import TYPE_CHECKING, Any, cast

from wdsprep.dataset.coarse_histograms import sum_counts
from wdsprep.dataset.draft import Draft
from wdsprep.dataset.file_names import captions_name
from wdsprep.dataset.npy_arrays import fields_of
from wdsprep.dataset.receipts import Receipt, gpu_count
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.stored_dataset import find_receipt
from wdsprep.dataset.unit_locks import Edition
from wdsprep.encoding.captions.options import Captions, CaptionSource, FieldCaptions
from wdsprep.encoding.encoded_samples import Result
from wdsprep.encoding.engine import Engine, EngineError
from wdsprep.encoding.feeder import Block, FedSample, Feeder
from wdsprep.encoding.gpus import require_gpu
from wdsprep.encoding.image_shards import ImageShard, tars_of
from wdsprep.encoding.latent_shard import LatentShard, write_empty
from wdsprep.encoding.models.base import Part, limit_memory
from wdsprep.encoding.models.device import device_name
from wdsprep.encoding.options import SHARDS_IN_TURN, SHARDS_PER_WORKER
from wdsprep.encoding.progress import EncodeProgress
from wdsprep.encoding.two_passes import ImagePass, TextPass, Turns, Visit, text_nbytes
from wdsprep.images.nearest_shape import cut_of
from wdsprep.runners.base import PROGRESS_S, BrokenWorkerError
from wdsprep.runners.run import JointUnit, RunProgress, share_done
from wdsprep.sources.base import Content
from wdsprep.store import open_store
from wdsprep.store.base import Store

if TYPE_CHECKING:
    from wdsprep.encoding.worker_plan import EncodeTarget, ShardWork


NOTHING_LEFT = RunProgress(samples=0, nbytes=0, share=1.0, rejects={})
"""The progress of a shard that another run has already made."""
Taking = LatentShard | TextPass | ImagePass


@dataclass(frozen=True, slots=True)
class ShardInProgress:
    """A latent shard that is being made in one dataset."""

    target: "EncodeTarget"
    shard: ImageShard
    output: LatentShard

    @property
    def progress(self) -> RunProgress:
        item = self.shard.item
        samples, nbytes, rejects = self.output.so_far
        return RunProgress(
            samples=samples,
            nbytes=nbytes,
            share=share_done(samples + sum(rejects.values()), item.take or item.samples),
            rejects=dict(rejects),
        )


class _Dataset:
    """A dataset that a worker has opened to write latent shards.

    Opening it writes the arrays of the empty caption, computed by `empty`, where they are missing.
    """

    def __init__(
        self,
        target: "EncodeTarget",
        empty: Callable[[], Mapping[str, Any]],
        shard_class: type[LatentShard],
    ) -> None:
        self._target, self._shard_class = target, shard_class
        self.store = open_store(target.latents)
        self._edition = Edition(store=self.store, mark=target.edition)
        self._empty = write_empty(self._edition, fields_of(target.settings["layout"]), empty)

    def find_done(self, shard: ImageShard) -> Receipt | None:
        settings = self._target.settings
        return find_receipt(self.store, shard.name, shard.input, settings)

    def begin(self, shard: ImageShard, drafts: ExitStack) -> ShardInProgress:
        draft = drafts.enter_context(Draft(self._edition, shard.name))
        output = closing(self._shard_class(draft, shard, self._target.settings))
        return ShardInProgress(self._target, shard, drafts.enter_context(output))

    def finish(self, making: ShardInProgress, content: Content) -> Receipt:
        files = {**self._empty, **(content.file if making.shard.is_foreign else {})}
        if self._target.captions.digest:
            name = captions_name(making.shard.name)
            files[name] = hex_digest(self.store.read(name))
        return making.output.finish(files)


class EncodeWorker:
    """A worker of `encode`: a process with its models, which encodes several shards at once."""

    engine_class: type[Engine] = Engine
    shard_class: type[LatentShard] = LatentShard

    def __init__(self, work: "ShardWork") -> None:
        self._source = tars_of(work.images, work.max_nbytes)
        if work.gpu_share < 1:
            require_gpu("cuda")
            limit_memory(work.gpu_share)
        self._encoder = work.load()
        self._parts = [self._part_of(target) for target in work.targets]
        self._engine = self.engine_class(
            self._encoder,
            cuts=[cut_of(target.settings) for target in work.targets],
            parts=self._parts,
            seed=work.targets[0].settings.get("seed", 0),
            batch_size=work.batch_size,
            max_area=work.max_area,
            decoders=work.decoders or _count_cores(work.gpus),
            threads=max(1, work.threads),
        )
        self._turns = Turns(
            self._encoder.bring, self._engine, at_once=SHARDS_PER_WORKER, most=SHARDS_IN_TURN
        )
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        empty = cache(self._engine.empty)
        self._datasets = [_Dataset(target, empty, self.shard_class) for target in work.targets]
        self._sources = [target.captions for target in work.targets]

    def _part_of(self, target: "EncodeTarget") -> Part:
        """Return the part of a sample from which a dataset is made."""
        return Part.of(fields_of(target.settings["layout"]))

    @property
    def units_at_once(self) -> int:
        return SHARDS_IN_TURN if self._encoder.is_split else SHARDS_PER_WORKER

    def close(self) -> None:
        self._engine.close()

    def __call__(self, unit: JointUnit) -> Generator[EncodeProgress, None, dict[int, Receipt]]:
        """Encode an image shard for each dataset that lacks it, and yield progress meanwhile.

        Return the receipts by the numbers of the datasets, also where another run has made the
        shard by now. Raise BrokenWorkerError if a thread of the engine has failed.
        """
        receipts: dict[int, Receipt] = {}
        try:
            with ExitStack() as drafts:
                making: dict[int, ShardInProgress] = {}
                for number, shard in cast("Mapping[int, ImageShard]", unit.parts).items():
                    dataset = self._datasets[number]
                    if done := dataset.find_done(shard):
                        receipts[number] = done
                    else:
                        making[number] = dataset.begin(shard, drafts)
                if not making:
                    return receipts
                content = Content(is_kept=any(each.shard.is_foreign for each in making.values()))
                for _ in self._encode(making, content):
                    yield self._progress(unit, making)
                for number, each in making.items():
                    yield self._progress(unit, making)
                    self._note_gpu(each.output, self._parts[number])
                    receipts[number] = self._datasets[number].finish(each, content)
                return receipts
        except EngineError as error:
            raise BrokenWorkerError(str(error)) from error

    def _note_gpu(self, output: LatentShard, part: Part) -> None:
        """Note the GPU and its batches in the counts of a shard: they decide its last bits.

        Nothing is noted for a CPU: its batches have one size, unless the user gives another.
        """
        device, stats = self._encoder.device, self._engine.stats
        if device.type != "cuda" or not output.samples:
            return
        images = stats.batch_size if Part.IMAGE in part else 0
        captions = stats.text_size if Part.TEXT in part else 0
        made_on = gpu_count(device_name(device), images=images, captions=captions)
        output.counts[made_on] = 1

    def _encode(self, making: Mapping[int, ShardInProgress], content: Content) -> Iterator[None]:
        """Encode a shard in one pass, or in two if the device holds one network at a time.

        Yield from time to time, so that the caller can report progress.
        """
        outputs = {number: each.output for number, each in making.items()}
        shard = next(iter(making.values())).shard
        if not self._encoder.is_split:
            part = reduce(or_, (self._parts[number] for number in outputs))
            return (yield from self._encode_pass(shard, outputs, content, part))
        yield from self._encode_in_two_passes(shard, outputs, content)

    def _encode_in_two_passes(
        self, shard: ImageShard, outputs: Mapping[int, LatentShard], content: Content
    ) -> Iterator[None]:
        """Encode first all captions of a shard, then all its images, and yield from time to time.

        Captions for a dataset of text alone are written at once; others wait for their images.
        """
        with closing(TextPass()) as waiting:
            texts: dict[int, Taking] = {}
            images: dict[int, Taking] = {}
            for number, output in outputs.items():
                part = self._parts[number]
                if part is Part.TEXT:
                    texts[number] = output
                elif part is Part.IMAGE:
                    images[number] = output
                else:
                    if waiting not in texts.values():
                        texts[number] = waiting
                    images[number] = ImagePass(output, waiting)
            if texts:
                if waiting in texts.values():
                    waiting.nbytes = shard.likely_samples * text_nbytes(self._encoder.fields)
                first = Content(is_kept=False) if images else content
                with self._turns.visit(Part.TEXT, waiting) as visit:
                    yield from self._wait_for_turn(visit)
                    yield from self._encode_pass(shard, texts, first, Part.TEXT)
                    waiting.settle()
            if images:
                with self._turns.visit(Part.IMAGE) as visit:
                    yield from self._wait_for_turn(visit)
                    yield from self._encode_pass(shard, images, content, Part.IMAGE)

    def _wait_for_turn(self, visit: Visit) -> Iterator[None]:
        """Wait until a shard may begin its pass, and yield from time to time."""
        while not self._turns.enter(visit, PROGRESS_S):
            self._engine.check()
            yield

    def _encode_pass(
        self, shard: ImageShard, outputs: Mapping[int, Taking], content: Content, part: Part
    ) -> Iterator[None]:
        """Encode the captions or images of a shard, or both, into the outputs of its datasets.

        Yield from time to time, so that the caller can report progress.
        """
        with Feeder(
            self._engine, self._source, shard, content, part, self._open_captions(shard, outputs)
        ) as feeder:
            yield from self._drain(feeder, outputs)
            for output in outputs.values():
                output.counts.update(feeder.left_out.counts())

    def _open_captions(
        self, shard: ImageShard, numbers: Iterable[int]
    ) -> list[tuple[Captions, Sequence[int]]]:
        """Open the captions of a shard, and return them with the numbers of their datasets."""
        together: dict[CaptionSource, list[int]] = {}
        for number in numbers:
            together.setdefault(self._sources[number], []).append(number)
        stores = [dataset.store for dataset in self._datasets]
        return [
            (_open_captions(source, stores[same[0]], shard), same)
            for source, same in together.items()
        ]

    def _drain(self, feeder: Feeder, outputs: Mapping[int, Taking]) -> Iterator[None]:
        """Write the results of a shard to its outputs, and yield from time to time.

        Raise the error that ended the reading of the shard, or EngineError if a thread of the
        engine has failed.
        """
        told = time.monotonic()
        while True:
            try:
                block = feeder.blocks.get(timeout=PROGRESS_S)
            except Empty:
                self._engine.check()
                yield
                continue
            if block is None:
                return
            if isinstance(block, Exception):
                raise block
            yield from self._write(block, outputs)
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                yield

    def _write(self, block: Block, outputs: Mapping[int, Taking]) -> Iterator[None]:
        with block.results or nullcontext() as pending:
            while pending and not (pending.done() or wait([pending], PROGRESS_S).done):
                self._engine.check()
                yield
            results = iter(pending.result() if pending else ())
            for entry in block.entries:
                if isinstance(entry, Reject):
                    for output in outputs.values():
                        output.refuse(entry)
                    continue
                for number, made in zip(entry.outputs, next(results), strict=True):
                    _add_result(outputs[number], entry, made)

    def _progress(self, unit: JointUnit, making: Mapping[int, ShardInProgress]) -> EncodeProgress:
        stats = self._engine.stats
        parts = {n: making[n].progress if n in making else NOTHING_LEFT for n in unit.parts}
        each = parts.values()
        return EncodeProgress(
            parts=parts,
            samples=sum(part.samples for part in each),
            nbytes=sum(part.nbytes for part in each),
            share=min(part.share for part in each),
            rejects=sum_counts(part.rejects for part in each),
            worker=self._name,
            device=device_name(self._encoder.device),
            done=stats.samples,
            busy_s=stats.busy_s,
            text_s=stats.text_s,
            launch_s=stats.launch_s,
            wall_s=stats.wall_s,
            batch_size=stats.batch_size,
            exact=stats.exact,
        )


def _open_captions(source: CaptionSource, store: Store, shard: ImageShard) -> Captions:
    """Open the captions of an image shard; those of a table lie in the dataset in `store`."""
    if source.digest:
        from wdsprep.encoding.captions.unit_captions import LaidOutCaptions  # pyarrow

        return LaidOutCaptions(store, shard, source.digest)
    return FieldCaptions(source.field) if source.field else Captions()


def _count_cores(gpus: float) -> int:
    from wdsprep.runners.ray.cluster import node_share  # where nobody else could know

    return max(1, int(node_share(gpus)))


def _add_result(output: Taking, fed: FedSample, made: Result | RejectedError) -> None:
    try:
        if isinstance(made, RejectedError):
            raise made
        output.add(fed.key, fed.sample, made)
        if fed.is_named:
            output.counts["named"] += 1
    except RejectedError as refused:
        source, code, detail = fed.sample.source, refused.code, refused.detail
        output.refuse(Reject(key=fed.key, source=source, code=code, detail=detail))
