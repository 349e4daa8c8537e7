"""The output of `wdsprep duplicates`: progress, then the largest groups and counts."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from wdsprep.changes.duplicate_groups import CopiedSample, DuplicateGroup
from wdsprep.changes.duplicates import Duplicates
from wdsprep.cli.output.shared import CommandOutput, KeptLine
from wdsprep.runners.job import JobListener, JobStatus
from wdsprep.text import command_line, human_time, plural

SHOWN_COPIES = 3


class DuplicatesOutput(CommandOutput[Duplicates]):
    """The output of `duplicates`: a progress line, and at the end the groups of copies."""

    def __init__(self, options: Mapping[str, Any], *, as_json: bool) -> None:
        super().__init__(options, as_json=as_json)
        comparing = self.line.counting("comparison")
        self.listener = JobListener(told=self.told, status=self.status, compared=comparing)

    def details(self, status: JobStatus) -> list[str]:
        return [f"{plural(status.samples, 'image')} looked at"]

    def facts(self, found: Duplicates) -> Iterator[dict[str, Any]]:
        yield asdict(found)

    def summary(self, found: Duplicates) -> Iterator[str]:
        return _lines(found, self.line.elapsed_s)


def _lines(found: Duplicates, elapsed_s: float) -> Iterator[str]:
    for group in found.largest:
        yield _group(group, len(found.datasets) > 1)
    if found.groups > len(found.largest):
        yield f"and {plural(found.groups - len(found.largest), 'more group')}"
    yield (
        f"{plural(found.equal + found.near, 'copy', 'copies')} in {plural(found.groups, 'group')}: "
        f"{found.equal:,} equal to the byte, {found.near:,} within {found.distance} bits; "
        f"{found.samples:,} samples compared in {human_time(elapsed_s)}"
    )
    if found.flat:
        yield f"{found.flat:,} with too little detail, compared by their bytes alone"
    if found.damaged:
        damaged = plural(found.damaged, "image")
        yield KeptLine(f"{damaged} that cannot be decoded, compared by their bytes alone")
    if not found.complete:
        yield "pack has not finished these datasets: run this again after it has"
    yield from found.table
    yield from _next_steps(found)


def _group(group: DuplicateGroup, is_of_several: bool) -> str:
    copies = [
        f"{_sample(one, is_of_several)} {_likeness(one)}" for one in group.copies[:SHOWN_COPIES]
    ]
    more = [f"{group.count - SHOWN_COPIES:,} more"] * (group.count > SHOWN_COPIES)
    return f"{_sample(group.stays, is_of_several)} stays: {'; '.join([*copies, *more])}"


def _sample(one: CopiedSample, is_of_several: bool) -> str:
    place = f"{one.dataset} " if is_of_several else ""
    return f"{place}{one.key} ({one.width} x {one.height})"


def _likeness(one: CopiedSample) -> str:
    return "equal" if one.is_equal else plural(one.distance, "bit")


def _next_steps(found: Duplicates) -> Iterator[str]:
    """Yield the next commands, which remove the copies."""
    if not found.equal + found.near:
        return
    for dataset, keys in zip(found.datasets, found.output, strict=False):
        yield f"next: {command_line('remove', dataset, '--keys', keys, '--keep-copies')}"
    if not found.output and not found.table:
        yield "next: run the same with -o FILE to write the keys of the copies, for wdsprep remove"
