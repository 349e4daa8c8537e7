"""Texts to look for in columns of tables: a list of any length, of which 24 bytes a text are kept.

These are the hash of a text in this process, and its mark (`dataset.removed_samples`). Hashes pick
out the few texts of a column that may be wanted, in 0.3 us each, and marks decide. A semi-join of
DuckDB takes as long, but holds the texts: 10 million URLs are 1.6 GB, or a folder to spill into.
Arrow's `is_in` hashes the list anew for each column.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wdsprep.dataset.removed_samples import MARK_NBYTES, Marks, mark_of


class WantedTexts:
    """Wanted texts of a kind, such as `key` or `url`.

    `seen` says of each of their `marks` whether a text with it has been found.
    """

    def __init__(self, kind: str, texts: Iterable[str]) -> None:
        hashes = array("q")

        def marks() -> Iterator[bytes]:
            for text in texts:
                hashes.append(hash(text))
                yield mark_of(kind, text)

        self._kind, self.marks = kind, Marks.sort(marks())
        self._hashes = np.array(hashes, np.int64)
        self._hashes.sort()
        self._sorted = np.frombuffer(self.marks.data, f"S{MARK_NBYTES}")
        self.seen = np.zeros(len(self.marks), np.bool_)

    def __len__(self) -> int:
        return len(self.marks)

    def find(self, texts: Sequence[str | None]) -> NDArray[np.int64]:
        """Return the numbers of the texts that are wanted, and note that these were seen."""
        hashes = np.fromiter(map(hash, texts), np.int64, len(texts))
        likely = np.flatnonzero(_find_equal(self._hashes, hashes)[0])
        marks = [mark_of(self._kind, texts[number] or "") for number in likely.tolist()]
        is_wanted, places = _find_equal(self._sorted, np.array(marks, self._sorted.dtype))
        self.seen[places[is_wanted]] = True
        return likely[is_wanted]

    def unseen(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield those of some texts that are wanted, and were not seen."""
        missing = Marks(self._sorted[~self.seen].tobytes())
        yield from (text for text in texts if mark_of(self._kind, text) in missing)


def _find_equal(
    ordered: NDArray[Any], values: NDArray[Any]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which values are among `ordered` ones, and the place of each that is."""
    places = np.searchsorted(ordered, values)
    places[places == len(ordered)] = 0
    if not len(ordered):
        return np.zeros(len(values), np.bool_), places
    return ordered[places] == values, places
