"""How many bodies may come at a time, so that memory holds whatever they turn out to be."""

from dataclasses import dataclass

ROOM_NBYTES = 128 << 20
USUAL_NBYTES = 100_000  # of a body, until some have come


class CrowdedError(Exception):
    """A body is given up for the sake of others: it is to be asked for again later."""


@dataclass(slots=True)
class Room:
    """The bodies that are coming. None is begun where those under way have filled half of the room,
    or will, to judge by the size of those before. Where they are larger all the same, one after
    another is given up until the rest has room. `max_nbytes` is that of two bodies or more, so
    some always end."""

    max_nbytes: int
    nbytes: int = 0
    """That have come."""
    bodies: int = 0
    usual_nbytes: float = USUAL_NBYTES
    share: float = 0.25
    """Of the bodies under way that is there, as a rule: most requests wait for their first byte.
    Where it was ever crowded, all of it is counted."""

    @property
    def takes_one_more(self) -> bool:
        expected = max(self.nbytes, self.bodies * self.usual_nbytes * self.share)
        return not self.bodies or expected < self.max_nbytes / 2

    def is_crowded(self) -> bool:
        if self.nbytes <= self.max_nbytes:
            return False
        self.share = 1.0
        return True

    def learn(self, nbytes: int) -> None:
        """The size of a body that is whole."""
        self.usual_nbytes += (nbytes - self.usual_nbytes) / 16


def room_for(max_nbytes: int) -> Room:
    """For bodies of up to that size."""
    return Room(max(ROOM_NBYTES, 2 * max_nbytes))
