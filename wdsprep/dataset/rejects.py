"""What was rejected: the error that says so, the record of it, and a unit's rejects as a file."""

import json
import logging
import re
import traceback
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Literal

from blake3 import blake3

from wdsprep.dataset.file_names import rejects_name
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.removed_samples import mark_of
from wdsprep.dataset.sealed_json import Fields, make_record, read_lines
from wdsprep.errors import WdsprepError
from wdsprep.store.base import Sink, Store

_log = logging.getLogger("wdsprep")


class RejectedError(Exception):
    """The error that a sample is rejected; `pack` catches it and writes a Reject."""

    def __init__(self, code: Code, detail: str = "") -> None:
        super().__init__(code, detail)
        self.code, self.detail = code, detail

    def __str__(self) -> str:
        return f"{self.code}: {self.detail}" if self.detail else str(self.code)

    def to_reject(self, source: str, key: str = "") -> "Reject":
        return Reject(key=key, source=source, code=self.code, detail=self.detail)


_reported: set[str] = set()
"""The bugs that this process has logged."""


def as_rejected(error: Exception, unforeseen: Code) -> RejectedError:
    """Turn an exception over one sample into its rejection, so that it costs no other sample.

    An unforeseen exception is a bug of ours: the reject has the code `unforeseen` and says
    where, and the log says it once. An exception that is no sample's fault is raised: an error
    about the run, and a lack of memory.
    """
    if isinstance(error, RejectedError):
        return error
    if isinstance(error, WdsprepError | MemoryError):
        raise error
    frames = reversed([*traceback.walk_tb(error.__traceback__)])  # the innermost first
    named = ((frame.f_globals.get("__name__", ""), line) for frame, line in frames)
    place = next((f"{name}:{line}" for name, line in named if name.startswith("wdsprep.")), "")
    bug = f"a bug: {type(error).__name__} at {place}"
    if bug not in _reported:
        _reported.add(bug)
        _log.warning("%s; its sample is a reject (%s): please report it", bug, unforeseen)
    return RejectedError(unforeseen, f"{bug}: {error}"[:200])


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """An input that is no sample: where it came from, why, and the key that it would have had.

    A source does not know the key, which is empty then. `url` is where the image was to be fetched
    from, if it was.
    """

    source: str
    code: Code
    detail: str = ""
    url: str = ""
    key: str = ""

    def to_json(self) -> str:
        """Return the line of a file of rejects."""
        line = {"code": self.code.value, "detail": self.detail, "key": self.key}
        line |= {"source": self.source, "stage": self.code.stage}
        line |= {"url": self.url} if self.url else {}
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"


_LINE = Fields(
    {"code": Literal[tuple(code.value for code in Code)], "detail": str, "key": str, "source": str},
    {"url": str},
)
UNSETTLED = "rejects that rows are leaving"
"""The name of the old rejects' digest in a receipt's `files`, while a retry writes new ones."""


HIDDEN = re.compile(r"blake3:[0-9a-f]{32}")
"""A source that cannot be read, of a row that was a reject before it was removed."""


def hide_source(source: str) -> str:
    """Return a digest in place of a source, so that nobody can read the source."""
    return f"blake3:{mark_of('source', source).hex()}"


def is_moved(reject: Reject, gone: Collection[str]) -> bool:
    """Return whether a reject's source is one of those that have `gone` to another slice.

    The source of a removed sample is compared by its digest.
    """
    if reject.code is Code.REMOVED and reject.source:
        return any(reject.source == hide_source(source) for source in gone)
    return reject.source in gone


class RejectsFile:
    """A writer of a unit's rejects, which may be any number."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._hash = blake3()
        self.counts: Counter[str] = Counter()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def add(self, reject: Reject) -> None:
        """Write a reject. Of a removed sample, nothing readable is written but its key."""
        if reject.code is Code.REMOVED:
            source = reject.source if HIDDEN.fullmatch(reject.source) else ""
            reject = Reject(key=reject.key, source=source, code=reject.code)
        line = reject.to_json().encode("utf-8", "replace")
        self._sink.write(line)
        self._hash.update(line)
        self.counts[reject.code.value] += 1


def rejects_file(rejects: Iterable[Reject]) -> tuple[bytes, RejectsFile]:
    """Return the bytes of a file of rejects, and its writer, which has its digest and counts."""
    out = BytesIO()
    file = RejectsFile(out)
    for reject in rejects:
        file.add(reject)
    return out.getvalue(), file


def read_rejects(data: bytes, what: str) -> list[Reject]:
    """Parse a file of rejects. Raise an error that names `what` if a line is none."""
    lines = read_lines(_LINE, data, what)
    return [make_record(Reject, {**line, "code": Code(line["code"])}) for line in lines]


def rejects_in(store: Store, unit: str) -> list[Reject]:
    """Return the rejects of a unit."""
    name = rejects_name(unit)
    return read_rejects(store.read(name), f"{store.url}/{name}")
