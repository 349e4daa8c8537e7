"""The work of `pack`: one slice of a source becomes image shards, rejects, and last a receipt.

For a folder of JPEGs of 50 KB and header checks, a sample takes 0.13 ms of processor time, where a
loop that reads its three files, hashes the image, hashes all and writes it takes 0.07. By `perf`,
half is the interpreter, a third the kernel, a ninth BLAKE3. By `py-spy`, a sixth of the
interpreter's part is JSON and an eighth the header of the image; the rest is spread widely.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from wdsprep import fetch
from wdsprep.dataset.coarse_histograms import count_sample
from wdsprep.dataset.draft import Draft, DraftShard
from wdsprep.dataset.file_names import image_shard, inputs_name, rejects_name, sample_key
from wdsprep.dataset.receipts import RETRIED, Receipt, Shard
from wdsprep.dataset.rejects import Refusal, RejectsFile
from wdsprep.dataset.removed_samples import Removed
from wdsprep.dataset.sample_table import Columns, table_columns
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.settings import allowed_more
from wdsprep.dataset.shapes import bucket_of
from wdsprep.dataset.stored_dataset import find_receipt
from wdsprep.dataset.unit_locks import Edition
from wdsprep.fetch.downloads import Downloads, DownloadTurns
from wdsprep.images.pixel_rule import Picture
from wdsprep.packing.options import PackRules
from wdsprep.packing.sample_checks import (
    CheckedSample,
    check_samples,
    packed_sample,
    repeated_urls,
    repeats_of,
)
from wdsprep.packing.slices import check_not_retried
from wdsprep.runners.base import PROGRESS_S
from wdsprep.runners.run import RunProgress, share_done
from wdsprep.sources.base import Content, LeftOut, Slice
from wdsprep.store import open_store

if TYPE_CHECKING:
    from wdsprep.packing.pack import PackWork

WORST_HOSTS = 20  # so many hosts are told about for each slice


class PackWorker:
    """A worker of `pack`: one process, in which slices of a table of URLs share one HTTP client."""

    def __init__(self, work: "PackWork") -> None:
        self._work = work
        self._edition = Edition(store=open_store(work.images), mark=work.edition)
        self._fetcher = fetch.Fetcher(work.fetch_rules) if work.fetch_rules else None
        self._pace = DownloadTurns()

    def __call__(self, part: Slice) -> Generator[RunProgress, None, Receipt]:
        return pack_slice(self._work, self._edition, part, self._downloads)

    def _downloads(self, part: Slice) -> Downloads | None:
        rules = self._work.fetch_rules
        if self._fetcher is None or rules is None:
            return None
        repeated = partial(repeated_urls, self._work.source, part)
        minds_outage = not (rules.ignore_outage or part.is_retry)
        return Downloads(self._fetcher, repeated, pace=self._pace, minds_outage=minds_outage)

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()


def pack_slice(
    work: "PackWork", edition: Edition, part: Slice, fetching: Callable[[Slice], Downloads | None]
) -> Generator[RunProgress, None, Receipt]:
    """Pack a slice of the source into image shards, and return its receipt.

    Progress is yielded meanwhile. If another run has packed the slice, return the receipt of that
    run. `fetching` returns the downloads of a slice, or None if its source has the images.
    """
    unit, inputs, expected = part.name, part.inputs, part.samples
    digest = hex_digest(inputs)
    if done := find_receipt(edition.store, unit, digest, work.settings):
        return done
    with Draft(edition, unit) as draft:
        columns = table_columns("images", work.settings)
        shards, rejects, left_out = _Shards(draft, work.rules, columns), draft.rejects, LeftOut()
        content = Content()
        downloads = fetching(part)
        with downloads or nullcontext():
            told = time.monotonic()
            for found in _judged(work, part, downloads, left_out, content, draft.removed):
                if found is not None:
                    number, what = found
                    key = sample_key(unit, number)
                    if isinstance(what, Refusal):
                        rejects.add(what.to_reject(key))
                    else:
                        shards.add(key, *what)
                if time.monotonic() - told > PROGRESS_S:
                    told = time.monotonic()
                    yield _progress(expected, shards, rejects, downloads)
        counts = shards.counts + left_out.counts()
        receipt = _receipt(work, part, digest, shards.finish(), rejects, counts, content)
        yield _progress(expected, shards, rejects, downloads)
        check = partial(check_not_retried, edition.store, part, work.retries)
        return draft.finish(receipt, {inputs_name(unit): inputs}, check)


def _judged(
    work: "PackWork",
    part: Slice,
    downloads: Downloads | None,
    left_out: LeftOut,
    content: Content,
    removed: Removed,
) -> Iterator[tuple[int, CheckedSample] | None]:
    return check_samples(
        work.source,
        work.rules,
        part,
        threads=work.threads,
        downloads=downloads,
        left_out=left_out.note,
        content=content,
        removed=removed,
    )


def _progress(
    expected: int, shards: "_Shards", rejects: RejectsFile, downloads: Downloads | None
) -> RunProgress:
    inputs = shards.samples + rejects.counts.total()
    return RunProgress(
        samples=shards.samples,
        nbytes=shards.nbytes,
        share=share_done(inputs, expected),
        rejects=dict(rejects.counts),
        failed_hosts=dict(downloads.failed_hosts.most_common(WORST_HOSTS)) if downloads else {},
    )


def _receipt(
    work: "PackWork",
    part: Slice,
    digest: str,
    written: tuple[Shard, ...],
    rejects: RejectsFile,
    counts: Counter[str],
    content: Content,
) -> Receipt:
    return Receipt(
        dataset="images",
        unit=part.name,
        generation=0 if part.is_retry else max(g for g in work.generations if g <= part.number),
        settings=work.settings,
        input=digest,
        inputs=sum(shard.samples for shard in written) + rejects.counts.total(),
        shards=written,
        rejects=dict(rejects.counts),
        counts=dict(counts)
        | ({RETRIED: len(part.elsewhere)} if part.elsewhere else {})
        | allowed_more(work.allowed_more),
        files={rejects_name(part.name): rejects.digest, **content.file},
    )


@dataclass(slots=True)
class _Shards:
    """The shards that a slice is packed into: an open one for each bucket, and finished ones."""

    draft: Draft
    rules: PackRules
    columns: Columns
    samples: int = 0
    nbytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    _open: dict[int, DraftShard] = field(default_factory=dict)
    _rolled: Counter[int] = field(default_factory=Counter)
    _done: list[Shard] = field(default_factory=list)

    def add(self, key: str, sample: Sample, pictures: Sequence[Picture]) -> None:
        bucket = bucket_of(pictures[0].width, pictures[0].height, self.rules.sides)
        has_repeats = self.rules.repeats_from_folders
        of_folder = {"repeats": repeats_of(sample.source)} if has_repeats else {}
        packed = packed_sample(key, sample, pictures, bucket, self.rules.kept, of_folder)
        nbytes = sum([len(data) for _, data in packed.members])
        current = self._open.get(bucket)
        if current is not None and self._is_full(current, nbytes):
            self._done.append(self._open.pop(bucket).finish(waits=True))
            current = None
        if current is None:
            current = self._begin(bucket)
        current.add(key, packed.members, facts=packed.facts, meta=packed.meta)
        self.samples += 1
        self.nbytes += nbytes
        count_sample(self.counts, "images", packed.facts)

    def finish(self) -> tuple[Shard, ...]:
        while self._open:
            self._done.append(self._open.popitem()[1].finish())
        return tuple(sorted(self._done, key=lambda shard: (shard.bucket, shard.name)))

    def _is_full(self, file: DraftShard, nbytes: int) -> bool:
        too_many = file.samples >= self.rules.samples_per_shard
        return too_many or file.nbytes + nbytes > self.rules.max_shard_nbytes

    def _begin(self, bucket: int) -> DraftShard:
        roll = self._rolled[bucket]
        self._rolled[bucket] += 1
        name = image_shard(bucket, self.draft.unit, roll)
        self._open[bucket] = self.draft.shard(name, self.columns)
        return self._open[bucket]
