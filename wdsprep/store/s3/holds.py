"""Holds on S3, which has no locks: marks that are created only where none is.

1. A hold is an object at its name, the *mark*, made on condition that there is none. It says which
   process made it, and its holder deletes it at the end.
2. Of a holder that is dead, the mark stays. Who comes then makes a further mark, `NAME.1`, on the
   same condition, and holds the name if after that the marks are those that were dead and its own.
   The last mark holds; it is deleted after the others.
3. Dead is a holder whose process has ended, as far as that can be seen from here, or whose mark is
   `DEAD_S` old by the server's clock. A holder that takes longer makes a further mark in time.
4. Nothing that a holder asks for can happen later than that. It sends no request after `FRESH_S`
   without a further mark, and looks at the clock when the request has its signature already; and a
   server refuses what was signed more than `SKEW_S` ago, by a clock that it lets differ as much.

So a process that was stopped for an hour, in the middle of a deletion even, does no harm. What is
left is a request that got no answer, was repeated with success, and is carried out by the server
once more after the hold has ended.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any

from wdsprep.errors import BusyError
from wdsprep.store.holds import Holder, Wait, this_process
from wdsprep.store.s3.retry import retrying, status_of

FRESH_S = 60.0
SKEW_S = 15 * 60.0
DEAD_S = FRESH_S + 2 * SKEW_S + 60
LONGEST_WAIT_S = DEAD_S + 60
IN_FLIGHT_S = 5.0  # what a process sent before it died has arrived by then
Marks = Mapping[int, str]
"""The ETags of marks by their number. No two marks are alike."""


class Holds:
    """What the threads of a process hold in one store. `ask` is the store's, of any object."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask, self._mine = ask, threading.local()

    @contextmanager
    def hold(self, key: str, shown: str) -> Iterator[None]:
        with self._hold(key, shown) as hold:
            try:
                hold.begin()
                yield
            finally:
                hold.end()

    def let_go(self, key: str, shown: str) -> None:
        with self._hold(key, shown) as hold:
            if hold.begin_after_a_death():
                hold.end()

    @contextmanager
    def _hold(self, key: str, shown: str) -> Iterator["_Hold"]:
        """One that is checked at each request of this thread."""
        hold = _Hold(self._ask, key, shown)
        held: list[_Hold] = self._mine.__dict__.setdefault("held", [])
        held.append(hold)
        try:
            yield hold
        finally:
            held.remove(hold)

    def refresh(self) -> None:
        """To be called before a request is made."""
        for hold in getattr(self._mine, "held", ()):
            hold.refresh()

    def check(self, **_event: object) -> None:
        """To be called when a request has its signature and is about to be sent."""
        for hold in getattr(self._mine, "held", ()):
            hold.check()


class _Hold:
    def __init__(self, ask: Callable[..., Any], key: str, shown: str) -> None:
        self._ask, self._key, self._shown = ask, key, shown
        self._marks: Marks = {}  # while it is held, the last one is ours
        self._made_at = _now()
        self._is_checked = self._is_renewed = False
        self._first_seen_dead: dict[str, float] = {}

    def begin(self) -> None:
        wait = Wait(self._shown, LONGEST_WAIT_S)
        while True:
            marks = self._there()
            holder = next(filter(None, map(self._alive, marks)), "")
            if not holder and self._add(marks):
                return
            wait.pause(holder or "another run")

    def begin_after_a_death(self) -> bool:
        """Whether it is held now, after somebody who held it and died."""
        marks = self._there()
        if not marks or (self._alive(max(marks)) and not self._first_seen_dead):
            return False
        while any(map(self._alive, marks)):
            if self._there() != marks:  # somebody else was quicker
                return False
            time.sleep(0.1)
        return self._add(marks)

    def refresh(self) -> None:
        if self._is_renewed and _since(self._made_at) > FRESH_S / 2:
            self._is_renewed = False
            older = self._marks
            if not self._add(older):
                raise self._lost()
            self._delete(older)
            self._marks = {number: self._marks[number] for number in self._marks.keys() - older}

    def check(self) -> None:
        if self._is_checked and _since(self._made_at) > FRESH_S:
            raise self._lost()

    def end(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.refresh()  # what came last may have taken long
            self._is_renewed = False
            self._delete(self._marks)
        except (BotoCoreError, BusyError):
            pass
        except ClientError as error:
            if status_of(error) == 403:  # the next hold would wait for this one
                raise

    def _lost(self) -> BusyError:
        return BusyError(f"{self._shown}: this process slept, and may hold it no more: run again")

    def _name(self, number: int) -> str:
        return f"{self._key}.{number}" if number else self._key

    def _there(self) -> Marks:
        answer = self._ask("list_objects_v2", Prefix=self._key)
        start = len(self._key)
        ends = {e["Key"][start:]: e["ETag"].strip('"') for e in answer.get("Contents", ())}
        return {int(end[1:] or 0): tag for end, tag in ends.items() if re.fullmatch(r"|\.\d+", end)}

    def _read(self, number: int) -> tuple[Holder | None, Any]:
        """Who made a mark, where it can be read."""

        def read() -> tuple[bytes, Any]:
            answer = self._ask("get_object", Key=self._name(number))
            return answer["Body"].read(), answer

        data, answer = retrying(read)
        with suppress(ValueError, TypeError):
            return Holder.from_bytes(data), answer
        return None, answer

    def _alive(self, number: int) -> str:
        """Who holds the name by that mark; nobody who is dead."""
        from botocore.exceptions import ClientError

        try:
            holder, answer = self._read(number)
        except ClientError as error:
            if status_of(error) != 404:  # it has just been let go
                raise
            return "another run"
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        if (now - answer["LastModified"]).total_seconds() > DEAD_S:
            return ""
        if holder is not None and holder.is_known_dead:
            since = self._first_seen_dead.setdefault(holder.token, time.monotonic())
            return str(holder) if time.monotonic() - since < IN_FLIGHT_S else ""
        return str(holder or "another run")

    def _add(self, marks: Marks) -> bool:
        """Make a further mark; whether that and those that were there are all there are then."""
        self._is_checked = False  # nothing that exists can be harmed by it, however late
        number, began = max(marks, default=-1) + 1, _now()
        made = self._make(number)
        self._made_at, self._is_checked = began, True
        if not made:
            return False
        self._marks = {number: made}
        if self._there() == {**marks, number: made}:
            self._marks = {**marks, number: made}
            self._is_renewed = True
            return True
        self._delete(self._marks)
        self._marks = {}
        return False

    def _make(self, number: int) -> str:
        """The ETag of a new mark, or nothing where there is one."""
        from botocore.exceptions import ClientError

        me = this_process()
        try:
            answer = self._ask(
                "put_object", Key=self._name(number), Body=me.to_bytes(), IfNoneMatch="*"
            )
        except ClientError as error:
            if status_of(error) != 412:
                raise
            return self._made_before(number, me)
        return str(answer["ETag"]).strip('"')

    def _made_before(self, number: int, me: Holder) -> str:
        """A retry may meet its own success, whose answer was lost."""
        from botocore.exceptions import ClientError

        with suppress(ClientError):
            holder, answer = self._read(number)
            return str(answer["ETag"]).strip('"') if holder == me else ""
        return ""

    def _delete(self, marks: Marks) -> None:
        for number in sorted(marks):
            self._ask("delete_object", Key=self._name(number))


Moment = tuple[float, float]


def _now() -> Moment:
    """By two clocks: one that goes on while the machine sleeps, and the one that a server sees."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)), time.time()


def _since(then: Moment) -> float:
    return max(now - before for now, before in zip(_now(), then, strict=True))
