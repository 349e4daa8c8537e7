"""The output of `wdsprep remove`: progress, what it will remove, and the result."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from wdsprep.changes.remove import Removal, RemovalPlace
from wdsprep.cli.exit_codes import DONE_WITH_DAMAGE
from wdsprep.cli.output.shared import CommandOutput, KeptLine, echo
from wdsprep.errors import UsageError
from wdsprep.runners.job import JobListener
from wdsprep.store.schemes import place_scheme
from wdsprep.text import examples, human_bytes, join_lines, plural


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
            echo(join_lines(_found(removal)))

    def exit_code(self, removal: Removal) -> int:
        if removal.is_unknown:
            return UsageError.exit_code
        return 0 if removal.is_whole and not removal.nowhere else DONE_WITH_DAMAGE

    def facts(self, removal: Removal) -> Iterator[dict[str, Any]]:
        yield asdict(removal)

    def summary(self, removal: Removal) -> Iterator[str]:
        return _outcome(removal)


def _found(removal: Removal) -> Iterator[str]:
    for place in removal.places:
        yield f"{place.shown}: {_place(place)}"
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


def _place(place: RemovalPlace) -> str:
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


def _outcome(removal: Removal) -> Iterator[str]:
    if not removal.is_needed:
        yield from _found(removal)
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
    yield from _beyond(removal)


def _beyond(removal: Removal) -> Iterator[str]:
    """Yield where removed bytes may still be, out of reach of this command."""
    schemes = {place_scheme(place.shown) for place in removal.places} - {""}
    if schemes:
        yield KeptLine(
            "if the bucket keeps versions or deleted objects, it still has the old ones: delete "
            "their noncurrent versions there"
        )
        yield "delete the cache folders of loaders that have read from it, on their machines"
