"""The work of `pack`: one slice of a source becomes image shards, rejects, and last a receipt."""

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from wdsprep.buckets import bucket_of
from wdsprep.dataset import find_receipt, write_receipt
from wdsprep.filters import Filter
from wdsprep.images import Limits, Picture, Recode, prepare
from wdsprep.manifest import Receipt, Settings, Shard
from wdsprep.run import Progress, share_of
from wdsprep.samples import Code, Reject, RejectedError, Sample, facts_bytes
from wdsprep.sources import Item, Refusal, Slice, Source
from wdsprep.store import Sink, Store, open_store, write_bytes
from wdsprep.tar.write import TarWriter

PROGRESS_S = 0.25
REMOTE_READS = 16  # at a time and worker, where each one waits for a network


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What decides which samples are kept and what their shards look like."""

    buckets: tuple[int, ...] = (256, 512)
    samples_per_shard: int = 10_000
    max_shard_nbytes: int = 2_000_000_000
    full_check: bool = True
    min_size: int = 0
    max_area: int = 100_000_000
    max_aspect_ratio: float = 0.0
    min_caption: int = 0
    max_caption: int = 0
    filter: Filter | None = None
    recode: Recode | None = None

    @property
    def limits(self) -> Limits:
        return Limits(
            min_side=max(self.buckets[0], self.min_size),
            max_area=self.max_area,
            max_aspect_ratio=self.max_aspect_ratio,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Packer:
    """The picklable recipe of a worker, as runners want it."""

    source: Source
    images: str
    rules: Rules
    settings: Settings
    generation: int = 0
    threads: int = 1

    def open(self) -> Callable[[Slice], Generator[Progress, None, Receipt]]:
        return partial(pack_slice, self, open_store(self.images))


def pack_slice(packer: Packer, store: Store, part: Slice) -> Generator[Progress, None, Receipt]:
    """Write all of a slice, its receipt last."""
    if done := find_receipt(store, part.name, part.digest, packer.settings):
        return done
    with ExitStack() as stack:
        shards = _Shards(store, part.name, packer.rules, stack)
        rejects = _Rejects(stack.enter_context(store.write(f"rejects/{part.name}.jsonl")))
        told = time.monotonic()
        for number, judged in enumerate(_judged(packer, part)):
            key = f"{part.name}{number:06d}"
            if isinstance(judged, Refusal):
                rejects.add(judged.to_reject(key))
            else:
                shards.add(key, *judged)
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                yield _progress(part, shards, rejects)
        written = shards.finish()
    return _commit(packer, store, part, written, rejects.counts)


def _progress(part: Slice, shards: "_Shards", rejects: "_Rejects") -> Progress:
    inputs = shards.samples + rejects.counts.total()
    return Progress(
        samples=shards.samples,
        nbytes=shards.nbytes,
        share=share_of(inputs, part.samples),
        rejects=dict(rejects.counts),
    )


def _commit(
    packer: Packer, store: Store, part: Slice, written: tuple[Shard, ...], rejects: Counter[str]
) -> Receipt:
    """Write what the slice was made from, and last the receipt."""
    inputs = part.inputs
    write_bytes(store, f"inputs/{part.name}.jsonl", inputs)
    receipt = Receipt(
        dataset="images",
        unit=part.name,
        generation=packer.generation,
        settings=packer.settings,
        input=hashlib.sha256(inputs).hexdigest(),
        inputs=sum(shard.samples for shard in written) + rejects.total(),
        shards=written,
        rejects=dict(rejects),
    )
    write_receipt(store, receipt)
    return receipt


class _Rejects:
    """Writes rejects as they come, and counts them: a slice may have any number."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.counts: Counter[str] = Counter()

    def add(self, reject: Reject) -> None:
        self._sink.write(reject.to_json().encode("utf-8", "replace"))
        self.counts[reject.code.value] += 1


Judged = Refusal | tuple[Sample, Picture]
In = TypeVar("In")
Out = TypeVar("Out")


def _judged(packer: Packer, part: Slice) -> Iterator[Judged]:
    """What becomes of each input of a slice, in order."""
    source, rules = packer.source, packer.rules
    if source.kind == "folder":  # one sample an item: reading goes into the threads with it
        threads = max(packer.threads, REMOTE_READS if "://" in source.url else 1)

        def read_and_judge(item: Item) -> list[Judged]:
            return [_judge(rules, row) for row in source.read(item)]

        return chain.from_iterable(_in_threads(read_and_judge, part.items, threads))
    rows = (row for item in part.items for row in islice(source.read(item), item.take or None))
    return _in_threads(partial(_judge, rules), rows, packer.threads)


def _in_threads(act: Callable[[In], Out], inputs: Iterable[In], threads: int) -> Iterator[Out]:
    """Like map, with a few inputs ahead in threads: what they wait for holds nobody else up."""
    if threads == 1:
        yield from map(act, inputs)
        return
    ahead: deque[Future[Out]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for one in inputs:
            ahead.append(pool.submit(act, one))
            if len(ahead) > threads + 4:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _judge(rules: Rules, row: Sample | Refusal) -> Judged:
    if isinstance(row, Refusal):
        return row
    try:
        _check_text(rules, row)
        limits, full, recode = rules.limits, rules.full_check, rules.recode
        return row, prepare(row.image, limits=limits, full=full, recode=recode)
    except RejectedError as refused:
        return Refusal(source=row.source, code=refused.code, detail=refused.detail)


def _check_text(rules: Rules, sample: Sample) -> None:
    length = len(sample.caption)
    if length < rules.min_caption:
        raise RejectedError(Code.CAPTION_TOO_SHORT, f"{length} characters")
    if 0 < rules.max_caption < length:
        raise RejectedError(Code.CAPTION_TOO_LONG, f"{length} characters")
    if rules.filter is not None and not rules.filter({"caption": sample.caption, **sample.facts}):
        facts = {"caption": sample.caption, **sample.facts}
        values = (f"{name} is {facts.get(name, 'missing')}" for name in sorted(rules.filter.names))
        raise RejectedError(Code.FILTERED, ", ".join(values))


@dataclass(slots=True)
class _Open:
    """A shard being written. Its stack closes the tar's thread first, then the file."""

    name: str
    stack: ExitStack
    writer: TarWriter


@dataclass(slots=True)
class _Shards:
    """The open shard of each bucket, and the finished ones."""

    store: Store
    unit: str
    rules: Rules
    stack: ExitStack
    samples: int = 0
    nbytes: int = 0
    _open: dict[int, _Open] = field(default_factory=dict)
    _rolled: Counter[int] = field(default_factory=Counter)
    _done: list[Shard] = field(default_factory=list)

    def add(self, key: str, sample: Sample, picture: Picture) -> None:
        bucket = bucket_of(picture.width, picture.height, self.rules.buckets)
        fields = _fields(key, sample, picture, bucket)
        nbytes = sum(len(data) for _, data in fields)
        current = self._open.get(bucket)
        if current is not None and self._is_full(current.writer, nbytes):
            self._close(bucket)
            current = None
        if current is None:
            current = self._begin(bucket)
        current.writer.add(key, fields)
        self.samples += 1
        self.nbytes += nbytes

    def finish(self) -> tuple[Shard, ...]:
        for bucket in sorted(self._open):
            self._close(bucket)
        return tuple(sorted(self._done, key=lambda shard: (shard.bucket, shard.name)))

    def _is_full(self, writer: TarWriter, nbytes: int) -> bool:
        too_many = writer.samples >= self.rules.samples_per_shard
        return too_many or writer.nbytes + nbytes > self.rules.max_shard_nbytes

    def _begin(self, bucket: int) -> _Open:
        roll = self._rolled[bucket]
        name = f"{bucket}/{self.unit}{f'_{roll:02d}' if roll else ''}.tar"
        self._rolled[bucket] += 1
        stack = self.stack.enter_context(ExitStack())
        sink: Sink = stack.enter_context(self.store.write(name))
        self._open[bucket] = _Open(name, stack, stack.enter_context(TarWriter(sink)))
        return self._open[bucket]

    def _close(self, bucket: int) -> None:
        shard = self._open.pop(bucket)
        written = shard.writer.finish()
        shard.stack.close()
        write_bytes(self.store, f"{shard.name}.idx", written.index)
        self._done.append(
            Shard(
                name=shard.name,
                samples=written.samples,
                nbytes=written.nbytes,
                sha256=written.sha256,
            )
        )


def _fields(key: str, sample: Sample, picture: Picture, bucket: int) -> list[tuple[str, bytes]]:
    """The members of an image sample, in their order."""
    facts: dict[str, Any] = {
        "bucket": bucket,
        "caption": sample.caption,
        "changes": picture.changes,
        "height": picture.height,
        "key": key,
        "meta": sample.facts,
        "source": sample.source,
        "source_height": picture.source_height,
        "source_width": picture.source_width,
        "width": picture.width,
    }
    if len(sample.captions) > 1:
        facts["captions"] = sample.captions
    return [
        (picture.extension, picture.data),
        ("json", facts_bytes(facts)),
        ("txt", sample.caption.encode("utf-8", "replace")),
    ]
