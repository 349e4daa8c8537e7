"""Encode a shard in two passes if a device cannot hold the networks for images and text together.

First all its captions are encoded, and wait on a local disk (in TMPDIR); then its images, each of
which meets its caption again on the way into the shard. `Turns` says when a shard may begin a pass.

Loading a large text encoder may take as long as a shard of captions. So shards share a turn: those
that want the pass for which the device is ready begin together, and the pass changes when no shard
is in it. Each network is loaded once for the `most` shards that a worker has, if the disk has room
for all their captions, which wait there for their images. If shards wait for the other pass, no
more than `most` begin this one before it changes, so that each gets its turn.
"""

import pickle
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.encoding.models.base import Part
from wdsprep.encoding.models.device import Encoder
from wdsprep.encoding.sample_chain import EncodedSample
from wdsprep.store.spool import Spool, spool_folder

if TYPE_CHECKING:
    from wdsprep.encoding.engine import Engine


class TextPass:
    """The encoded captions of a shard, which wait on disk for their images."""

    def __init__(self) -> None:
        self._spool = Spool()
        self.nbytes = 0
        """The bytes of the captions: first an upper estimate, then those on disk, 0 at the end."""
        self._places: dict[str, tuple[int, int]] = {}
        self._codes: dict[str, Code] = {}
        """The reasons for which captions were rejected, by key."""
        self.counts = Counter[str]()

    def refuse(self, reject: Reject) -> None:
        """Note a caption that has no tokens, or whose arrays are not finite.

        Samples with other rejects are rejected again in the pass over images.
        """
        if reject.code in (Code.NO_TOKENS, Code.NOT_FINITE):
            self._codes[reject.key] = reject.code

    def add(self, text: EncodedSample) -> None:
        own = {name: array.clone() for name, array in text.arrays.items()}  # not its whole batch
        data = pickle.dumps((replace(text.tokens, images=None), own), protocol=5)
        self._places[text.key] = self._spool.put(data)

    def join(self, image: EncodedSample) -> EncodedSample:
        """Return an encoded image together with its encoded caption.

        Raise RejectedError if the caption was rejected.
        """
        if code := self._codes.get(image.key):
            raise RejectedError(code)
        place = self._places[image.key]
        tokens, arrays = pickle.loads(self._spool.get(place))  # noqa: S301  ours
        return replace(image, tokens=tokens, arrays={**image.arrays, **arrays})

    def settle(self) -> None:
        """Set `nbytes` to the bytes on disk, once all captions have been added."""
        self.nbytes = self._spool.nbytes

    def close(self) -> None:
        self.nbytes = 0
        self._spool.close()


TEXTS_NBYTES = 32 << 30
"""The most bytes of captions that wait for their images."""
DISK_SHARE = 8
"""Captions may take one part in this number of the free disk: a machine may have as many GPUs."""
POLL_S = 0.05


class Turns:
    """The turns of shards in the passes over captions and over images, on one device.

    The encoder brings the network of a pass to the device, and up to `at_once` shards are in the
    pass together. While shards wait for the other pass, no more than `most` shards begin the
    present one. A shard is known by its `TextPass`.
    """

    def __init__(self, encoder: Encoder, engine: "Engine", *, at_once: int, most: int) -> None:
        self._bring, self._engine = encoder.bring, engine
        self._at_once, self._most = at_once, most
        self._changed = threading.Condition()
        self._part: Part | None = None
        self._begun = 0
        """The number of shards that have begun this turn."""
        self._waiting: dict[TextPass, Part] = {}
        """The pass for which each shard waits."""
        self._inside: set[TextPass] = set()
        self._texts: set[TextPass] = set()
        """The shards whose captions may be on disk."""

    @contextmanager
    def visit(self, part: Part, texts: TextPass) -> Iterator[None]:
        """Queue a shard for the pass over captions or images, which it leaves with the context.

        `enter` waits for its turn.
        """
        with self._changed:
            self._waiting[texts] = part
        try:
            yield
        finally:
            with self._changed:
                self._waiting.pop(texts, None)
                self._inside.discard(texts)
                self._changed.notify_all()

    def enter(self, texts: TextPass, timeout_s: float) -> bool:
        """Wait for the turn of a shard, and return whether it has come within the time.

        If no shard is in the pass and none that waits may begin it, the next turn begins here, once
        the engine is idle. For a turn of the other pass, the network of that pass is loaded.
        """
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if not self._inside and not any(map(self._may_begin, self._waiting)):
                    self._change_pass()
                if self._may_begin(texts):
                    break
                if (left_s := end_s - time.monotonic()) <= 0:
                    return False
                self._changed.wait(min(left_s, POLL_S))
            if self._waiting.pop(texts) is Part.TEXT:
                self._texts.add(texts)
            self._inside.add(texts)
            self._begun += 1
            return True

    def _may_begin(self, texts: TextPass) -> bool:
        if self._waiting[texts] is not self._part or len(self._inside) >= self._at_once:
            return False
        others_wait = any(part is not self._part for part in self._waiting.values())
        return (self._begun < self._most or not others_wait) and self._has_room(texts)

    def _has_room(self, texts: TextPass) -> bool:
        """Return whether the disk has room for a shard's captions beside those that wait there.

        It always has for a single shard.
        """
        self._texts = {other for other in self._texts if other.nbytes}
        if self._waiting[texts] is not Part.TEXT or not texts.nbytes or not self._texts:
            return True
        nbytes = texts.nbytes + sum(other.nbytes for other in self._texts)
        free = shutil.disk_usage(spool_folder()).free
        return nbytes <= min(TEXTS_NBYTES, free // DISK_SHARE)

    def _change_pass(self) -> None:
        """Begin a turn of the other pass if a waiting shard can begin it, else of the same pass.

        Begin none while the engine still computes, or if no waiting shard can begin.
        """
        ready = [part for texts, part in self._waiting.items() if self._has_room(texts)]
        if not ready or not self._engine.is_idle:
            return
        part = next((part for part in ready if part is not self._part), ready[0])
        if part is not self._part:
            self._part = None  # whatever becomes of it
            self._bring(part)
        self._part, self._begun = part, 0
