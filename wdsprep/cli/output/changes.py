"""What `select`, `remove` and `duplicates` print: progress, plans, results, groups of copies."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from wdsprep.changes.duplicate_groups import CopiedSample, DuplicateGroup
from wdsprep.changes.duplicates import Duplicates
from wdsprep.changes.remove import Removal, RemovalPlace
from wdsprep.changes.select import Selected
from wdsprep.cli.base_command import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import CommandOutput, KeptLine, echo, rejects_lines
from wdsprep.errors import UsageError
from wdsprep.runners.job import JobListener, JobStatus
from wdsprep.runners.run import Outcome
from wdsprep.store.schemes import place_scheme
from wdsprep.text import command_line, examples, human_bytes, human_time, join_lines, plural


class SelectOutput(CommandOutput[Selected]):
    """The output of `select`: a progress line, and the result of each place."""

    unit, done, counted = "shard", "copied", "sample"
    spared = "--max-shard-size"

    def exit_code(self, selected: Selected) -> int:
        return DONE_WITH_DAMAGE if selected.is_damaged else 0

    def facts(self, selected: Selected) -> Iterator[dict[str, Any]]:
        for place, outcome in selected.outcomes.items():
            manifest = outcome.manifest
            yield {
                "complete": manifest.complete,
                "copied": outcome.samples,
                "copied_bytes": outcome.nbytes,
                "dataset": place,
                "kind": manifest.dataset,
                "quarantined": [failed.unit.name for failed in outcome.quarantined],
                "rejects": manifest.rejects,
                "samples": manifest.samples,
                "shards": len(manifest.shards),
                "shards_before": outcome.units_before,
            }

    def summary(self, selected: Selected) -> Iterator[str]:
        outcomes = list(selected.outcomes.values())
        yield self.headline(outcomes)
        for place, outcome in selected.outcomes.items():
            yield from self._dataset(place, outcome)
        yield from self.retry_lines(outcomes) or [
            f"next: {command_line('verify', *selected.outcomes)}"
        ]

    def _dataset(self, place: str, outcome: Outcome) -> Iterator[str]:
        manifest = outcome.manifest
        held = f"{plural(manifest.samples, 'sample')} in {plural(len(manifest.shards), 'shard')}"
        yield f"{place}: {held}, {human_bytes(manifest.nbytes)}"
        yield from rejects_lines(manifest.rejects, place)
        yield from self.failed_units(outcome)


class RemoveOutput(CommandOutput[Removal]):
    """The output of `remove`: what would be removed, a question, and what was removed."""

    unit, waits = "unit", False

    def __init__(self, options: Mapping[str, Any], *, as_json: bool) -> None:
        super().__init__(options, as_json=as_json)
        self.listener = JobListener(
            told=self.told,
            listed=self._searched,
            begun=self._planned,
            asked=self.asked,
            changed=self.changed,
        )

    def _searched(self, place: str, done: int, of: int) -> None:
        self.line.show(f"{place}: searching {self.unit} {done + 1:,} of {of:,}")

    def _planned(self, removal: Removal) -> None:
        """Print what would be removed. With --json it is in the result at the end."""
        self.line.clear()
        if not self.as_json:
            echo(join_lines(_planned_lines(removal)))

    def exit_code(self, removal: Removal) -> int:
        if removal.is_unknown:
            return UsageError.exit_code
        return 0 if removal.is_whole and not removal.nowhere else DONE_WITH_DAMAGE

    def facts(self, removal: Removal) -> Iterator[dict[str, Any]]:
        yield asdict(removal)

    def summary(self, removal: Removal) -> Iterator[str]:
        return _removed_lines(removal)


def _planned_lines(removal: Removal) -> Iterator[str]:
    for place in removal.places:
        yield f"{place.shown}: {_place_line(place)}"
    if removal.known:
        yield f"{plural(removal.known, 'key')} removed before"
    if removal.nowhere:
        some = examples(removal.examples)
        yield f"{plural(removal.nowhere, 'key')} in none of these datasets ({some})"
    if removal.unmatched:
        yield f"{plural(removal.unmatched, 'line')} of the lists that match no image here"
    if removal.beside:
        yield (
            f"{', '.join(removal.beside)}: made of these images, and keeps their samples: add "
            "--all to remove them there too"
        )


def _place_line(place: RemovalPlace) -> str:
    parts = []
    if place.samples or place.rejects:
        parts.append(plural(place.samples, "sample"))
        parts += [f"the readable part of {plural(place.rejects, 'reject')}"] * bool(place.rejects)
        of = f"{place.shards:,} of {plural(place.shards_of, 'shard')}"
        parts.append(f"{human_bytes(place.nbytes)} in {of} to write again")
    elif place.shards:
        parts.append(f"none of the samples, but {plural(place.shards, 'receipt')} to write again")
    else:
        parts.append("none of the samples")
    parts += ["a longer list of what stays away"] if place.is_listed else []
    return ", ".join(parts)


def _removed_lines(removal: Removal) -> Iterator[str]:
    if not removal.is_needed:
        yield from _planned_lines(removal)
        if removal.is_unknown:
            yield KeptLine("nothing was removed: none of these datasets has these keys")
        else:
            has_ended = "the removal that was begun before has finished"
            yield "nothing to remove" if not removal.ended else has_ended
        return
    if not removal.done:
        yield KeptLine("nothing was removed: give --yes, or run the same command at a terminal")
        return
    samples = sum(place.samples for place in removal.places)
    yield f"removed: {plural(samples, 'sample')}; later packs leave them out"
    kinds = {place.dataset for place in removal.places}
    if removal.beside:
        words = shlex.join(["wdsprep", "remove", *removal.beside])
        yield f'{", ".join(removal.beside)} still has them: "{words}" removes them'
    elif "latents" not in kinds:
        yield "latents made of these images, if there are any elsewhere, still have them"
    yield from _beyond_lines(removal)


def _beyond_lines(removal: Removal) -> Iterator[str]:
    """Yield where removed bytes may still be, out of reach of this command."""
    schemes = {place_scheme(place.shown) for place in removal.places} - {""}
    if schemes:
        yield KeptLine(
            "if the bucket keeps versions or deleted objects, it still has the old ones: delete "
            "their noncurrent versions there"
        )
        yield "delete the cache folders of loaders that have read from it, on their machines"


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
        return _duplicates_lines(found, self.line.elapsed_s)


def _duplicates_lines(found: Duplicates, elapsed_s: float) -> Iterator[str]:
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
