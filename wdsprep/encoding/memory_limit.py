"""A bound on the samples, and their bytes, that are inside the engine at once."""

import threading


class EngineLimit:
    """A limit on the samples inside the engine, and on the bytes that they take in memory.

    The bytes are those of images that wait to be decoded, of pixels that wait for a batch, and of
    arrays that wait to be written.
    """

    def __init__(self, samples: int, nbytes: int) -> None:
        self._most, self._most_nbytes = samples, nbytes
        self.samples = self.nbytes = 0
        self._changed = threading.Condition()
        self.is_full = False
        """True if a sample waits because of the bytes of those that are inside."""

    def enter(self, samples: int, nbytes: int, timeout_s: float) -> bool:
        """Admit samples if there is room, and return whether they have been admitted.

        If there is no room, wait for one change first, for `timeout_s` at most. When nothing is
        inside, anything is admitted.
        """
        with self._changed:
            if not self._has_room(samples, nbytes):
                self._changed.wait(timeout_s)
            if not self._has_room(samples, nbytes):
                return False
            self.is_full = False
            self.samples += samples
            self.nbytes += nbytes
            return True

    def _has_room(self, samples: int, nbytes: int) -> bool:
        if not self.samples:
            return True
        self.is_full = self.nbytes + nbytes > self._most_nbytes
        return self.samples + samples <= self._most and not self.is_full

    def hold(self, nbytes: int) -> None:
        """Add `nbytes`, which may be negative, to the bytes counted for the samples inside."""
        with self._changed:
            self.nbytes += nbytes
            if nbytes < 0:
                self._changed.notify_all()

    def leave(self, samples: int, nbytes: int) -> None:
        with self._changed:
            self.samples -= samples
            self.nbytes -= nbytes
            self._changed.notify_all()
