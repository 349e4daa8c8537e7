"""How many bodies may come at a time, so that memory holds whatever they turn out to be."""

from dataclasses import dataclass

ROOM_NBYTES = 128 << 20
USUAL_NBYTES = 100_000  # of a body, until some have come


class CrowdedError(Exception):
    """The error for a response body given up to save memory, and to be fetched again later."""


@dataclass(slots=True)
class BodyLimit:
    """A limit of the bytes of response bodies that are being received.

    No body is begun while those under way fill half of the limit, or will by the mean size of
    those before. If bodies turn out larger, one after another is given up until the rest
    fits. `max_nbytes` is at least twice the largest body, so some always end.
    """

    max_nbytes: int
    nbytes: int = 0
    """The bytes that have come."""
    bodies: int = 0
    usual_nbytes: float = USUAL_NBYTES
    share: float = 0.25
    """The share of the bodies under way that is usually there: most requests wait for their first
    byte. Where memory was ever crowded, all of it is counted."""

    @property
    def takes_one_more(self) -> bool:
        expected = max(self.nbytes, self.bodies * self.usual_nbytes * self.share)
        return not self.bodies or expected < self.max_nbytes / 2

    def is_crowded(self) -> bool:
        """Return whether more bytes have come than the limit allows.

        If so, all bodies under way are counted in full from then on.
        """
        if self.nbytes <= self.max_nbytes:
            return False
        self.share = 1.0
        return True

    def learn(self, nbytes: int) -> None:
        """Take the size of a finished body into the mean."""
        self.usual_nbytes += (nbytes - self.usual_nbytes) / 16


def body_limit_for(max_nbytes: int) -> BodyLimit:
    """Return a limit that fits bodies of up to `max_nbytes`."""
    return BodyLimit(max(ROOM_NBYTES, 2 * max_nbytes))
