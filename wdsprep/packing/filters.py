"""`--filter "aesthetic >= 4.5 and pwatermark < 0.8"`: a condition on the facts of a sample.

`wdsprep.dataset.condition_syntax` says what a condition may be.
"""

from collections.abc import Mapping
from typing import Any

from wdsprep.dataset.condition_syntax import Condition, format_path
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import value_at_path


class Filter(Condition):
    """A condition of --filter, which is called with the facts of a sample."""

    option = "--filter "

    @property
    def columns(self) -> frozenset[str]:
        """Return the columns of a table that the condition uses."""
        return frozenset(str(path[0]) for path in self.names)

    def __call__(self, facts: Mapping[str, Any]) -> bool:
        return self.holds([value_at_path(facts, path) for path in self.names])

    def check(self, facts: Mapping[str, Any]) -> None:
        """Raise RejectedError if a sample's facts do not meet the condition."""
        if not self(facts):
            found = {format_path(path): value_at_path(facts, path) for path in self.names}
            values = (f"{name} is {'missing' if v is None else v}" for name, v in found.items())
            raise RejectedError(Code.FILTERED, ", ".join(sorted(values)))
