"""The frame of store failures: what is tried again, and what the others mean for the user.

Each library behind a store has errors of its own. What they mean is a `Failures` beside the store.
How often and how long one tries again is the same for all of them.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from wdsprep.errors import StoreError, UsageError

ATTEMPTS = 8
FIRST_PAUSE_S = 0.4  # before the second attempt; eight attempts take about 40 s
LONGEST_PAUSE_S = 20.0
NOT_SUPPORTED = (400, 501)  # statuses of a server that does not know what a header asks for
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failures:
    """What the errors of one library mean.

    `explain` gets an error, the URL of the file, and that of its bucket or repository. It returns
    an error that says what a user can do, or None for an error that is not the library's.
    """

    is_transient: Callable[[Exception], bool]
    status_of: Callable[[BaseException], int]
    explain: Callable[[Exception, str, str], StoreError | UsageError | None]

    def retrying(self, act: Callable[[], T], *, pause_s: float = FIRST_PAUSE_S) -> T:
        """Return the result of `act`, which is called again after each error that is transient.

        There are at most ATTEMPTS calls, with pauses that grow from `pause_s`. The error of the
        last one is raised, and so is any error that is not transient.
        """
        for attempt in range(ATTEMPTS - 1):
            try:
                return act()
            except Exception as error:
                if not self.is_transient(error):
                    raise
            pause = min(LONGEST_PAUSE_S, pause_s * 2**attempt)
            time.sleep(random.uniform(pause / 2, pause))  # noqa: S311 (jitter, not a secret)
        return act()

    @contextmanager
    def explained(self, what: str, place: str) -> Iterator[None]:
        """Turn the library's errors in the block into errors of wdsprep."""
        try:
            yield
        except (StoreError, UsageError):
            raise
        except Exception as error:
            explained = self.explain(error, what, place)
            if explained is None:
                raise
            if isinstance(explained, StoreError):
                explained.status = self.status_of(error)
            raise explained from None  # its own words may have a signed URL
