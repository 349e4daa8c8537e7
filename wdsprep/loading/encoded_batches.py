"""Make batches of latents from images, beside the trainer's steps.

The loader reads image shards in the order of the latent shards, its threads decode, and the models
run on the trainer's own device a few steps ahead of the trainer. A separate thread connects the
two, and makes a few batches ahead. The trainer waits only when the device cannot keep up.
"""

import json
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from wdsprep.cpus import usable_cpus
from wdsprep.dataset.npy_arrays import FLIPPED, LATENT
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.samples import facts_bytes
from wdsprep.encoding.latent_shard import arrays_of, facts_of
from wdsprep.encoding.models.noise import mirrored_noise_key
from wdsprep.encoding.on_the_fly.encode_steps import BatchEncoder, Encoding, StepBegun
from wdsprep.encoding.on_the_fly.latent_writer import LatentWriter
from wdsprep.encoding.sample_chain import EncodedSample, EncodingSample
from wdsprep.errors import FormatError
from wdsprep.images.nearest_shape import cut_of
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.loading.augmentation import finish
from wdsprep.loading.batch_memory import Batch, Numbered, NumberedBatches
from wdsprep.loading.batch_reader import Reader
from wdsprep.loading.load_plan import LoadPlan
from wdsprep.loading.options import LONGEST
from wdsprep.loading.order.global_order import Samples
from wdsprep.loading.prefetch import (
    NO_ROWS,
    close_sources,
    fill_batches,
    open_reader,
    open_sources,
    rows_at_once,
    wanted_by_source,
)
from wdsprep.loading.sample_layout import batch_name
from wdsprep.loading.served_datasets import ATTEMPTS, TEXTS

BEGUN = 2  # steps that the device has
READY = 2  # finished steps that wait for the trainer
READ = ("pixels", "key", "made")


EncodedRow = tuple[EncodedSample, tuple[int, int]]
"""An encoded sample, and its place: its shard, and its number in the shard."""


class EncodingReader:
    """A reader of images that encodes them, for a plan whose latents are not stored."""

    def __init__(self, plan: LoadPlan, encoder: BatchEncoder) -> None:
        self.plan, self.encoder = reading_plan(plan), encoder
        self.reader = open_reader(self.plan)

    def batches(self, steps: range) -> Iterator[tuple[Batch, list[EncodedRow]]]:
        """Yield the images of each step with their encoded rows.

        The device has begun the next step by then, if there is one.
        """
        begun: deque[tuple[Batch, StepBegun]] = deque()
        for batch in fill_batches(self.plan, steps, self.reader):
            begun.append((batch, self.begin(batch)))
            if len(begun) >= BEGUN:
                yield begun[0][0], self.collect_rows(*begun.popleft())
        while begun:
            yield begun[0][0], self.collect_rows(*begun.popleft())

    def begin(self, batch: Batch) -> StepBegun:
        """Begin to encode the images of a batch, some of them mirrored at random.

        The pixels are mirrored in the batch itself. If latents of mirror images are kept, each
        image is encoded both ways instead. A mirrored image has noise of its own.
        """
        pixels, noises = batch.out["pixels"], list(batch.keys)
        if not self.encoder.flips:
            for row in self.plan.pick_rows("flip", batch, range(len(batch))):
                pixels[row] = pixels[row].flip(-1)
                noises[row] = mirrored_noise_key(noises[row])
        part = {0: self.encoder.part}
        return self.encoder.begin(
            [
                EncodingSample(noise, sample, part, crops={0: replace(crop, pixels=image)})
                for noise, image, (sample, crop) in zip(
                    noises, pixels, batch.out["made"], strict=True
                )
            ]
        )

    def encode_row(self, batch: Batch, row: int) -> EncodedRow:
        """Read and encode the sample whose shard and number a row has now."""
        single = self.reader.read_single(batch, row, batch.place(row))
        return self.collect_rows(single, self.begin(single))[0]

    def collect_rows(self, batch: Batch, begun: StepBegun) -> list[EncodedRow]:
        """Return the encoded rows of a batch, waiting until the device has them.

        If the latents of a row are not finite, or its caption has no tokens, another sample
        replaces it, as for a damaged image. The refused sample is added to the batch's `refused`.
        """
        return [
            self._encode_substitute(batch, row, result)
            if isinstance(result, Code)
            else _make_row(batch, row, result)
            for row, result in enumerate(self.encoder.results(begun))
        ]

    def _encode_substitute(self, batch: Batch, row: int, code: Code) -> EncodedRow:
        wanted, (sample, _) = batch.place(row), batch.out["made"][row]
        batch.refused[wanted] = Reject(key=batch.keys[row], source=sample.source, code=code)
        for attempt in range(ATTEMPTS):
            place = self.reader.substitutes.draw(batch.stream[row], wanted, attempt)
            single = self.reader.read_single(batch, row, place)
            (result,) = self.encoder.results(self.begin(single))
            if isinstance(result, EncodedSample):
                return _make_row(single, 0, result)
        raise FormatError(
            f"{batch.keys[row]} and {ATTEMPTS} samples tried in its place have no finite latents: "
            'encode with dtype="fp32"'
        )


def _make_row(batch: Batch, row: int, result: EncodedSample) -> EncodedRow:
    """Return a row with its sample, which was encoded with the noise of another key if mirrored."""
    return replace(result, key=batch.keys[row]), batch.place(row)


def reading_plan(plan: LoadPlan) -> LoadPlan:
    """Return the plan for reading the images from which the latents of a plan are made."""
    images = tuple(
        replace(dataset.images, joined=())
        for dataset in plan.datasets
        if dataset.images is not None
    )
    settings = plan.datasets[0].settings
    options = replace(
        plan.options,
        pin=False,
        device=None,
        drop_text=0.0,
        pixels=settings["resolution"],
        max_area=settings.get("max_area", MAX_AREA),
    )
    return replace(
        plan,
        options=options,
        datasets=images,
        names=READ,
        captions=(),
        cut=cut_of(settings),
        max_nbytes=settings.get("max_bytes", MAX_NBYTES),
        empty=(),
    )


class BatchBuilder:
    """A builder of batches from encoded rows, equal to batches of stored latents.

    All rows go to the `tee`, if there is one.
    """

    def __init__(self, plan: LoadPlan, tee: LatentWriter | None) -> None:
        self._tee = tee
        self._mirrored = partial(plan.pick_rows, "flip")
        self._fields = plan.datasets[0].fields
        sources = open_sources(plan) if any(d.joined for d in plan.datasets) else ()
        # mirrored here, or before they are encoded
        self._plan = replace(plan, options=replace(plan.options, flip=0.0, skip_missing=False))
        self._at_once = rows_at_once(self._plan)
        self._reader = Reader(self._plan, sources, keep=2 * (READY + 4))
        wanted = (arrays for of_all in self._reader.wanted for arrays in of_all[0] if arrays)
        self._own = {name for arrays in wanted for name in arrays.names}
        weakref.finalize(self, close_sources, sources)

    def build(
        self,
        read: Sequence[Batch],
        rows: Sequence[EncodedRow],
        *,
        encoded: Callable[[Batch, int], EncodedRow] | None = None,
    ) -> Batch:
        """Return the batch of these encoded rows, whose images were read in one or more parts.

        `encoded` encodes another sample for a row if a joined sample of its own is damaged.
        Without `encoded`, that damage is an error.
        """
        if self._tee is not None:
            for encoded_sample, place in rows:
                self._tee.add(*place, encoded_sample)
            for part in read:
                self._tee.refuse(part.refused)
        streams = [stream for part in read for stream in part.stream]
        own_places = np.array([[place for _, place in rows]]).swapaxes(1, 2)
        batch = self._reader.begin(Batch(read[0].step, read[0].first, streams, own_places))
        mirrored = {*self._mirrored(batch, range(len(batch)))}
        for row, (sample, _) in enumerate(rows):
            self._put_row(batch, row, sample, is_mirrored=row in mirrored)

        if len(batch.places) > 1:
            shards, indices = batch.places[0]
            samples = Samples(stream=np.array(batch.stream), shard=shards, index=indices)
            choice = np.array(batch.choice) if batch.choice else None
            wanted = wanted_by_source(self._reader, samples, choice, first=1)
            for source, places in wanted.items():
                source.expect(places, NO_ROWS)

        def put_substitute(batch: Batch, row: int) -> None:
            if encoded is not None:
                sample, batch.places[0][:, row] = encoded(batch, row)
                self._put_row(batch, row, sample, is_mirrored=row in mirrored)

        for run in batch.runs(self._at_once):
            self._reader.fill_joined(batch, run, put_substitute if encoded else None)
        finish(self._plan, batch, range(len(batch)))
        if self._plan.options.pad == LONGEST:
            batch.shorten()
        return batch

    def _put_row(self, batch: Batch, row: int, sample: EncodedSample, *, is_mirrored: bool) -> None:
        """Put an encoded sample into a row, with the latents of its mirror image if it has any."""
        batch.keys[row] = sample.key
        facts = facts_of(sample, is_packed=True)
        arrays = arrays_of(self._fields, facts, sample)
        if is_mirrored and FLIPPED in arrays:
            arrays[LATENT] = arrays[FLIPPED]
        for member, array in arrays.items():
            if batch_name(member) in self._own:
                batch.put(batch_name(member), row, array)
        for name in TEXTS:
            if name in batch.out:
                batch.out[name][row] = sample.sample.caption.encode("utf-8", "replace").decode()
        if "json" in batch.out:
            batch.out["json"][row] = json.loads(facts_bytes(facts))


def serve_encoded(plan: LoadPlan, encoding: Encoding) -> Callable[[range], NumberedBatches]:
    """Load the models of a trainer, and return a function that serves any steps with them."""
    kept = bool(plan.options.tee)
    encoder = BatchEncoder(encoding, most=plan.share, lanes=usable_cpus(), kept=kept)
    plan = with_empty_caption(plan, encoder.empty() if plan.options.drop_text else {})
    tee = open_tee(plan, encoding, encoder.empty)

    def make_batches(steps: range) -> Generator[Numbered, None, None]:
        reader = EncodingReader(plan, encoder)
        builder = BatchBuilder(plan, tee)
        for batch, rows in reader.batches(steps):
            yield batch.step, builder.build([batch], rows, encoded=reader.encode_row).out

    def serve(steps: range) -> NumberedBatches:
        """Yield each step with its batch, in order, while another thread makes the batches.

        Raise the error at which that thread stopped. When the iteration ends or is broken off,
        stop the thread; then, with a tee, list the tee's complete shards in its manifest.
        """
        batches = make_batches(steps)
        pool = ThreadPoolExecutor(1, "wdsprep-encode")
        ready = deque(pool.submit(next, batches, None) for _ in range(READY + 1))
        try:
            while (batch := ready.popleft().result()) is not None:
                ready.append(pool.submit(next, batches, None))
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)
            batches.close()
            if tee is not None:
                tee.publish()

    weakref.finalize(serve, encoder.close)
    if tee is not None:
        weakref.finalize(serve, tee.close)
    return serve


def open_tee(
    plan: LoadPlan, encoding: Encoding, empty: Callable[[], Mapping[str, torch.Tensor]]
) -> LatentWriter | None:
    """Return what writes the latents of a plan that keeps them."""
    url, images = str(plan.options.tee), plan.datasets[0].whole
    if not url:
        return None
    return LatentWriter(url, images.store.url, images.names, images.sizes.tolist(), encoding, empty)


def with_empty_caption(plan: LoadPlan, empty: Mapping[str, torch.Tensor]) -> LoadPlan:
    """Return the plan with the arrays of the encoded empty caption added.

    Joined datasets keep the empty captions that they store.
    """
    arrays = {batch_name(name): array for name, array in empty.items()}
    known = tuple(tuple(arrays | joined for joined in by_choice) for by_choice in plan.empty)
    return replace(plan, empty=known)
