"""The decision for each input of a slice: it is kept with its picture, or rejected.

Checks that need no image come first, so that no row of a table of URLs is fetched for nothing.
`packed_sample` is what is written of a sample that is kept, with the json beside its image.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, cast

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Refusal, RejectedError, as_rejected
from wdsprep.dataset.removed_samples import NONE_REMOVED, Removed
from wdsprep.dataset.samples import META, RoleImage, Sample, facts_bytes, is_mask, role_of
from wdsprep.dataset.shapes import bucket_of
from wdsprep.dataset.thread_map import IDLE, map_ahead
from wdsprep.fetch.downloads import Downloads
from wdsprep.images.pixel_rule import Picture, prepare, prepare_mask
from wdsprep.packing.options import PackRules
from wdsprep.sources.base import (
    Content,
    Item,
    Slice,
    Source,
    Told,
    ignore_left_out,
    naming_role,
)
from wdsprep.sources.folder import check_nbytes
from wdsprep.sources.url_tables import UrlSource
from wdsprep.store import shared_store

SPARE = 4  # inputs ahead, so that none of the threads waits for its next
REMOTE_READS = 16  # at a time and worker, where each one waits for a network
NOT_KEPT = Content(is_kept=False)


CheckedSample = Refusal | tuple[Sample, tuple[Picture, ...]]
"""A refusal, or a sample with its pictures as they are stored: the target, then those in roles."""
SampleOrRefusal = Sample | Refusal


def check_samples(
    source: Source,
    rules: PackRules,
    part: Slice,
    *,
    threads: int,
    downloads: Downloads | None,
    left_out: Told = ignore_left_out,
    content: Content = NOT_KEPT,
    removed: Removed = NONE_REMOVED,
) -> Iterator[tuple[int, CheckedSample] | None]:
    """Yield the number of each input of a slice, with its sample and pictures, or its refusal.

    Inputs that another slice has taken over are skipped. None is yielded while downloads are
    awaited. `content` collects a fingerprint of each row that was read.
    """
    check, judge = partial(_check_facts, rules, removed), partial(_check_sample, rules, removed)
    if source.kind == "folder":  # one sample an item: reading goes into the threads with it
        threads = _reading_threads(source, rules, threads)

        def read_and_judge(item: Item) -> list[tuple[bytes, CheckedSample]]:
            rows = source.read(item)
            return [(content.mark(row), judge(check(row))) for row in rows]

        number = 0
        for judged in map_ahead(read_and_judge, part.items, threads, most=threads + SPARE):
            for mark, sample in judged:
                content.add(mark)
                yield number, sample
                number += 1
        return

    def checked() -> Iterator[tuple[int, SampleOrRefusal]]:
        items = (islice(source.read(item, left_out), item.take or None) for item in part.items)
        for number, row in enumerate(chain.from_iterable(items)):
            content.add(content.mark(row))
            if row.source not in part.elsewhere:
                yield number, check(row)

    def judge_numbered(numbered: tuple[int, SampleOrRefusal]) -> tuple[int, CheckedSample]:
        return numbered[0], judge(numbered[1])

    rows = checked() if downloads is None else downloads.take(checked())
    waiting = (IDLE if row is None else row for row in rows)
    for one in map_ahead(judge_numbered, waiting, threads, most=threads + SPARE):
        yield None if one is IDLE else one


def _reading_threads(source: Source, rules: PackRules, threads: int) -> int:
    """Return the number of threads that read a folder.

    A local folder whose images are not decoded is read by one thread: the rest is Python and
    short system calls, where threads wait for each other's lock. For 8,000 samples of 50 KB, two
    threads took 1.8 times as long as one. If a mounted folder is slow, more workers help: they
    read different slices at the same time.
    """
    places = (source.url, *(role.url for role in source.columns.roles if role.url))
    if any(shared_store(place).root is None for place in places):
        return max(threads, REMOTE_READS)
    return threads if rules.full_check or rules.recode else 1


def repeated_urls(source: Source, part: Slice) -> Counter[str]:
    """Return the URLs that occur more than once in a slice, with how often each does."""
    tables = cast("UrlSource", source)
    urls = (url for item in part.items for url in islice(tables.urls(item), item.take or None))
    return Counter({url: count for url, count in Counter(urls).items() if count > 1})


def _check_sample(rules: PackRules, removed: Removed, row: SampleOrRefusal) -> CheckedSample:
    """Return a sample with its pictures, or a refusal if one of its images cannot be kept."""
    if isinstance(row, Refusal):
        return row
    try:
        for image in (row.image, *(image.data for image in row.images)):
            if removed and removed.has("sha256", hashlib.sha256(image).hexdigest()):
                raise RejectedError(Code.REMOVED)
        check_nbytes("the image", len(row.image), rules.max_nbytes)
        row = _add_digests(rules, row)
        limits, full, recode = rules.limits, rules.full_check, rules.recode
        target = prepare(row.image, limits=limits, full=full, recode=recode)
        return row, (target, *(_prepare_in_role(rules, image, target) for image in row.images))
    except Exception as error:  # noqa: BLE001 (told apart by as_rejected)
        return _refusal(row, as_rejected(error, Code.CORRUPT))


def _prepare_in_role(rules: PackRules, image: RoleImage, target: Picture) -> Picture:
    limits, full = rules.limits_by_role[role_of(image.name)[0]], rules.full_check
    with naming_role(image.name):
        check_nbytes("the image", len(image.data), rules.max_nbytes)
        if is_mask(image.name):
            return prepare_mask(image.data, target, limits=limits, full=full)
        return prepare(image.data, limits=limits, full=full, recode=rules.recode)


def _check_facts(rules: PackRules, removed: Removed, row: SampleOrRefusal) -> SampleOrRefusal:
    """Return a sample, or a refusal if its source, a URL, caption, facts or roles rule it out."""
    if removed and (removed.has("source", row.source) or removed.has("url", row.url)):
        return Refusal(source=row.source, code=Code.REMOVED)
    if isinstance(row, Refusal):
        return row
    if removed and any(removed.has("url", image.url) for image in row.images):
        return Refusal(source=row.source, code=Code.REMOVED)
    try:
        _check_text(rules, row)
        names = {image.name for image in row.images}
        for role in rules.roles:
            if role.name not in names and not role.is_optional:
                raise RejectedError(Code.NO_ROLE, role.name)
    except Exception as error:  # noqa: BLE001
        return _refusal(row, as_rejected(error, Code.UNREADABLE))
    return row


def _refusal(row: Sample, refused: RejectedError) -> Refusal:
    return Refusal(source=row.source, code=refused.code, detail=refused.detail, url=row.url)


def _check_text(rules: PackRules, sample: Sample) -> None:
    length = len(sample.caption)
    if length < rules.min_caption:
        raise RejectedError(Code.CAPTION_TOO_SHORT, f"{length} characters")
    if 0 < rules.max_caption < length:
        raise RejectedError(Code.CAPTION_TOO_LONG, f"{length} characters")
    if rules.condition is not None:
        rules.condition.check({"caption": sample.caption, **sample.facts})


def _add_digests(rules: PackRules, sample: Sample) -> Sample:
    """Check the digest of a sample's image. Return the sample with the digests to store, if any.

    With --verify-hash, raise RejectedError if the image does not have the digest in the sample's
    facts. Without --compute-hash, return the sample as it is.
    """
    if rules.verify is not None:
        wanted = str(sample.facts.get(rules.verify.column) or "").strip().lower()
        found = hashlib.new(rules.verify.hash, sample.image).hexdigest()
        if found != wanted:
            expected = wanted or f"nothing in column {rules.verify.column}"
            raise RejectedError(Code.HASH_MISMATCH, f"{found}, expected {expected}"[:200])
    if not (name := rules.compute_hash):
        return sample
    digests = {name: hashlib.new(name, sample.image).hexdigest()}
    for image in sample.images:
        digests[f"{image.name}_{name}"] = hashlib.new(name, image.data).hexdigest()
    return replace(sample, digests=digests)


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
        facts["repeats"] = repeats_of(sample.source)
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
    return members, facts, _cut_meta(data, sample.images)


def _cut_meta(data: bytes, images: Sequence[RoleImage]) -> bytes:
    """Return the text of `meta` in a json. No other field is or has an object.

    So the first text of its name is its name, and the last of the next field's is that.
    """
    start = data.index(_META) + len(_META)
    following = min(["original_height", *(n for i in images if (n := f"{i.name}_changes") > META)])
    return data[start : data.rindex(f',"{following}":'.encode(), start)]


def repeats_of(source: str) -> int:
    """Return how often an image is to come in an epoch, by the folders of its path.

    The innermost folder with a name such as `10_name` says it, as kohya's trainers read it; without
    one it is 1.
    """
    folders = reversed(source.split("/")[:-1])
    numbers = (re.match(r"([0-9]{1,6})_", folder) for folder in folders)
    return next((int(number[1]) for number in numbers if number), 1)
