"""How often and how long a store over a network tries again, the same for all of them."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

ATTEMPTS = 8
FIRST_PAUSE_S = 0.4  # before the second attempt; eight attempts take about 40 s
LONGEST_PAUSE_S = 20.0
T = TypeVar("T")


def persist(act: Callable[[], T], is_transient: Callable[[Exception], bool], pause_s: float) -> T:
    """Return the result of `act`, which is called again after each error that is transient.

    There are at most ATTEMPTS calls, with pauses that grow from `pause_s`. The error of the last
    one is raised, and so is any error for which `is_transient` returns False.
    """
    for attempt in range(ATTEMPTS - 1):
        try:
            return act()
        except Exception as error:
            if not is_transient(error):
                raise
        pause = min(LONGEST_PAUSE_S, pause_s * 2**attempt)
        time.sleep(random.uniform(pause / 2, pause))  # noqa: S311 (jitter, not a secret)
    return act()
