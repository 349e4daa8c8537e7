"""The ends of samples, where json and caption stand, behind an image or arrays that nobody wants.

On a local disk they are read alone. From S3, one read costs the processor half a millisecond, and
as long brings a megabyte of a range that is read anyway (the figures are in `store.s3.reads`). On a
network that brings each of the threads 100 MB/s, and answers after some ten milliseconds, the two
are even at a few hundred KB; with 32 requests at once, of 20 ms each, beside a stream of 400 MB/s,
at `LARGE_NBYTES`. So the ends come alone where samples are larger, and else the whole shard.
"""

from collections.abc import Callable

from wdsprep.dataset.tar import BLOCK, END, padded
from wdsprep.dataset.tar.read import TarSample, scan

LARGE_NBYTES = 256 << 10
"""Of a sample on average."""
JSON = b".json\0"
TXT = b".txt\0"


def near_the_end(data: bytes) -> tuple[str, bytes] | None:
    """Key and json of a sample that ends so, if json and caption are its last members."""
    at = data.find(JSON)
    while at >= 0:
        start = at & -BLOCK
        try:
            nbytes = int(data[start + 124 : start + 135], 8)
            text = start + BLOCK + padded(nbytes)
            end = text + BLOCK + padded(int(data[text + 124 : text + 135], 8))
        except ValueError:  # no header
            end = 0
        if end == len(data) and data.startswith(data[start:at] + TXT, text):
            if data[start + 345]:  # of a name that is longer
                return None
            facts = data[start + BLOCK : start + BLOCK + nbytes]
            return data[start:at].decode("utf-8", "surrogateescape"), facts
        at = data.find(JSON, at + 1)
    return None


def walked(
    read: Callable[[int, int], bytes], nbytes: int, there: bytes
) -> tuple[str, bytes] | None:
    """Key and json of a sample of so many bytes, from header to header, whoever wrote them. Of what
    is `there` of its end nothing is read."""

    def at(offset: int, count: int) -> bytes:
        here = max(0, min(count, nbytes - offset))
        begin = offset - (nbytes - len(there))
        data = there[begin : begin + here] if begin >= 0 else read(offset, here)
        behind = max(0, offset - nbytes)
        return data + END[behind : behind + count - here]

    found = next(scan(at, wants=lambda field, _nbytes, _before: field == "json"), None)
    if isinstance(found, TarSample):
        return found.key, found.fields.get("json", b"")
    return None
