"""Guard the parsing of what strangers wrote, whatever that raises.

A sample that cannot be read is a reject, and a file that cannot be read is one line that names it.

Libraries raise anything at all over bytes that nobody foresaw. So what parses them stands in one of
these two blocks, and nothing else does: there a fault of ours would look like one of the file's.
What a file claims is held against its size before anything of that size is made.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.errors import SourceError, WdsprepError
from wdsprep.text import human_bytes, one_line, shown

LONGEST = 160  # characters of a reason
LARGE_NBYTES = 1 << 30
"""Memory that no sound file asks for at once."""
ROWS_A_BYTE, FEWEST_ROWS = 1_000, 1_000_000
"""The most rows that compression can make of a table's bytes: more than this are claimed, and not
there."""
UNPACKED_NBYTES, UNPACKED_RATIO = 256 << 20, 64
"""A part of a table that unpacks to more than both of these is made to fill memory."""


@contextmanager
def parsing_sample(what: str, code: Code = Code.UNREADABLE) -> Iterator[None]:
    """Turn exceptions of a parser into a RejectedError about the sample that it parses.

    Errors of wdsprep's own are raised as they are, and so is a lack of memory, which is the
    machine's fault.
    """
    try:
        yield
    except (RejectedError, WdsprepError, MemoryError):
        raise
    except Exception as error:  # any exception of a parser is about the bytes
        raise RejectedError(code, f"{what} cannot be read ({reason(error)})") from error


@contextmanager
def parsing_file(what: str, fault: str, advice: str) -> Iterator[None]:
    """Turn exceptions of a parser into a SourceError about the file that it parses.

    The error says that the file "is not a valid Parquet file", or another `fault`, and ends with
    `advice`. Errors of wdsprep's own are raised as they are, and so is a MemoryError, unless the
    parser asked for LARGE_NBYTES or more at once.
    """
    try:
        yield
    except (RejectedError, WdsprepError):
        raise
    except Exception as error:  # any exception of a parser is about the bytes
        asked = re.search(r"size (\d+)", str(error))  # so Arrow says what it did not get
        if isinstance(error, MemoryError) and (not asked or int(asked[1]) < LARGE_NBYTES):
            raise
        raise SourceError(f"{what} {fault} ({reason(error)}): {advice}") from error


def reason(error: Exception) -> str:
    """Return the first sentence of an exception, of at most LONGEST characters.

    It begins with the name of the exception's class, except for a ValueError, OSError or EOFError
    that has a message.
    """
    first = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    is_plain = isinstance(error, ValueError | OSError | EOFError) and first
    text = first if is_plain else f"{type(error).__name__}: {first}"
    return shown(one_line(text))[:LONGEST]


def check_columns(what: str, names: Sequence[str]) -> None:
    """Check that no two columns of a table have the same name. Raise SourceError if they have.

    Columns whose name is empty are passed over.
    """
    twice = next((name for name, count in Counter(names).items() if name and count > 1), None)
    if twice is not None:
        raise SourceError(
            f"{what} has two columns {shown(twice[:LONGEST])!r}: give each a name of its own"
        )


def check_rows(what: str, rows: int, nbytes: int) -> None:
    """Check that a file of `nbytes` bytes can hold as many rows as it claims.

    Raise SourceError if it cannot.
    """
    if not 0 <= rows <= max(FEWEST_ROWS, ROWS_A_BYTE * nbytes):
        raise SourceError(
            f"{what} claims {rows:,} rows in {human_bytes(nbytes)}, which is impossible: fetch "
            "it again, or move it away"
        )


def check_unpacked(what: str, unpacked: int, nbytes: int, *, ratio: int = UNPACKED_RATIO) -> None:
    """Check that a part of a file does not unpack to far more bytes than the file has.

    `unpacked` is the size of the unpacked part, and `nbytes` that of the file. Raise SourceError
    if the part is larger than both UNPACKED_NBYTES and `ratio` times the file.
    """
    if not 0 <= unpacked <= max(UNPACKED_NBYTES, ratio * nbytes):
        raise SourceError(
            f"{what} has {human_bytes(nbytes)}, and a part of it unpacks to "
            f"{human_bytes(unpacked)}: write it anew without compression if you trust it, or move "
            "it away"
        )
