"""Keeps one device busy: samples of several shards go in, in order, and arrays come out.

1. A shard *feeds* its samples one after the other; shards take turns, so that the oldest is
   finished first. Each sample is decoded in a pool of threads.
2. An image is cut once or several times, with one decoding; each cut is mirrored too, if that is
   wanted. Where text is kept apart, one of the cuts is none: no image stops that. The *assembler*
   thread takes the cuts in the order they were fed and fills batches of one fixed size and one
   shape, across shards. Only when no shard has anything left to feed is a batch padded. Captions go
   in batches of their own size, each of captions of one shape. Where there are many shapes, some
   wait for others of theirs, for a while.
3. A *device* thread launches a batch, and only then waits for the one before: on a GPU the next
   batch is always queued when one ends. On a CPU there are several, each of which computes its
   batches alone, on one core: sums split between cores come out differently for each number of
   them, and splitting costs more than it brings.
4. How many samples are inside at once is bounded; a place is free again when the results of one
   were taken (`Pending`). So is how many bytes of images wait to be decoded, and how many samples
   have cuts that wait for a batch.

What a sample becomes depends on the sample and the size of a batch alone, never on its neighbours.
A thread that fails leaves its error behind, and `check` raises it wherever somebody waits.

Where the time of a worker goes, by `tools/bench encode --profile`: with an encoder that costs
nothing, three tenths are decoding JPEGs and a fifth resizing them, in the pool, and a tenth is
importing torch; reading, hashing and writing tars is below a twentieth each. With real models on a
CPU those take all but a twentieth of what follows the imports.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch

from wdsprep.dataset.arrays import FLIPPED, LATENT, is_of_text
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.shapes import Size
from wdsprep.encoding.models.base import Encoder, Part, Tokens
from wdsprep.encoding.models.batch_size import text_size
from wdsprep.encoding.models.device import (
    Arrays,
    Device,
    DeviceBatch,
    ImageBatch,
    Launched,
    Stats,
    TextBatch,
    combined,
)
from wdsprep.images.crop import NO_PIXELS, Crop, Cut, crops
from wdsprep.images.shapes import Fit, Shapes

BATCHES_INSIDE = 4
QUEUED_BATCHES = 2
SPARE_BATCHES = 4  # whose memory the next ones of their shape take
TEXTS_WAITING = 512  # samples that may come while a caption waits for others of its shape
CUTS_WAITING = 4_096  # the same for a cut, where there are many shapes
CUTS_NBYTES = 4 << 30  # of cuts that wait for others of their shape
CAPTION = -1  # in place of the number of a cut
UNDECODED_NBYTES = 1 << 30
MADE_NBYTES = 4 << 30  # of arrays that wait to be written
POLL_S = 0.2
ShapeT = TypeVar("ShapeT", bound=tuple[int, ...])


NO_CROP = Crop(pixels=NO_PIXELS, width=0, height=0, fit=Fit(0, 0, 0, 0))
"""Of a sample whose caption alone is fed."""


class EngineError(Exception):
    """A thread of the engine has failed, or it is closed: it can do nothing more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a sample has become: an array for each field of the models, in storage dtype."""

    crop: Crop
    tokens: Tokens
    arrays: Arrays


Results = list[Result | RejectedError]
"""What has come of a sample: for each way to cut it a result, or why there is none."""


class Pending(Future[Results]):
    """What a sample will become. It takes up a place in the engine until a block with it ends."""

    def __init__(self, places: threading.Semaphore) -> None:
        super().__init__()
        self._places = places

    def __enter__(self) -> "Pending":
        return self

    def __exit__(self, *_: object) -> None:
        self._places.release()


@dataclass(slots=True)
class _Ticket:
    """A sample on its way. It is done when no part of it is `missing`: each of its cuts, and its
    caption where something is made of that."""

    key: str
    caption: str
    parts: Sequence[Part]
    """What of the sample each cut is for; of one that is for its caption alone nothing is cut."""
    decoded: "Future[list[Cut]] | None"
    """None where nothing is cut."""
    result: Pending
    missing: int = 0
    number: int = 0
    """in the order in which they came"""
    cuts: list[Cut] = field(default_factory=list)
    images: list[Arrays] = field(default_factory=list)
    """What was made of each cut."""
    tokens: Tokens = field(default_factory=lambda: Tokens(""))
    text: Arrays = field(default_factory=dict)
    refused: dict[int, Code] = field(default_factory=dict)
    """Why nothing was made of a cut, by its number, or of its caption."""
    waiting: int = 0
    """cuts that are in no batch yet"""

    def results(self) -> Results:
        return list(map(self._result, range(len(self.cuts)), self.cuts, self.images))

    def _result(self, number: int, cut: Cut, made: Arrays) -> Result | RejectedError:
        if isinstance(cut, RejectedError):
            return cut
        has_text = Part.TEXT in self.parts[number]
        code = self.refused.get(number, self.refused.get(CAPTION) if has_text else None)
        if code is not None:
            return RejectedError(code)
        if not has_text:
            return Result(crop=cut, tokens=Tokens(self.caption), arrays=made)
        return Result(crop=cut, tokens=self.tokens, arrays={**made, **self.text})


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample, for a cut of it by its number, or for its caption. Of a cut that is mirrored too,
    the mirrored one comes last."""

    ticket: _Ticket
    cut: int = CAPTION
    is_mirrored: bool = False
    is_last: bool = True

    @property
    def crop(self) -> Crop:
        cut = self.ticket.cuts[self.cut]
        assert isinstance(cut, Crop)  # noqa: S101  for mypy: no other is waiting
        return cut

    @property
    def pixels(self) -> torch.Tensor:
        pixels = self.crop.pixels
        return pixels.flip(-1) if self.is_mirrored else pixels

    @property
    def noise(self) -> str:
        """What the noise of its latents depends on."""
        key = self.ticket.key
        return noise_of_mirrored(key) if self.is_mirrored else key

    def take(self, made: Arrays) -> None:
        if self.is_mirrored:
            made = {FLIPPED: made[LATENT]}
        into = self.ticket.text if self.cut == CAPTION else self.ticket.images[self.cut]
        into.update(made)


def noise_of_mirrored(key: str) -> str:
    """What the noise of the latents of a mirror image depends on."""
    return f"{key}:flipped"


@dataclass(frozen=True, slots=True)
class _Load:
    """A batch, and whose its rows are."""

    rows: Sequence[_Row]
    batch: DeviceBatch


@dataclass(slots=True)
class _Waiting:
    """What the assembler has in hand. Captions come as they are, and are then sorted by shape."""

    come: int = 0
    images: dict[Size, list[_Row]] = field(default_factory=dict)
    captions: list[_Ticket] = field(default_factory=list)
    texts: dict[tuple[int, ...], list[_Row]] = field(default_factory=dict)

    def since(self, ticket: _Ticket) -> int:
        """How many have come after it."""
        return self.come - ticket.number

    def take_out(
        self,
        rows: dict[ShapeT, list[_Row]],
        size_of: Callable[[ShapeT], int],
        *,
        most: int,
        now: bool,
    ) -> tuple[ShapeT, list[_Row]] | None:
        """A batch of one shape: of the one whose first row has seen `most` others come, or of one
        that fills it; if there is none, `now` a part of one."""
        if not rows:
            return None
        oldest = min(rows, key=lambda shape: rows[shape][0].ticket.number)
        has_waited = self.since(rows[oldest][0].ticket) >= most
        whole = (shape for shape, own in rows.items() if len(own) >= size_of(shape))
        shape = oldest if has_waited else next(whole, oldest if now else None)
        if shape is None:
            return None
        size, own = size_of(shape), rows.pop(shape)
        if len(own) > size:
            rows[shape] = own[size:]
        return shape, own[:size]


class Engine:
    def __init__(
        self,
        encoder: Encoder,
        *,
        seed: int,
        batch_size: int,
        max_area: int,
        decoders: int,
        threads: int,
        gpu_share: float = 1.0,
        cuts: Sequence[Shapes] = (),
        parts: Sequence[Part] = (),
    ) -> None:
        """`batch_size` 0 is chosen; `threads` is how many batches a CPU computes at once. `cuts`
        are the shapes of each cut of an image, by default the one square of the encoder's
        resolution; `parts` are what of a sample each is for, by default all that the encoder makes
        something of."""
        self._encoder, self._seed = encoder, seed
        self._cuts = tuple(cuts) or (Shapes.square(encoder.resolution),)
        self._parts = tuple(parts) or (Part.BOTH,) * len(self._cuts)
        self._max_area = max_area
        self._part = Part.BOTH if encoder.has_text else Part.IMAGE
        if is_of_text(encoder.fields):
            self._part = Part.TEXT
        self._flips = any(field.name == FLIPPED for field in encoder.fields)
        both = zip(self._cuts, self._parts, strict=True)
        shapes = [shapes for shapes, part in both if Part.IMAGE in part]
        self._shape_count = len({size for each in shapes for size in each.sizes})
        self._undecoded = 0  # bytes of images that wait for the pool or are in it
        self._decoded = threading.Condition()
        encoder.bring(Part.IMAGE)  # whose batches are sized by what is free
        lanes = threads if encoder.device.type == "cpu" else 1
        self._devices = [Device(encoder, batch_size, gpu_share) for _ in range(lanes)]
        self._finishing = threading.Lock()
        self._unfinished = 0  # samples that were fed
        usual = self._usually_inside(lanes) + decoders
        self._places = threading.Semaphore(usual + self._most_waiting)
        self._rooms = threading.Semaphore(usual + self._most_rows)
        self._turn = threading.Lock()
        self._feeders = 0
        self._feeders_lock = threading.Lock()
        self._fed: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._loads: queue.Queue[_Load] = queue.Queue(QUEUED_BATCHES)
        self._spare: deque[torch.Tensor] = deque(maxlen=SPARE_BATCHES)
        self._failure: BaseException | None = None
        self._pool = ThreadPoolExecutor(decoders, "decode", torch.set_num_threads, (1,))
        self._pool.submit(self._warm_up).result()
        self._running = [
            threading.Thread(target=self._guard, args=(step,), name=name, daemon=True)
            for name, step in [
                ("assembler", self._assembler()),
                *((f"device {n}", self._driver(device)) for n, device in enumerate(self._devices)),
            ]
        ]
        for thread in self._running:
            thread.start()

    def _usually_inside(self, lanes: int) -> int:
        """Samples, so that the devices never wait; fewer where what becomes of one is large, but
        enough for batches to fill up."""
        size = max(self._size, self._text_size)
        usual, least = (BATCHES_INSIDE + lanes) * size, (1 + lanes) * size
        return max(least, min(usual, MADE_NBYTES // self._made_nbytes))

    @property
    def _made_nbytes(self) -> int:
        return max(1, sum(field.array_nbytes for field in self._encoder.fields))

    @property
    def _most_waiting(self) -> int:
        """Samples that may come while a part of one waits for others of its shape."""
        return max(TEXTS_WAITING if self._encoder.groups_texts else 0, self._cuts_waiting)

    @property
    def _cuts_waiting(self) -> int:
        return min(CUTS_WAITING, MADE_NBYTES // self._made_nbytes) if self._shape_count > 1 else 0

    @property
    def _most_rows(self) -> int:
        """Cuts that may wait for others of their shape: for a batch of each, if that is no more
        than so many bytes."""
        each = 3 * self._encoder.resolution**2
        return max(self._size, min(self._shape_count * self._size, CUTS_NBYTES // each))

    @property
    def stats(self) -> Stats:
        return combined([device.stats for device in self._devices])

    @property
    def _size(self) -> int:
        return min(device.size for device in self._devices)

    def _size_of(self, shape: Size) -> int:
        return min(device.size_of(shape) for device in self._devices)

    @property
    def _text_size(self) -> int:
        return min(device.text_size for device in self._devices)

    @contextlib.contextmanager
    def feeding(self) -> Iterator[None]:
        """Around all that one shard feeds, from before its tar is opened."""
        with self._feeders_lock:
            self._feeders += 1
        try:
            yield
        finally:
            with self._feeders_lock:
                self._feeders -= 1
            self._fed.put(None)  # perhaps nobody is left to fill the last batch

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One shard feeds at a time; those that wait have their first samples ready."""
        self._until(partial(self._turn.acquire, timeout=POLL_S))
        try:
            yield
        finally:
            self._turn.release()

    def put(
        self,
        key: str,
        image: bytes,
        caption: str,
        part: Part = Part.BOTH,
        cuts: Sequence[int] | None = None,
    ) -> Pending:
        """Feed one sample, or a part of it, when there is a place for it; it is cut in all ways, or
        in those of these numbers. Whoever waits for the result calls `check` from time to time: it
        may never come."""
        numbers = range(len(self._cuts)) if cuts is None else cuts
        parts = [part & self._part & self._parts[number] for number in numbers]
        self._until(partial(self._places.acquire, timeout=POLL_S))
        decoded = None
        if any(Part.IMAGE in part for part in parts):
            both = zip(numbers, parts, strict=True)
            shapes = [self._cuts[n] if Part.IMAGE in part else None for n, part in both]
            self._until(partial(self._rooms.acquire, timeout=POLL_S))
            self._until(partial(self._take_room, len(image)))
            decoded = self._pool.submit(self._decode, image, shapes)
        ticket = _Ticket(key, caption, parts, decoded, Pending(self._places))
        with self._finishing:
            self._unfinished += 1
        self._fed.put(ticket)
        return ticket.result

    def empty(self) -> dict[str, torch.Tensor]:
        """What stands for no caption, computed on one core as all else is."""
        self._encoder.bring(Part.TEXT)
        return self._pool.submit(self._encoder.empty).result()

    def _warm_up(self) -> None:
        """On one core too, before anything waits for it. A broken device shows here already."""
        if self._encoder.is_split:
            return
        side = self._encoder.resolution
        nothing: list[DeviceBatch] = []
        if Part.IMAGE in self._part:
            nothing.append(self._images([], (side, side), self._size).batch)
        if Part.TEXT in self._part:
            nothing.append(TextBatch.of(self._encoder.tokens([""]), self._text_size))
        for device in self._devices:
            for batch in nothing:
                device.warm_up(batch)

    @property
    def is_idle(self) -> bool:
        """Whether nothing that was fed is still to be computed, be it wanted or not."""
        return not self._unfinished

    def check(self) -> None:
        if self._failure is not None:
            why = f"{type(self._failure).__name__}: {self._failure}"
            raise EngineError(why) from self._failure

    def close(self) -> None:
        """End the threads, whatever they have in hand."""
        self._failure = self._failure or EngineError("the engine is closed")
        self._pool.shutdown(wait=True, cancel_futures=True)
        for thread in self._running:
            thread.join()

    def _take_room(self, nbytes: int) -> bool:
        """Whether so many bytes may wait beside the others; one image may always."""
        with self._decoded:
            if self._undecoded and self._undecoded + nbytes > UNDECODED_NBYTES:
                self._decoded.wait(POLL_S)
            fits = not self._undecoded or self._undecoded + nbytes <= UNDECODED_NBYTES
            self._undecoded += nbytes if fits else 0
            return fits

    def _decode(self, image: bytes, several: "Sequence[Shapes | None]") -> list[Cut]:
        """Where there are no shapes, nothing is cut."""
        try:
            wanted = [shapes for shapes in several if shapes is not None]
            made = iter(crops(image, wanted, max_area=self._max_area))
            return [NO_CROP if shapes is None else next(made) for shapes in several]
        finally:
            with self._decoded:
                self._undecoded -= len(image)
                self._decoded.notify_all()

    def _until(self, attempt: Callable[[], bool]) -> None:
        while not attempt():
            self.check()

    def _guard(self, steps: Iterator[None]) -> None:
        try:
            for _ in steps:
                if self._failure is not None:
                    return
        except BaseException as error:  # noqa: BLE001  raised again where a result is awaited
            self._failure = self._failure or error

    def _assembler(self) -> Iterator[None]:
        waiting = _Waiting()
        while True:
            yield
            with contextlib.suppress(queue.Empty):
                self._collect(self._fed.get(timeout=POLL_S), waiting)
            nobody_feeds = self._feeders == 0 and self._fed.empty()
            for load in self._loaded(waiting, all_of_it=nobody_feeds):
                yield from self._hand_over(load)

    def _collect(self, ticket: _Ticket | None, waiting: _Waiting) -> None:
        if ticket is None:
            return
        waiting.come += 1  # those that are refused have a place too, until it is their turn
        try:
            decoded = ticket.decoded
            ticket.cuts = decoded.result() if decoded else [NO_CROP] * len(ticket.parts)
        except CancelledError:
            return  # the engine is being closed
        ticket.number, ticket.tokens = waiting.come, Tokens(ticket.caption)
        ticket.images = [{} for _ in ticket.cuts]
        good = {n: cut.fit for n, cut in enumerate(ticket.cuts) if isinstance(cut, Crop)}
        images = {n: fit for n, fit in good.items() if Part.IMAGE in ticket.parts[n]}
        has_text = any(Part.TEXT in ticket.parts[n] for n in good)
        ticket.waiting = len(images) * (1 + self._flips)
        ticket.missing = ticket.waiting + has_text
        if not images and any(Part.IMAGE in part for part in ticket.parts):
            self._rooms.release()
        if not ticket.missing:
            self._finish(ticket)
            return
        for number, fit in images.items():
            rows = waiting.images.setdefault((fit.width, fit.height), [])
            rows.append(_Row(ticket, number, is_last=not self._flips))
            if self._flips:
                rows.append(_Row(ticket, number, is_mirrored=True))
        if has_text:
            waiting.captions.append(ticket)

    def _loaded(self, waiting: _Waiting, *, all_of_it: bool) -> Iterator[_Load]:
        """Whole batches of what waits, or all of it. A part of one where so many have come after
        its first, refused ones, that the places in the engine would run out."""
        while (load := self._next_texts(waiting, all_of_it=all_of_it)) is not None:
            yield load
        while (load := self._next_images(waiting, all_of_it=all_of_it)) is not None:
            yield load

    def _next_images(self, waiting: _Waiting, *, all_of_it: bool) -> _Load | None:
        size = self._size  # a device may halve it at any time
        sizes = {shape: self._size_of(shape) for shape in waiting.images}
        is_full = sum(map(len, waiting.images.values())) > self._most_rows
        found = waiting.take_out(
            waiting.images,
            sizes.__getitem__,
            most=2 * size - 1 + self._cuts_waiting,
            now=all_of_it or is_full,
        )
        if found is None:
            return None
        shape, rows = found
        return self._images(rows, shape, sizes[shape])

    def _next_texts(self, waiting: _Waiting, *, all_of_it: bool) -> _Load | None:
        """Of captions of one shape."""
        usual = self._text_size
        if waiting.captions and (all_of_it or waiting.since(waiting.captions[0]) >= usual - 1):
            self._sort(waiting)
        found = waiting.take_out(
            waiting.texts,
            lambda shape: text_size(shape, usual),
            most=TEXTS_WAITING - usual if self._encoder.groups_texts else 2 * usual - 1,
            now=all_of_it,
        )
        if found is None:
            return None
        shape, rows = found
        texts = [row.ticket.tokens for row in rows]
        return _Load(rows, TextBatch.of(texts, text_size(shape, usual)))

    def _sort(self, waiting: _Waiting) -> None:
        tokens = self._encoder.tokens([ticket.caption for ticket in waiting.captions])
        for ticket, found in zip(waiting.captions, tokens, strict=True):
            ticket.tokens = found
            row = _Row(ticket)
            if found.count:
                waiting.texts.setdefault(found.shape, []).append(row)
            else:
                self._take(row, Code.NO_TOKENS)
        waiting.captions.clear()

    def _images(self, chosen: Sequence[_Row], shape: Size, size: int) -> _Load:
        width, height = shape
        pixels = self._room((size, 3, height, width))
        for number, row in enumerate(chosen):
            pixels[number].copy_(row.pixels)
            self._let_go(row)
        pixels[len(chosen) :].zero_()
        keys = [row.noise for row in chosen]
        return _Load(chosen, ImageBatch.of(pixels, keys, seed=self._seed))

    def _room(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory that a GPU can fetch by itself; that of a batch which is done, where there is one
        like it. To get new pages from the system may take longer than to fill them."""
        for _ in range(len(self._spare)):
            pixels = self._spare.popleft()
            if pixels.shape == shape:
                return pixels
            self._spare.append(pixels)
        pin = self._encoder.device.type == "cuda"
        return torch.empty(shape, dtype=torch.uint8, pin_memory=pin)

    def _let_go(self, row: _Row) -> None:
        """Of pixels that are in a batch."""
        ticket = row.ticket
        if row.is_last:
            ticket.cuts[row.cut] = replace(row.crop, pixels=NO_PIXELS)
        ticket.waiting -= 1
        if not ticket.waiting:
            self._rooms.release()

    def _hand_over(self, load: _Load) -> Iterator[None]:
        while True:
            try:
                return self._loads.put(load, timeout=POLL_S)
            except queue.Full:
                yield

    def _driver(self, device: Device) -> Iterator[None]:
        torch.set_num_threads(1)
        before: tuple[_Load, list[Launched]] | None = None
        while True:
            yield
            load = self._next(wait=before is None)
            after = (load, device.launch(load.batch)) if load else None
            if before is not None:
                self._give_out(before[0], device.finish(before[1]))
            before = after

    def _next(self, *, wait: bool) -> _Load | None:
        try:
            return self._loads.get(timeout=POLL_S) if wait else self._loads.get_nowait()
        except queue.Empty:
            return None

    def _give_out(self, load: _Load, rows: list[Arrays | None]) -> None:
        """A sample is there when the last of its parts is. The device is done with the batch."""
        if isinstance(load.batch, ImageBatch):
            self._spare.append(load.batch.pixels)
        for row, arrays in zip(load.rows, rows, strict=True):
            self._take(row, Code.NOT_FINITE if arrays is None else arrays)

    def _take(self, row: _Row, found: "Arrays | Code") -> None:
        """One part of a sample, or why it cannot be had."""
        ticket = row.ticket
        with self._finishing:
            if isinstance(found, Code):
                ticket.refused[row.cut] = found
            else:
                row.take(found)
            ticket.missing -= 1
            is_there = not ticket.missing
        if is_there:
            self._finish(ticket)

    def _finish(self, ticket: _Ticket) -> None:
        with self._finishing:
            self._unfinished -= 1
        ticket.result.set_result(ticket.results())
