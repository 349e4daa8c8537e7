"""The work of `encode`: one image shard becomes a latent shard, rejects, and last a receipt.

`sample_chain` lists the steps of a sample's way. `feed` reads one image shard in a thread of its
own and gives its samples to the engine, in order. What comes back is written here in that
order. A worker has several shards under way at once. If several datasets lack a shard, it is read
once: the engine cuts each image for all of them, and each gets its own files and receipt. A dataset
of text alone gets the text of each sample, whatever its image is: no image is cut for it, so a
damaged image does not matter. The worker of `score` is one of these, with another engine and
another kind of shard.
"""

import os
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, closing
from functools import cache
from itertools import chain, islice
from typing import cast

from wdsprep.dataset.coarse_histograms import sum_counts
from wdsprep.dataset.draft import Draft
from wdsprep.dataset.file_names import captions_name
from wdsprep.dataset.manifest import Receipt, gpu_count
from wdsprep.dataset.npy_arrays import Field, empty_fields, text_fields
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.stored_dataset import find_receipt
from wdsprep.dataset.unit_locks import Edition
from wdsprep.encoding.captions.options import EMPTY
from wdsprep.encoding.engine import Engine
from wdsprep.encoding.gpus import require_gpu
from wdsprep.encoding.image_shards import ImageShard, read_rows
from wdsprep.encoding.latent_shard import LatentShard, npy_of, write_empty
from wdsprep.encoding.models.base import Part, limit_memory
from wdsprep.encoding.models.device import device_name
from wdsprep.encoding.options import SHARDS_IN_TURN, SHARDS_PER_WORKER
from wdsprep.encoding.progress import EncodeProgress
from wdsprep.encoding.role_images import DatasetCuts
from wdsprep.encoding.sample_chain import Block, CaptionFinder, EncodingSample, blocks_of
from wdsprep.encoding.two_passes import TextPass, Turns
from wdsprep.encoding.worker_plan import EncodeJob
from wdsprep.runners.base import PROGRESS_S
from wdsprep.runners.run import JointUnit, RunProgress
from wdsprep.sources.base import Content
from wdsprep.sources.captions import caption_at
from wdsprep.store import open_store

NOTHING_LEFT = RunProgress(samples=0, nbytes=0, share=1.0, rejects={})
"""The progress of a shard that another run has already made."""
JOIN_S = 0.05
Output = LatentShard | TextPass
"""What takes the encoded samples of a dataset."""


class _Dataset:
    """A dataset that a worker has opened to write latent shards.

    Opening it writes the arrays of the empty caption, made by `empty`, where they are missing.
    """

    def __init__(
        self, place: str, settings: Settings, mark: str, empty: Callable[[Field], bytes]
    ) -> None:
        self.settings, self.store = settings, open_store(place)
        self.captions = tuple(map(settings.get, ("captions", "caption_field", "caption_name")))
        """The digest of the table, the field of the json, and the name that captions have, if any.
        """
        self.edition = Edition(store=self.store, mark=mark)
        self.empty = write_empty(self.edition, empty_fields(settings), empty)

    def open_captions(self, shard: ImageShard) -> CaptionFinder:
        """Return what finds the caption of each sample of an image shard.

        It is in a table, of which the dataset has a copy, or in a field of the sample's json. If
        neither is asked for, "" stands for the empty caption, and None for the sample's own.
        """
        table, field, name = self.captions
        if table:
            from wdsprep.encoding.captions.unit_captions import open_captions  # pyarrow

            return open_captions(self.store, shard, table)
        if field:
            return lambda _key, sample: caption_at(sample.facts, field)
        return lambda _key, _sample: "" if name == EMPTY else None


class EncodeWorker:
    """A worker of `encode`: a process with its models, which encodes several shards at once."""

    engine_class: type[Engine] = Engine
    shard_class: type[LatentShard] = LatentShard

    def __init__(self, job: EncodeJob) -> None:
        plan = job.worker_plan
        settings = [of_dataset for _, of_dataset, _ in job.datasets]
        if plan.gpu_share < 1:
            require_gpu("cuda")
            limit_memory(plan.gpu_share)
        if not (threads := plan.threads):
            from wdsprep.runners.ray.cluster import node_share  # where nobody else could know

            threads = max(1, int(node_share(plan.gpus_per_worker)))
        self._encoder = job.make_encoder()
        self._cuts = list(map(self._cuts_of, settings))
        roles = (role for cut in self._cuts for role in (*cut.sizes, *cut.text_roles))
        self._roles = tuple(dict.fromkeys(roles))
        self._source = job.tars
        self._engine = self.engine_class(
            self._encoder,
            cuts=self._cuts,
            seed=settings[0].get("seed", 0),
            batch_size=job.batch_size,
            max_area=job.max_area,
            decoders=threads,
            threads=max(1, plan.threads),
        )
        self._turns = Turns(
            self._encoder, self._engine, at_once=SHARDS_PER_WORKER, most=SHARDS_IN_TURN
        )
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        arrays = cache(self._engine.empty)

        def empty(field: Field) -> bytes:
            return b"".join(npy_of(field, arrays()[field.name]))

        self._datasets = [_Dataset(*dataset, empty) for dataset in job.datasets]

    def _cuts_of(self, settings: Settings) -> DatasetCuts:
        return DatasetCuts.of(settings)

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
        with ExitStack() as drafts:
            outputs: dict[int, LatentShard] = {}
            for number, shard in cast("Mapping[int, ImageShard]", unit.parts).items():
                dataset = self._datasets[number]
                store, settings = dataset.store, dataset.settings
                if done := find_receipt(store, shard.name, shard.input, settings):
                    receipts[number] = done
                else:
                    draft = drafts.enter_context(Draft(dataset.edition, shard.name))
                    output = self.shard_class(draft, shard, settings)
                    outputs[number] = drafts.enter_context(closing(output))
            if not outputs:
                return receipts
            content = Content(is_kept=any(out.shard.is_foreign for out in outputs.values()))
            for _ in self._encode(outputs, content):
                yield self._progress(unit, outputs)
            for number, output in outputs.items():
                yield self._progress(unit, outputs)
                receipts[number] = self._finish(number, output, content)
            return receipts

    def _finish(self, number: int, output: LatentShard, content: Content) -> Receipt:
        """Complete the shard of a dataset, and return its receipt.

        The receipt names the GPU and the sizes of its batches, on which rounding depends. It does
        not name a CPU, whose batches have one size, unless the user gives another.
        """
        dataset, part = self._datasets[number], self._cuts[number].part
        device, stats = self._encoder.device, self._engine.batches.stats
        if device.type == "cuda" and output.samples:
            images = stats.batch_size if Part.IMAGE in part else 0
            captions = stats.text_size if Part.TEXT in part else 0
            output.counts[gpu_count(device_name(device), images=images, captions=captions)] = 1
        files = {**dataset.empty, **(content.file if output.shard.is_foreign else {})}
        if dataset.captions[0]:
            name = captions_name(output.shard.name)
            files[name] = hex_digest(dataset.store.read(name))
        return output.finish(files)

    def _encode(self, outputs: Mapping[int, LatentShard], content: Content) -> Iterator[None]:
        """Encode a shard in one pass, or in two if the device holds one network at a time.

        In the first all captions are encoded, in the second all images. Captions for a dataset of
        text alone are written at once; others wait for their images. Yield from time to time, so
        that the caller can report progress.
        """
        shard = next(iter(outputs.values())).shard
        if not self._encoder.is_split:
            yield from self._encode_pass(shard, outputs, content, Part.BOTH)
            return
        with closing(TextPass()) as waiting:
            parts = {number: self._cuts[number].part for number in outputs}
            joint = [number for number, part in parts.items() if part is Part.BOTH]
            texts: dict[int, Output] = {n: outputs[n] for n in outputs if parts[n] is Part.TEXT}
            texts |= dict.fromkeys(joint[:1], waiting)
            images: dict[int, Output] = {
                n: output for n, output in outputs.items() if parts[n] is not Part.TEXT
            }
            for number in joint:
                outputs[number].texts = waiting
            if joint:
                texts_nbytes = (field.array_nbytes for field in text_fields(self._encoder.fields))
                waiting.nbytes = shard.likely_samples * sum(texts_nbytes)
            passes = [(part, to) for part, to in ((Part.TEXT, texts), (Part.IMAGE, images)) if to]
            for part, pass_outputs in passes:
                is_last = part is passes[-1][0]
                with self._turns.visit(part, waiting):
                    while not self._turns.enter(waiting, PROGRESS_S):
                        self._engine.check()
                        yield
                    marks = content if is_last else Content(is_kept=False)
                    yield from self._encode_pass(shard, pass_outputs, marks, part)
                    waiting.settle()

    def _encode_pass(
        self, shard: ImageShard, outputs: Mapping[int, Output], content: Content, part: Part
    ) -> Iterator[None]:
        """Encode the captions or images of a shard, or both, into the outputs of its datasets.

        Yield from time to time, so that the caller can report progress. Raise the error that ended
        the reading of the shard, or BrokenWorkerError if a thread of the engine has failed.
        """
        captioned, left_out = self._open_captions(shard, outputs, part), Counter[str]()
        rows = read_rows(
            self._source,
            shard,
            content=content,
            left_out=left_out,
            has_images=self._encoder.takes_images
            or any(Part.IMAGE in own for _, parts in captioned for own in parts.values()),
        )
        needed = self._roles if shard.is_foreign else ()
        yielded_s = time.monotonic()
        with closing(feed(self._engine, shard.name, rows, captioned, needed)) as blocks:
            for block in blocks:
                if block is None:
                    yield
                    continue
                try:
                    while not (block.done() or wait([block], PROGRESS_S).done):
                        self._engine.check()
                        yield
                    for entry in block.entries:
                        write(entry, outputs)
                finally:
                    self._engine.leave(block)
                if time.monotonic() - yielded_s > PROGRESS_S:
                    yielded_s = time.monotonic()
                    yield
        for output in outputs.values():
            output.counts.update(left_out)

    def _open_captions(
        self, shard: ImageShard, numbers: Iterable[int], part: Part
    ) -> list[tuple[CaptionFinder, dict[int, Part]]]:
        """Open the captions of a shard, each for the datasets that have them.

        Return them with the part of a sample that each of these datasets gets, as far as it is
        `part`.
        """
        together: dict[tuple[str | None, ...], dict[int, Part]] = {}
        for number in numbers:
            captions = self._datasets[number].captions
            together.setdefault(captions, {})[number] = part & self._cuts[number].part
        return [
            (self._datasets[next(iter(parts))].open_captions(shard), parts)
            for parts in together.values()
        ]

    def _progress(self, unit: JointUnit, outputs: Mapping[int, LatentShard]) -> EncodeProgress:
        parts = {n: outputs[n].progress if n in outputs else NOTHING_LEFT for n in unit.parts}
        return EncodeProgress(
            parts=parts,
            samples=sum(part.samples for part in parts.values()),
            nbytes=sum(part.nbytes for part in parts.values()),
            share=min(part.share for part in parts.values()),
            rejects=sum_counts(part.rejects for part in parts.values()),
            worker=self._name,
            device=device_name(self._encoder.device),
            stats=self._engine.batches.stats,
        )


def write(entry: EncodingSample | Reject, outputs: Mapping[int, Output]) -> None:
    """Write what came of a sample to the output of each dataset that gets it, or a reject."""
    if isinstance(entry, Reject):
        for output in outputs.values():
            output.refuse(entry)
        return
    for number in entry.parts:
        output = outputs[number]
        try:
            output.add(entry.result(number))
        except RejectedError as refused:
            output.refuse(refused.to_reject(entry.sample.source, entry.key))
        else:
            if entry.is_named:
                output.counts["named"] += 1


def feed(
    engine: Engine,
    name: str,
    rows: Generator[tuple[str, Sample | Reject], None, None],
    captioned: Sequence[tuple[CaptionFinder, Mapping[int, Part]]],
    needed: Sequence[str] = (),
) -> Generator[Block | None, None, None]:
    """Read an image shard in a thread that feeds its samples to the engine, in order.

    Yield the blocks of the shard in order, and None whenever none has come for a while. A sample
    that has no image in a role that is `needed` becomes a reject. Raise the error that ended the
    reading, or BrokenWorkerError if a thread of the engine has failed. However the generator ends,
    the reading stops first, and the blocks that nobody has taken are released.
    """
    blocks: queue.SimpleQueue[Block | Exception | None] = queue.SimpleQueue()
    is_over = threading.Event()

    def read() -> None:
        try:
            with engine.feeding(), closing(rows):
                first = list(islice(rows, 1))  # the tar is open, its first bytes are here
                with engine.turn():
                    both = chain(first, rows)
                    for block in blocks_of(both, captioned, needed, most=engine.block_size):
                        if is_over.is_set():
                            break
                        engine.put(block)
                        blocks.put(block)
        except Exception as error:  # noqa: BLE001  raised again where the blocks are taken
            blocks.put(error)
        else:
            blocks.put(None)

    thread = threading.Thread(target=read, name=f"feed {name}", daemon=True)
    thread.start()
    try:
        while True:
            try:
                block = blocks.get(timeout=PROGRESS_S)
            except queue.Empty:
                engine.check()
                yield None
                continue
            if block is None:
                return
            if isinstance(block, Exception):
                raise block
            yield block
    finally:
        is_over.set()
        while thread.is_alive() or not blocks.empty():
            thread.join(JOIN_S)
            while not blocks.empty():
                block = blocks.get()
                if isinstance(block, Block):
                    engine.leave(block)
