"""What `select`, `remove` and `duplicates` print: progress, plans, results, groups of copies."""

import shlex
from collections.abc import Iterator
from typing import Any

from wdsprep.changes.duplicates import CopiedSample, DuplicateGroup, Duplicates
from wdsprep.changes.remove import Removal, RemovalPlace
from wdsprep.changes.select import Selected
from wdsprep.cli.base_command import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import CommandOutput, KeptLine, echo
from wdsprep.errors import UsageError
from wdsprep.runners.job import JobStatus
from wdsprep.store.schemes import place_scheme
from wdsprep.text import command_line, examples, human_bytes, human_time, join_lines, plural


class SelectOutput(CommandOutput[Selected]):
    """The output of `select`: a progress line, and the result of each place."""

    done = "copied"

    def facts(self, selected: Selected) -> Iterator[dict[str, Any]]:
        for place, outcome in selected.outcomes.items():
            yield {**self.outcome_facts(outcome, place), "kind": outcome.manifest.dataset}

    def summary(self, selected: Selected) -> Iterator[str]:
        outcomes = list(selected.outcomes.values())
        yield self.headline(outcomes)
        for place, outcome in selected.outcomes.items():
            yield from self.dataset_lines(outcome, place)
        yield from self.retry_lines(outcomes) or [
            f"next: {command_line('verify', *selected.outcomes)}"
        ]


class RemoveOutput(CommandOutput[Removal]):
    """The output of `remove`: what would be removed, a question, and what was removed."""

    unit, waits = "unit", False

    def on_listing(self, place: str, done: int, of: int) -> None:
        self.line.show(f"{place}: searching {self.unit} {done + 1:,} of {of:,}")

    def on_begin(self, removal: Removal) -> None:
        """Print what would be removed. With --json it is in the result at the end."""
        self.line.clear()
        if not self.as_json:
            echo(join_lines(_planned_lines(removal)))

    def exit_code(self, removal: Removal) -> int:
        if removal.is_unknown:
            return UsageError.exit_code
        return 0 if removal.is_whole and not removal.nowhere else DONE_WITH_DAMAGE

    def summary(self, removal: Removal) -> Iterator[str]:
        if not removal.is_needed:
            yield from _planned_lines(removal)
            if removal.is_unknown:
                line = "nothing was removed: none of these datasets has these keys"
                are_names = any("." in key for key in removal.examples)
                yield KeptLine(f"{line}{': --sources FILE takes names of files' * are_names}")
            else:
                has_ended = "the removal that was begun before has finished"
                yield "nothing to remove" if not removal.ended else has_ended
        elif not removal.done:
            yield KeptLine("nothing was removed: give --yes, or run the same command at a terminal")
        else:
            yield from _removed_lines(removal)


def _planned_lines(removal: Removal) -> Iterator[str]:
    for place in removal.places:
        yield f"{place.shown}: {_place_line(place)}"
    if removal.nowhere:
        keys = examples(removal.examples)
        yield f"{plural(removal.nowhere, 'key')} in none of these datasets ({keys})"
    if removal.unmatched:
        yield f"{plural(removal.unmatched, 'line')} of the lists that match no image here"
    if removal.beside:
        yield (
            f"{', '.join(removal.beside)}: made of these shards, and may have the samples: add "
            "--all to remove them there too"
        )


def _place_line(place: RemovalPlace) -> str:
    parts = [plural(place.samples, "sample")]
    if place.rejects:
        parts.append(f"the readable part of {plural(place.rejects, 'reject')}")
    if place.shards:
        shards = plural(place.shards, "shard")
        parts.append(f"{human_bytes(place.nbytes)} in {shards} to write again")
    parts += ["a longer list of what stays away"] if place.is_listed else []
    return ", ".join(parts)


def _removed_lines(removal: Removal) -> Iterator[str]:
    samples = sum(place.samples for place in removal.places)
    yield f"removed: {plural(samples, 'sample')}; later packs leave them out"
    kinds = {place.dataset for place in removal.places}
    if removal.beside:
        words = shlex.join(["wdsprep", "remove", *removal.beside])
        yield f'{", ".join(removal.beside)} may still have them: "{words}" removes them'
    elif "latents" not in kinds:
        yield "latents made of these images, if there are any elsewhere, still have them"
    if {place_scheme(place.shown) for place in removal.places} - {""}:  # out of our reach
        yield KeptLine(
            "if the bucket keeps versions or deleted objects, it still has the old ones: delete "
            "their noncurrent versions there"
        )
        yield "delete the cache folders of loaders that have read from it, on their machines"


SHOWN_COPIES = 3


class DuplicatesOutput(CommandOutput[Duplicates]):
    """The output of `duplicates`: a progress line, and at the end the groups of copies."""

    def on_comparison(self, done: int, of: int) -> None:
        self.line.counting("comparison")(done, of)

    def details(self, status: JobStatus) -> list[str]:
        return [f"{plural(status.samples, 'image')} looked at"]

    def summary(self, result: Duplicates) -> Iterator[str]:
        for group in result.largest:
            yield _group(group, len(result.datasets) > 1)
        if result.groups > len(result.largest):
            yield f"and {plural(result.groups - len(result.largest), 'more group')}"
        copies = plural(result.equal + result.near, "copy", "copies")
        yield (
            f"{copies} in {plural(result.groups, 'group')}: "
            f"{result.equal:,} equal to the byte, {result.near:,} within {result.distance} bits; "
            f"{result.samples:,} samples compared in {human_time(self.line.elapsed_s)}"
        )
        if result.flat:
            yield f"{result.flat:,} with too little detail, compared by their bytes alone"
        if result.damaged:
            damaged = plural(result.damaged, "image")
            yield KeptLine(f"{damaged} that cannot be decoded, compared by their bytes alone")
        if not result.complete:
            yield "pack has not finished these datasets: run this again after it has"
        yield from result.table
        if not result.equal + result.near:
            return
        for dataset, keys in zip(result.datasets, result.output, strict=False):
            yield f"next: {command_line('remove', dataset, '--keys', keys, '--keep-copies')}"
        if not result.output and not result.table:
            step = "run the same with -o FILE to write the keys of the copies, for wdsprep remove"
            yield f"next: {step}"


def _group(group: DuplicateGroup, is_of_several: bool) -> str:
    def shown(sample: CopiedSample) -> str:
        place = f"{sample.dataset} " if is_of_several else ""
        return f"{place}{sample.key} ({sample.width} x {sample.height})"

    copies = [
        f"{shown(copy)} {'equal' if copy.is_equal else plural(copy.distance, 'bit')}"
        for copy in group.copies[:SHOWN_COPIES]
    ]
    more = [f"{group.count - SHOWN_COPIES:,} more"] * (group.count > SHOWN_COPIES)
    return f"{shown(group.stays)} stays: {'; '.join([*copies, *more])}"
