"""Check the samples of one shard against the format.

One pass over the shard notes what breaks the format, where each sample starts, and the keys.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from wdsprep.checks.member_rules import CheckRules, read_facts, text_problem
from wdsprep.dataset.sample_table import ROW, Columns, TableWriter
from wdsprep.dataset.shard_reader import HashedTape
from wdsprep.dataset.tar import BLOCK, padded
from wdsprep.dataset.tar.index import encode_index
from wdsprep.dataset.tar.member_names import split_member
from wdsprep.dataset.tar.members import BadSampleError, members, truncated
from wdsprep.dataset.tar.write import header
from wdsprep.limits import MAX_TEXT_NBYTES

# The parts of a tar header that are the same in every member: all but name, size and checksum.
_MODEL = header("a", 0)
_MODE, _TIME, _REST = _MODEL[100:124], _MODEL[136:148], _MODEL[156:345]
SHOWN = 2


@dataclass
class CheckedShard:
    """The content of a shard, as far as it was checked.

    `table` gets the rows of its sound samples; their positions, if it has any, are 0, 1, 2 and so
    on. `count` is the number of problems that its samples have, and `problems` are the first of
    them. `stopped` is why the check ended before the end of the tar.
    """

    columns: Columns
    offsets: "array[int]" = field(default_factory=lambda: array("Q"))
    keys: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    count: int = 0
    stopped: str = ""

    @cached_property
    def table(self) -> TableWriter:
        return TableWriter(self.columns)

    def note(self, problem: str) -> None:
        self.count += 1
        if self.count <= SHOWN:
            self.problems.append(problem)

    @property
    def index(self) -> bytes:
        return encode_index(self.offsets)

    def __str__(self) -> str:
        shown = [*self.problems, *([self.stopped] if self.stopped else [])]
        more = self.count - len(self.problems)
        return "; ".join(shown) + (f"; and {more:,} more" if more else "")


def check_shard(tape: HashedTape, rules: CheckRules, found: CheckedShard) -> Iterator[int]:
    """Check the samples of a tar, and note in `found` their keys, offsets and problems.

    Yield now and then how many bytes have been read so far. Raise nothing for a tar that is damaged
    or ends early: `found.stopped` says why the check ended.
    """
    told = 0
    try:
        for _ in _ShardChecker(tape, rules, found).go():
            if tape.nbytes > told:
                told = tape.nbytes
                yield told
    except BadSampleError as error:
        found.stopped = str(error)


class _ShardChecker:
    """A check of the members of a shard, one after another."""

    def __init__(self, tape: HashedTape, rules: CheckRules, found: CheckedShard) -> None:
        self._tape, self._rules, self.found = tape, rules, found
        self._key = ""
        self._number = rules.members
        self._texts: dict[str, bytes] = {}

    def go(self) -> Iterator[None]:
        end = 0
        for path, start, data_start, nbytes, _target in members(self._tape.at):
            if not path:
                break
            if data_start - start != BLOCK or not _is_plain(self._tape.at(start, BLOCK)):
                self.found.note(f"the header of {path} is not as wdsprep writes it")
            key, name = split_member(path) or (path, "")
            if key != self._key or not end:
                self._close()
                self._open(key, start)
                yield
            if problem := self._member(name, data_start, nbytes):
                self.found.note(f"{key}: {problem}")
            self._number += 1
            end = data_start + padded(nbytes)
        self._close()
        self.found.offsets.append(end)

    def _open(self, key: str, start: int) -> None:
        self._key, self._number = key, 0
        self._texts.clear()
        self._rules.begin(len(self.found.keys))
        self.found.keys.append(key)
        self.found.offsets.append(start)

    def _close(self) -> None:
        """Note what is wrong with a sample as a whole, after its last member."""
        if self._number < self._rules.members:
            self.found.note(f"{self._key}: it has {self._number} of {self._rules.members} members")
        elif len(self._texts) == 2:
            self._close_texts(self._texts["json"], self._texts["txt"])

    def _close_texts(self, json_data: bytes, txt: bytes) -> None:
        facts = read_facts(json_data)
        if isinstance(facts, str):
            self.found.note(f"{self._key}: {facts}")
        elif problem := text_problem(self._key, facts, json_data, txt, self._rules):
            self.found.note(f"{self._key}: {problem}")
        elif ROW in self.found.columns:
            self.found.table.add(self._key, {**facts, ROW: len(self.found.keys) - 1})
        else:
            self.found.table.add(self._key, facts)

    def _member(self, name: str, start: int, nbytes: int) -> str:
        if self._number >= self._rules.members:
            return f"{name} is one member too many"
        if problem := self._rules.check_place(self._number, name):
            return problem
        if name not in ("json", "txt"):
            return self._rules.check_member(name, self._tape.view, start, nbytes)
        if nbytes > MAX_TEXT_NBYTES:
            return f"{name} has more than {MAX_TEXT_NBYTES:,} bytes"
        self._texts[name] = data = self._tape.at(start, nbytes)
        if len(data) < nbytes:
            raise truncated(start, name)
        return ""


def _is_plain(head: bytes) -> bool:
    return (
        head.startswith(_MODE, 100) and head.startswith(_TIME, 136) and head.startswith(_REST, 156)
    )
