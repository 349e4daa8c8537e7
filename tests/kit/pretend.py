"""A run of any size with nobody at work: crews, stores and servers that only pretend.

Used by runners/test_driver_scale.py and by tools/bench driver."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.kit.webserver import Connection, Request, WebServer, response
from wdsprep.dataset.file_names import EDITION, MANIFEST, REMOVED
from wdsprep.dataset.manifest import Manifest, Receipt, Receipts, Shard, line_of
from wdsprep.dataset.npy_arrays import Field, layout
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.errors import NotFoundError
from wdsprep.runners.base import Event, Message, RunnerSettings, SlotMessage
from wdsprep.runners.schedule import drive
from wdsprep.sources.base import Item
from wdsprep.store.base import HELD, Entry
from wdsprep.store.remote import OverNetwork

FIELDS = (
    Field(name="latent.npy", dtype="<f2", shape=(4, 32, 32)),
    Field(name="emb.npy", dtype="<f2", shape=(77, 1024)),
)
SETTINGS = {
    "crop": "centre",
    "dtype": "fp16",
    "layout": layout(FIELDS),
    "resolution": 256,
    "weights": "w" * 64,
}
PAGE, AT_ONCE = 1_000, 100


def digest(of: object) -> str:
    return hashlib.sha256(str(of).encode()).hexdigest()


EMPTY = digest("empty")


def shard_of(number: int) -> Shard:
    """Of an image dataset; sizes go up and down."""
    samples = 9_000 + number * 7919 % 1_000
    name = f"256/{number:06d}.tar"
    return Shard(name=name, samples=samples, nbytes=samples * 50_000, digest=digest(number))


def unit_of(shard: Shard) -> ImageShard:
    item = Item(name=shard.name, parts=((shard.name, shard.nbytes, ""),), samples=shard.samples)
    return ImageShard(name=shard.name.removesuffix(".tar"), item=item, digest=shard.digest)


def units(count: int) -> tuple[ImageShard, ...]:
    return tuple(unit_of(shard_of(number)) for number in range(count))


def receipt_of(unit: ImageShard) -> Receipt:
    """What a worker of `encode` would say."""
    samples = unit.item.samples
    made = Shard(name=f"{unit.name}.tar", samples=samples, nbytes=samples * 166_000, digest=EMPTY)
    return Receipt(
        dataset="latents",
        unit=unit.name,
        generation=0,
        settings=SETTINGS,
        input=unit.digest,
        inputs=samples,
        shards=(made,),
        rejects={},
        counts={"cut": samples % 100},
        files={f"rejects/{unit.name}.jsonl": digest(unit.name), "empty.emb.npy": EMPTY},
    )


def manifest_of(count: int) -> Manifest:
    made = map(receipt_of, map(unit_of, map(shard_of, range(count))))
    lines = [*map(line_of, made)]
    receipts = Receipts(dataset="latents", settings=SETTINGS, lines=lines)
    return Manifest(dataset="latents", settings=SETTINGS, receipts=receipts)


def say_done(_slot: int, _unit: Any) -> Message:
    return "done", None


class Pretenders:
    """A crew whose workers are ready at once, and say of each unit what `how` says, some at once.

    Workers that end are forgotten with what they hold.
    """

    def __init__(self, how: Callable[[int, Any], Message] = say_done) -> None:
        self._how = how
        self._ready: deque[int] = deque()
        self._given: deque[tuple[int, int, Any]] = deque()
        self.started: list[int] = []
        self.calls = 0
        self.is_stopped = False

    def start(self, slot: int) -> None:
        self.started.append(slot)
        self._ready.append(slot)
        self.calls += 1

    def give(self, slot: int, order: int, unit: Any) -> None:
        self._given.append((slot, order, unit))
        self.calls += 1

    def end(self, slot: int, *, is_stuck: bool = False) -> str:
        assert not is_stuck
        self._given = deque(given for given in self._given if given[0] != slot)
        return ""

    def hear(self) -> Iterable[SlotMessage]:
        self.calls += 1
        while self._ready:
            yield self._ready.popleft(), 0, ("ready", 0)
        for _ in range(min(AT_ONCE, len(self._given))):
            slot, order, unit = self._given.popleft()
            yield slot, order, self._how(slot, unit)

    def stop(self) -> None:
        self.is_stopped = True


@dataclass(frozen=True)
class PretendRunner:
    workers: int

    def run(self, _work: Any, units: Iterable[Any]) -> Generator[Event, None, None]:
        """Receipts come as they would from another process: each with settings of its own."""
        crew = Pretenders(lambda _, unit: ("done", pickle.loads(pickle.dumps(receipt_of(unit)))))
        settings = RunnerSettings(units_per_worker=3)
        yield from drive(crew, units, settings, workers=self.workers)


@dataclass
class Shelf(OverNetwork):
    """A store that has receipts of the first `count` units, and keeps what is written only as its
    length."""

    count: int = 0
    url: str = "pretend"
    written: dict[str, int] = field(default_factory=dict)
    units_written: list[int] = field(default_factory=list)
    listed: int = 0

    def read(self, name: str, /) -> bytes:
        raise NotFoundError(f"{name} is not kept")

    def list(self, prefix: str = "", /) -> Iterator[Entry]:
        if prefix == "receipts/":
            for number in range(self.count):
                self.listed += 1
                yield Entry(name=f"receipts/256/{number:06d}.json", nbytes=700, stamp="")

    @contextlib.contextmanager
    def write(self, name: str, /, *, exclusive: bool = False) -> Iterator[_Counter]:
        del exclusive
        sink = _Counter()
        yield sink
        self.written[name] = sink.nbytes
        self.units_written.append(sink.units)

    def sweep(self, _ours: object = None) -> int:
        return 0

    def hold(
        self, _name: str, /, *, giving: object = ()
    ) -> contextlib.AbstractContextManager[None]:
        del giving
        return contextlib.nullcontext()


class _Counter:
    nbytes = units = 0

    def write(self, data: bytes, /) -> None:
        self.nbytes += len(data)
        self.units += data.count(b',"unit":')


class PretendS3:
    """Enough of S3 to resume from: a listing of `count` receipts in pages, each after `pause_s`,
    and a manifest."""

    def __init__(self, count: int, manifest: bytes, pause_s: float = 0.0) -> None:
        self.server = WebServer(self.serve)
        self.count, self.manifest, self.pause_s = count, manifest, pause_s
        self.pages = self.reads = 0
        self.marks: dict[str, bytes] = {}

    def serve(self, connection: Connection, request: Request) -> bool:
        path = urlsplit(request.path).path.removeprefix("/bucket/")
        if request.method == "PUT":
            self.marks[path] = request.body
            connection.send(response(200, ETag='"mark"'))
        elif request.method == "DELETE":
            del self.marks[path]
            connection.send(response(204))
        else:
            connection.send(self._read(path, urlsplit(request.path).query))
        return True

    def _read(self, path: str, query: str) -> bytes:
        asked = parse_qs(query, keep_blank_values=True)
        if "uploads" in asked:
            return response(200, _listing([]).encode())
        if "list-type" in asked:
            prefix = asked["prefix"][0]
            for ending, there in ((HELD, [*self.marks]), (MANIFEST, [prefix]), (REMOVED, [])):
                if prefix.endswith(ending):
                    return response(200, _listing(there).encode())
            self.pages += 1
            time.sleep(self.pause_s)
            return response(200, _page(self.count, asked).encode())
        if path.endswith(MANIFEST):
            return response(200, self.manifest)
        self.reads += not path.endswith(EDITION)
        return response(404)


def _number_after(name: str) -> int:
    """That of the first receipt behind a name, or behind the beginning of one."""
    return int(name) + 1 if len(name) == 6 else int(name.ljust(6, "0"))


def _listing(keys: Iterable[str], *, day: int = 2, following: int = 0) -> str:
    """A page of a listing, of files of this day; the number of what follows on the next."""
    token = f"<NextContinuationToken>{following}</NextContinuationToken>" if following else ""
    date = f"<LastModified>2026-01-0{day}T00:00:00.000Z</LastModified>"
    facts = f'{date}<ETag>"mark"</ETag><Size>700</Size><StorageClass>STANDARD</StorageClass>'
    entries = "".join(f"<Contents><Key>{key}</Key>{facts}</Contents>" for key in keys)
    is_cut = f"<IsTruncated>{str(following > 0).lower()}</IsTruncated>"
    return f"<ListBucketResult>{is_cut}{token}{entries}</ListBucketResult>"


def _page(count: int, query: dict[str, list[str]]) -> str:
    prefix = query["prefix"][0]
    start = int(query.get("continuation-token", ["0"])[0])
    if start == 0 and (after := query.get("start-after")):
        start = _number_after(after[0].rpartition("/")[2].removesuffix(".json"))
    end = min(start + PAGE, count)
    keys = (f"{prefix}256/{number:06d}.json" for number in range(start, end))
    return _listing(keys, day=1, following=end if end < count else 0)
