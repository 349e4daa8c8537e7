"""Examples of the rejects of a dataset, by code, and the hosts that failed most.

Receipts count all rejects. The rejects themselves are read from a bounded number of units: for each
code one that has it, and others by chance.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from wdsprep.dataset.receipts import Receipt
from wdsprep.dataset.rejects import Reject, rejects_in
from wdsprep.dataset.thread_map import read_each
from wdsprep.reporting.facts.datasets import ReportDataset
from wdsprep.reporting.sheet.picking import DAMAGE
from wdsprep.text import Counting

UNITS = 24
EXAMPLES = 4
HOSTS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A host, with its failures by code."""

    name: str
    codes: tuple[tuple[str, int], ...]

    @property
    def failures(self) -> int:
        return sum(count for _, count in self.codes)


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectSummary:
    """A part of the rejects: examples by code, and the worst hosts.

    `failures` is the number of failures that the hosts are picked from. Of the `units` with
    rejects, `units_read` were read, and `units_damaged` could not be read.
    """

    examples: dict[str, tuple[Reject, ...]]
    hosts: tuple[Host, ...]
    failures: int
    units_read: int
    units_damaged: int
    units: int


def look_at_rejects(given: ReportDataset, seed: str, heard: Counting) -> RejectSummary:
    """Read the rejects of some units of a dataset, and return examples and the worst hosts."""
    receipts = [receipt for receipt in given.manifest.receipts if receipt.rejects]
    chosen = _choose_units(receipts, seed)
    lines = read_each(
        lambda receipt: _read_unit(given, receipt),
        chosen,
        given.store.readers,
        lambda done: heard(done, len(chosen)),
    )
    read = [some for some in lines if some is not None]
    rejects = [reject for some in read for reject in some]
    hosts = _hosts(rejects)
    return RejectSummary(
        examples=_examples(rejects),
        hosts=tuple(hosts[:HOSTS]),
        failures=sum(host.failures for host in hosts),
        units_read=len(read),
        units_damaged=len(chosen) - len(read),
        units=len(receipts),
    )


def _choose_units(receipts: list[Receipt], seed: str) -> list[Receipt]:
    """Choose units to read: for each code one that has it, then others by chance."""
    shuffled = random.Random(seed).sample(receipts, len(receipts))  # noqa: S311
    found: dict[str, Receipt] = {}
    met: set[str] = set()
    for receipt in shuffled:
        if not met >= receipt.rejects.keys():
            met |= receipt.rejects.keys()
            found[receipt.unit] = receipt
    for receipt in shuffled[:UNITS]:
        if len(found) < UNITS:
            found[receipt.unit] = receipt
    return sorted(found.values(), key=lambda receipt: receipt.unit)


def _read_unit(given: ReportDataset, receipt: Receipt) -> list[Reject] | None:
    """Return the rejects of a unit, or None if their file is damaged or missing."""
    try:
        return rejects_in(given.store, receipt.unit)
    except DAMAGE:
        return None


def _examples(rejects: Iterable[Reject]) -> dict[str, tuple[Reject, ...]]:
    found: dict[str, list[Reject]] = defaultdict(list)
    for reject in rejects:
        if len(found[reject.code.value]) < EXAMPLES:
            found[reject.code.value].append(reject)
    return {code: tuple(some) for code, some in found.items()}


def _hosts(rejects: Iterable[Reject]) -> list[Host]:
    """Return the hosts, those with the most failed downloads first."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for reject in rejects:
        if reject.code.stage == "fetch" and (host := host_of(reject.url)):
            counts[host][reject.code.value] += 1
    hosts = (Host(name=name, codes=tuple(codes.most_common())) for name, codes in counts.items())
    return sorted(hosts, key=lambda host: (-host.failures, host.name))


def host_of(url: str) -> str:
    """Return the host of a URL, or "" if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
