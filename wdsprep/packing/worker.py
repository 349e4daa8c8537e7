"""The work of `pack`: one slice of a source becomes image shards, rejects, and last a receipt.

Each input of a slice is kept with its picture, or rejected. Checks that need no image come first,
so that no row of a table of URLs is fetched for nothing. `packed_sample` is what is written of a
sample that is kept, with the json beside its image.

For a folder of JPEGs of 50 KB and header checks, a sample takes 0.13 ms of processor time, where a
loop that reads its three files, hashes the image, hashes all and writes it takes 0.07. By `perf`,
half is the interpreter, a third the kernel, a ninth BLAKE3. By `py-spy`, a sixth of the
interpreter's part is JSON and an eighth the header of the image; the rest is spread widely.
"""

import hashlib
import re
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, cast

from wdsprep.dataset.coarse_histograms import count_sample
from wdsprep.dataset.condition_syntax import format_path
from wdsprep.dataset.draft import Draft, DraftShard
from wdsprep.dataset.file_names import image_shard, inputs_name, is_retry, rejects_name, sample_key
from wdsprep.dataset.manifest import RETRIED, Receipt, Shard
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError, as_rejected
from wdsprep.dataset.removed_samples import Removed
from wdsprep.dataset.sample_table import table_columns
from wdsprep.dataset.samples import (
    META,
    PathParts,
    Sample,
    facts_bytes,
    is_mask,
    names_in,
    nearest_field,
    role_of,
    value_at_path,
)
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.settings import allowed_more
from wdsprep.dataset.shapes import bucket_of
from wdsprep.dataset.stored_dataset import find_receipt
from wdsprep.dataset.thread_map import IDLE, map_ahead
from wdsprep.dataset.unit_locks import Edition
from wdsprep.fetch.downloads import Downloads, DownloadTurns
from wdsprep.images.pixel_rule import Picture, prepare, prepare_mask
from wdsprep.packing.options import PackRules
from wdsprep.packing.slices import PackJob, check_not_retried
from wdsprep.runners.base import PROGRESS_S
from wdsprep.runners.run import RunProgress, share_done
from wdsprep.sources.base import Content, Item, Slice, Source, count_left_out, naming_role
from wdsprep.sources.folder import check_nbytes
from wdsprep.sources.table_sources import UrlSource
from wdsprep.store import open_store, shared_store

SPARE = 4  # inputs ahead, so that none of the threads waits for its next
REMOTE_READS = 16  # at a time and worker, where each one waits for a network


CheckedSample = Reject | tuple[Sample, tuple[Picture, ...]]
"""A reject, or a sample with its pictures as they are stored: the target, then those in roles."""
SampleOrReject = Sample | Reject


def repeated_urls(source: Source, part: Slice) -> Counter[str]:
    """Return the URLs that occur more than once in a slice, with how often each does."""
    tables = cast("UrlSource", source)
    urls = (url for item in part.items for url in islice(tables.urls(item), item.take or None))
    return Counter({url: count for url, count in Counter(urls).items() if count > 1})


def _check_sample(rules: PackRules, removed: Removed | None, row: SampleOrReject) -> CheckedSample:
    """Return a sample with its pictures, or a reject if one of its images cannot be kept.

    The sample gets the digests of --compute-hash. With --verify-hash, its image must have the
    digest in its facts.
    """
    if isinstance(row, Reject):
        return row
    full = rules.check == "full"
    try:
        images = row.all_images
        for image in images:
            if removed and removed.has("sha256", hashlib.sha256(image.data).hexdigest()):
                raise RejectedError(Code.REMOVED)
        check_nbytes("the image", len(row.image), rules.max_nbytes)
        if rules.verify is not None:
            column, kind = rules.verify
            wanted = str(row.facts.get(column) or "").strip().lower()
            digest = hashlib.new(kind, row.image).hexdigest()
            if digest != wanted:
                expected = wanted or f"nothing in column {column}"
                raise RejectedError(Code.HASH_MISMATCH, f"{digest}, expected {expected}"[:200])
        if kind := rules.compute_hash:
            digests = {
                f"{image.name}_{kind}".lstrip("_"): hashlib.new(kind, image.data).hexdigest()
                for image in images
            }
            row = replace(row, digests=digests)
        target = prepare(row.image, limits=rules.limits[""], full=full)
        pictures = [target]
        for image in row.images:
            limits = rules.limits[role_of(image.name)[0]]
            with naming_role(image.name):
                check_nbytes("the image", len(image.data), rules.max_nbytes)
                if is_mask(image.name):
                    picture = prepare_mask(image.data, target, limits=limits, full=full)
                else:
                    picture = prepare(image.data, limits=limits, full=full)
                pictures.append(picture)
        return row, tuple(pictures)
    except Exception as error:  # noqa: BLE001 (told apart by as_rejected)
        return _reject(row, as_rejected(error, Code.CORRUPT))


def _check_facts(rules: PackRules, removed: Removed | None, row: SampleOrReject) -> SampleOrReject:
    """Return a sample, or a reject if its source, a URL, caption, facts or roles rule it out."""
    if removed and (removed.has("source", row.source) or removed.has("url", row.url)):
        return Reject(source=row.source, code=Code.REMOVED)
    if isinstance(row, Reject):
        return row
    if removed and any(removed.has("url", image.url) for image in row.images):
        return Reject(source=row.source, code=Code.REMOVED)
    try:
        length = len(row.caption)
        if length < rules.min_caption:
            raise RejectedError(Code.CAPTION_TOO_SHORT, f"{length} characters")
        if 0 < rules.max_caption < length:
            raise RejectedError(Code.CAPTION_TOO_LONG, f"{length} characters")
        if (condition := rules.condition) is not None:
            known = {"caption": row.caption, **row.facts}
            values = [value_at_path(known, path) for path in condition.names]
            if not condition.holds(values):
                facts = [
                    f"{format_path(path)} is {_missing(path, known) if value is None else value}"
                    for path, value in zip(condition.names, values, strict=True)
                ]
                code = Code.NO_FIELD if None in values else Code.FILTERED
                raise RejectedError(code, ", ".join(sorted(facts)))
        for role in rules.roles:
            if not role.is_optional and all(image.name != role.name for image in row.images):
                raise RejectedError(Code.NO_ROLE, role.name)
    except Exception as error:  # noqa: BLE001
        return _reject(row, as_rejected(error, Code.UNREADABLE))
    return row


MOST_NAMES = 200  # in the metadata of a sample, where one is looked for that is like another
_nearest_field = lru_cache(64)(nearest_field)  # most samples of a source have the same names


def _missing(path: PathParts, facts: Mapping[str, Any]) -> str:
    names = frozenset(names_in(facts))
    near = _nearest_field(path, names) if len(names) <= MOST_NAMES else ""
    return f"missing (did you mean {near}?)" if near else "missing"


def _reject(row: Sample, refused: RejectedError) -> Reject:
    return replace(refused.to_reject(row.source), url=row.url)


_META = b',"meta":'


def packed_sample(
    key: str, sample: Sample, pictures: Sequence[Picture], rules: PackRules
) -> tuple[list[tuple[str, bytes]], dict[str, Any], bytes]:
    """Return what is written of a sample: its members, its facts, and the text of its `meta`.

    The members are the images, the json and the caption. The pictures are the target, then those in
    roles.
    """
    meta = sample.facts
    if rules.kept is not None:
        meta = {name: value for name, value in meta.items() if name in rules.kept}
    picture = pictures[0]
    facts: dict[str, Any] = {
        "bucket": bucket_of(picture.width, picture.height, rules.sides),
        "caption": sample.caption,
        "changes": picture.changes,
        "height": picture.height,
        "key": key,
        META: meta,
        "original_height": picture.original_height,
        "original_width": picture.original_width,
        "source": sample.source,
        "width": picture.width,
    }
    if len(sample.captions) > 1:
        facts["captions"] = sample.captions
    if sample.url:
        facts["url"] = sample.url
    facts |= sample.digests
    if rules.repeats_from_folders:
        # The innermost folder with a name such as 10_name says it, as kohya's trainers read it.
        folders = reversed(sample.source.split("/")[:-1])
        numbers = (re.match(r"([0-9]{1,6})_", folder) for folder in folders)
        facts["repeats"] = next((int(number[1]) for number in numbers if number), 1)
    members = [(picture.extension, picture.data)]
    for image, other in zip(sample.images, pictures[1:], strict=True):
        name = image.name
        facts[f"{name}_changes"] = other.changes
        facts[f"{name}_height"], facts[f"{name}_width"] = other.height, other.width
        facts[f"{name}_original_height"] = other.original_height
        facts[f"{name}_original_width"] = other.original_width
        if image.url:
            facts[f"{name}_url"] = image.url
        members.append((f"{name}.{other.extension}", other.data))
    data = facts_bytes(facts)
    members += [("json", data), ("txt", sample.caption.encode("utf-8", "replace"))]
    # No other field is or has an object. So the first text of the name of `meta` is its name, and
    # the last of the next field's is that.
    start = data.index(_META) + len(_META)
    following = "original_height"
    if sample.images:
        changes = (f"{image.name}_changes" for image in sample.images)
        following = min([following, *(name for name in changes if name > META)])
    return members, facts, data[start : data.rindex(f',"{following}":'.encode(), start)]


WORST_HOSTS = 20  # so many hosts are told about for each slice


class PackWorker:
    """A worker of `pack`: one process, in which slices of a table of URLs share one HTTP client."""

    def __init__(self, job: PackJob) -> None:
        self._job = job
        self._edition = Edition(store=open_store(job.images), mark=job.edition)
        self._fetcher, self._pace = None, DownloadTurns()
        if job.fetch_rules is not None:
            from wdsprep.fetch.client import Fetcher  # libcurl: for tables of URLs alone

            self._fetcher = Fetcher(job.fetch_rules)

    def __call__(self, part: Slice) -> Generator[RunProgress, None, Receipt]:
        """Pack a slice of the source into image shards, and return its receipt.

        Progress is yielded meanwhile. If another run has packed the slice, return the receipt of
        that run.
        """
        job, store, inputs = self._job, self._edition.store, part.inputs
        digest = hex_digest(inputs)
        if done := find_receipt(store, part.name, digest, job.settings):
            return done
        downloads = None
        if self._fetcher is not None and job.fetch_rules is not None:
            repeated = partial(repeated_urls, job.source, part)
            minds_outage = not (job.fetch_rules.ignore_outage or is_retry(part.name))
            downloads = Downloads(
                self._fetcher, repeated, pace=self._pace, minds_outage=minds_outage
            )
        with Draft(self._edition, part.name) as draft:
            packed = PackedSlice(job, part, draft)
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
            check = partial(check_not_retried, store, part, job.retries)
            return draft.finish(receipt, {inputs_name(part.name): inputs}, check)

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()


class PackedSlice:
    """The shards and rejects that a slice is packed into: a shard is open for each bucket."""

    def __init__(self, job: PackJob, part: Slice, draft: Draft) -> None:
        self._job, self._part, self._draft, self._rules = job, part, draft, job.rules
        self._expected, self._columns = part.samples, table_columns("images", job.settings)
        self._content, self._counts, self._rolled = Content(), Counter[str](), Counter[int]()
        self._open: dict[int, DraftShard] = {}
        self._done: list[Shard] = []
        self._samples = self._nbytes = 0
        self._roles = [role.name for role in job.rules.roles]

    def check_samples(
        self, downloads: Downloads | None
    ) -> Iterator[tuple[int, CheckedSample] | None]:
        """Yield the number of each input, with its sample and pictures, or its reject.

        Inputs that another slice has taken over are skipped. None is yielded while downloads are
        awaited. The fingerprint of each row that is read is kept.
        """
        source, part, content = self._job.source, self._part, self._content
        rules, threads = self._rules, self._job.threads
        removed = self._draft.removed or None  # asked several times of each sample
        check = partial(_check_facts, rules, removed)
        judge = partial(_check_sample, rules, removed)
        if source.kind == "folder":  # one sample an item: reading goes into the threads with it
            # A local folder whose images are not decoded is read by one thread: the rest is Python
            # and short system calls, where threads wait for each other's lock. For 8,000 samples of
            # 50 KB, two threads took 1.8 times as long as one. If a mounted folder is slow, more
            # workers help: they read different slices at the same time.
            places = (source.url, *(role.url for role in source.columns.roles if role.url))
            if any(shared_store(place).root is None for place in places):
                threads = max(threads, REMOTE_READS)
            elif not (rules.check == "full" or rules.reencode):
                threads = 1

            def read_and_judge(item: Item) -> list[tuple[bytes, CheckedSample]]:
                rows = source.read(item)
                return [(content.mark(row), judge(check(row))) for row in rows]

            judged = map_ahead(read_and_judge, part.items, threads, most=threads + SPARE)
            for number, (mark, sample) in enumerate(chain.from_iterable(judged)):
                content.add(mark)
                yield number, sample
            return

        def checked() -> Iterator[tuple[int, SampleOrReject]]:
            left_out = partial(count_left_out, self._counts)
            items = (islice(source.read(item, left_out), item.take or None) for item in part.items)
            for number, row in enumerate(chain.from_iterable(items)):
                content.add(content.mark(row))
                if row.source not in part.elsewhere:
                    yield number, check(row)

        def judge_numbered(numbered: tuple[int, SampleOrReject]) -> tuple[int, CheckedSample]:
            return numbered[0], judge(numbered[1])

        rows = checked() if downloads is None else downloads.take(checked())
        waiting = (IDLE if row is None else row for row in rows)
        for judged_row in map_ahead(judge_numbered, waiting, threads, most=threads + SPARE):
            yield None if judged_row is IDLE else judged_row

    def add(self, number: int, checked: CheckedSample) -> None:
        """Add the input with this number to a shard, or to the rejects."""
        key = sample_key(self._part.name, number)
        if isinstance(checked, Reject):
            self._draft.rejects.add(replace(checked, key=key))
            return
        members, facts, meta = packed_sample(key, *checked, self._rules)
        bucket, nbytes = facts["bucket"], sum([len(data) for _, data in members])
        shard = self._open.get(bucket)
        if shard is not None and (
            shard.samples >= self._rules.samples_per_shard
            or shard.nbytes + nbytes > self._rules.max_shard_nbytes
        ):
            self._done.append(self._open.pop(bucket).finish(waits=True))
            shard = None
        if shard is None:
            name = image_shard(bucket, self._part.name, self._rolled[bucket])
            self._rolled[bucket] += 1
            shard = self._open[bucket] = self._draft.shard(name, self._columns)
        shard.add(key, members, facts=facts, meta=meta)
        self._samples += 1
        self._nbytes += nbytes
        count_sample(self._counts, "images", facts, roles=self._roles)

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
        job, part, rejects = self._job, self._part, self._draft.rejects
        generation = 0
        if not is_retry(part.name):
            generation = max(first for first in job.generations if first <= part.number)
        while self._open:
            self._done.append(self._open.popitem()[1].finish())
        return Receipt(
            dataset="images",
            unit=part.name,
            generation=generation,
            settings=job.settings,
            input=digest,
            inputs=self._samples + rejects.counts.total(),
            shards=tuple(sorted(self._done, key=lambda shard: (shard.bucket, shard.name))),
            rejects=dict(rejects.counts),
            counts=dict(self._counts)
            | ({RETRIED: len(part.elsewhere)} if part.elsewhere else {})
            | allowed_more(job.allowed_more),
            files={rejects_name(part.name): rejects.digest, **self._content.file},
        )
