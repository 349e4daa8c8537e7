"""The work of `pack`: one slice of a source becomes image shards, rejects, and last a receipt.

For a folder of JPEGs of 50 KB and header checks, a sample takes 0.13 ms of processor time, where a
loop that reads its three files, hashes the image, hashes all and writes it takes 0.07. By `perf`,
half is the interpreter, a third the kernel, a ninth BLAKE3. By `py-spy`, a sixth of the
interpreter's part is JSON and an eighth the header of the image; the rest is spread widely.
"""

import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from wdsprep import fetch
from wdsprep.dataset.coarse_histograms import count_sample
from wdsprep.dataset.draft import Draft, DraftShard
from wdsprep.dataset.file_names import image_shard, inputs_name, rejects_name, sample_key
from wdsprep.dataset.receipts import RETRIED, Receipt, Shard
from wdsprep.dataset.rejects import Refusal
from wdsprep.dataset.sample_table import table_columns
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.settings import allowed_more
from wdsprep.dataset.stored_dataset import find_receipt
from wdsprep.dataset.unit_locks import Edition
from wdsprep.fetch.downloads import Downloads, DownloadTurns
from wdsprep.packing.sample_checks import (
    CheckedSample,
    check_samples,
    packed_sample,
    repeated_urls,
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
        """Pack a slice of the source into image shards, and return its receipt.

        Progress is yielded meanwhile. If another run has packed the slice, return the receipt of
        that run.
        """
        work, store, inputs = self._work, self._edition.store, part.inputs
        digest = hex_digest(inputs)
        if done := find_receipt(store, part.name, digest, work.settings):
            return done
        with Draft(self._edition, part.name) as draft:
            packed, downloads = PackedSlice(work, part, draft), self._downloads(part)
            with downloads or nullcontext():
                told = time.monotonic()
                for checked in packed.check_samples(downloads):
                    if checked is not None:
                        packed.add(*checked)
                    if time.monotonic() - told > PROGRESS_S:
                        told = time.monotonic()
                        yield packed.progress(downloads)
            receipt = packed.receipt(digest)
            yield packed.progress(downloads)
            check = partial(check_not_retried, store, part, work.retries)
            return draft.finish(receipt, {inputs_name(part.name): inputs}, check)

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


class PackedSlice:
    """The shards and rejects that a slice is packed into: a shard is open for each bucket."""

    def __init__(self, work: "PackWork", part: Slice, draft: Draft) -> None:
        self._work, self._part, self._draft, self._rules = work, part, draft, work.rules
        self._expected, self._columns = part.samples, table_columns("images", work.settings)
        self._left_out, self._content = LeftOut(), Content()
        self._counts, self._rolled = Counter[str](), Counter[int]()
        self._open: dict[int, DraftShard] = {}
        self._done: list[Shard] = []
        self._samples = self._nbytes = 0

    def check_samples(
        self, downloads: Downloads | None
    ) -> Iterator[tuple[int, CheckedSample] | None]:
        return check_samples(
            self._work.source,
            self._rules,
            self._part,
            threads=self._work.threads,
            downloads=downloads,
            left_out=self._left_out.note,
            content=self._content,
            removed=self._draft.removed,
        )

    def add(self, number: int, checked: CheckedSample) -> None:
        """Add the input with this number to a shard, or to the rejects."""
        key = sample_key(self._part.name, number)
        if isinstance(checked, Refusal):
            self._draft.rejects.add(checked.to_reject(key))
            return
        members, facts, meta = packed_sample(key, *checked, self._rules)
        bucket, nbytes = facts["bucket"], sum([len(data) for _, data in members])
        shard = self._open.get(bucket)
        if shard is not None and self._is_full(shard, nbytes):
            self._done.append(self._open.pop(bucket).finish(waits=True))
            shard = None
        if shard is None:
            name = image_shard(bucket, self._part.name, self._rolled[bucket])
            self._rolled[bucket] += 1
            shard = self._open[bucket] = self._draft.shard(name, self._columns)
        shard.add(key, members, facts=facts, meta=meta)
        self._samples += 1
        self._nbytes += nbytes
        count_sample(self._counts, "images", facts)

    def _is_full(self, shard: DraftShard, nbytes: int) -> bool:
        too_many = shard.samples >= self._rules.samples_per_shard
        return too_many or shard.nbytes + nbytes > self._rules.max_shard_nbytes

    def progress(self, downloads: Downloads | None) -> RunProgress:
        rejects = self._draft.rejects.counts
        hosts = downloads.failed_hosts.most_common(WORST_HOSTS) if downloads else ()
        return RunProgress(
            samples=self._samples,
            nbytes=self._nbytes,
            share=share_done(self._samples + rejects.total(), self._expected),
            rejects=dict(rejects),
            failed_hosts=dict(hosts),
        )

    def receipt(self, digest: str) -> Receipt:
        """Finish the open shards, and return the receipt of the slice with these inputs."""
        work, part, rejects = self._work, self._part, self._draft.rejects
        while self._open:
            self._done.append(self._open.popitem()[1].finish())
        counts = dict(self._counts + self._left_out.counts())
        return Receipt(
            dataset="images",
            unit=part.name,
            generation=0 if part.is_retry else max(g for g in work.generations if g <= part.number),
            settings=work.settings,
            input=digest,
            inputs=self._samples + rejects.counts.total(),
            shards=tuple(sorted(self._done, key=lambda shard: (shard.bucket, shard.name))),
            rejects=dict(rejects.counts),
            counts=counts
            | ({RETRIED: len(part.elsewhere)} if part.elsewhere else {})
            | allowed_more(work.allowed_more),
            files={rejects_name(part.name): rejects.digest, **self._content.file},
        )
