"""The output that commands share: results, errors, progress and last lines.

`wdsprep.terminal` draws it.
"""

import json
import sys
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import click

from wdsprep.cli.base_command import DONE_WITH_DAMAGE
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.shapes import batch_that_fits, shape_counts
from wdsprep.runners.progress import JobProgress
from wdsprep.terminal import TERMINAL
from wdsprep.text import (
    escape_controls,
    human_bytes,
    human_counts,
    human_time,
    join_lines,
    one_line,
    plural,
)

if TYPE_CHECKING:
    from wdsprep.dataset.manifest import Manifest
    from wdsprep.runners.run import Outcome


def echo(text: str, *, err: bool = False) -> None:
    """Print what the user asked for, even with --quiet."""
    TERMINAL.write(escape_controls(text), err=err)


def complain(text: str, *, traced: bool = True) -> None:
    """Print an error as one line, after its traceback if --verbose or --debug is given."""
    TERMINAL.stop_ticking()
    if traced and TERMINAL.is_debugging:
        echo(traceback.format_exc(), err=True)
    over_ctrl_c = "\r" * sys.stderr.isatty()
    TERMINAL.write(f"{over_ctrl_c}wdsprep: {one_line(text)}", err=True)


LOADS_TORCH = "waiting for the first worker, which loads torch and the model"
"""The words for the time until a worker that computes is heard of."""
WISHED = ("fetch", "filter", "remove")
"""The stages of rejects that are reported apart, or that the user asked for."""


# --- results of runs
class KeptLine(str):
    """A line that --quiet keeps: a finding, a warning, or the JSON that was asked for."""

    __slots__ = ()


def tell(lines: Iterable[str]) -> None:
    """Print the last lines of a command; with --quiet, only each `KeptLine`."""
    if text := join_lines(
        line for line in lines if isinstance(line, KeptLine) or not TERMINAL.is_quiet
    ):
        echo(text)


T = TypeVar("T")


class CommandOutput(ABC, JobProgress, Generic[T]):
    """The output of a command: notes that stay, a progress line, and the result at the end."""

    place_name = "dataset"
    """The name in --json of the place that a run has filled."""

    question = "do this?"
    """The question that a command asks; {} stands for the file that it asks about."""
    waits = True
    """Whether to print at once that the command gets ready; not if it asks a question."""

    def __init__(self, options: Mapping[str, Any], *, as_json: bool) -> None:
        """Prepare the output of a command with these options."""
        super().__init__(waits=self.waits)
        self.options, self.as_json = options, as_json

    def exit_code(self, result: T) -> int:
        """Return the exit code of a command without an error: 3 if the result is damaged."""
        results = result if isinstance(result, list) else [result]
        is_damaged = any(getattr(part, "is_damaged", False) for part in results)
        return DONE_WITH_DAMAGE if is_damaged else 0

    def last_lines(self, result: T) -> list[str]:
        """Return the last lines of the output: the result as text, or as JSON if asked."""
        self.line.clear()
        if self.as_json:
            return [KeptLine(json.dumps(facts, sort_keys=True)) for facts in self.facts(result)]
        return list(self.summary(result))

    def facts(self, result: T) -> Iterable[Mapping[str, Any]]:
        """Yield the objects that --json prints: one with the fields of the result by default."""
        yield asdict(cast("Any", result))

    @abstractmethod
    def summary(self, result: T) -> Iterable[str]:
        """Yield the lines that a person reads."""

    def confirm(self, subject: object) -> bool:
        """Ask whether to go on, and return the answer; false if nobody can answer."""
        question = one_line(self.question.format(subject))
        return sys.stdin.isatty() and click.confirm(question, err=True)

    def on_message(self, text: str) -> None:
        self.line.say(text)

    # --- outcomes of runs
    def outcome_facts(self, outcome: "Outcome", place: str) -> dict[str, Any]:
        """Return what --json says of every run that has filled a dataset."""
        manifest = outcome.manifest
        return {
            "broken_tars": outcome.broken_tars,
            "complete": manifest.complete,
            "has_captions": outcome.has_captions,
            self.done: outcome.samples,
            f"{self.done}_bytes": outcome.nbytes,
            self.place_name: place,
            "quarantined": [failed.unit.name for failed in outcome.quarantined],
            "rejects": manifest.rejects,
            "samples": manifest.samples,
            "shards": len(manifest.shards),
            f"{self.unit}s_before": outcome.units_before,
        }

    def headline(self, outcomes: "Sequence[Outcome]", *, has_size: bool = False) -> str:
        """Return the line on what this run has done, with its bytes if it `has_size`.

        If no unit was left to do, the line says that instead.
        """
        units = sum(outcome.units_before for outcome in outcomes)
        before = f"{plural(units, self.unit)} {self.done} before"
        has_all = sum(len(outcome.manifest.receipts) for outcome in outcomes) == units
        if has_all and not any(outcome.quarantined for outcome in outcomes):
            return f"nothing left to do: {before}"
        samples = sum(outcome.samples for outcome in outcomes)
        size = f", {human_bytes(sum(o.nbytes for o in outcomes))}" if has_size else ""
        took = human_time(self.line.elapsed_s)
        new = f"{plural(samples, self.counted)} {self.done} in {took}{size}"
        return new + (f", after {before}" if units else "")

    def dataset_lines(
        self,
        outcome: "Outcome",
        place: str,
        *,
        before: Iterable[str] = (),
        after: Iterable[str] = (),
        remedies: Mapping[str, str] = MappingProxyType({}),
    ) -> list[str]:
        """Return the lines about a dataset: its size, its rejects, and what failed.

        The lines `before` and `after` stand before and after those about rejects. `remedies` say
        what to do about many rejects, by their code.
        """
        manifest = outcome.manifest
        held = f"{plural(manifest.samples, 'sample')} in {plural(len(manifest.shards), 'shard')}"
        return [
            f"{place}: {held}, {human_bytes(manifest.nbytes)}",
            *before,
            *rejects_lines(manifest.rejects, place),
            *after,
            *self.failed_units(outcome, place),
            *rejected_lines(outcome, place, remedies),
        ]

    def failed_units(self, outcome: "Outcome", url: str) -> Iterator[str]:
        """Yield a line on tars that cannot be read to their end, and one for each failed unit."""
        if outcome.broken_tars:
            broken = f"{plural(outcome.broken_tars, 'tar')} cannot be read to the end"
            remedy = f"{url}/rejects/ says where and why; mend or replace them, then start over"
            yield KeptLine(f"{broken}, and the rest of each is lost: {remedy}")
        for failed in outcome.quarantined:
            times = f" (failed {failed.attempts} times)" if failed.attempts > 1 else ""
            yield KeptLine(f"{self.unit} {failed.unit.name} is left out: {failed.reason}{times}")

    def retry_lines(self, outcomes: "Iterable[Outcome]") -> list[str]:
        """Return the line on what to do about failed units; none if none failed."""
        has_failed = any(outcome.quarantined for outcome in outcomes)
        return [KeptLine("run the same command again to retry what is left out")] * has_failed


def captionless_lines(outcome: "Outcome", noun: str = "image") -> list[str]:
    """Return the line on how many samples have no caption; none if all have one."""
    count, of = outcome.captionless, outcome.manifest.samples
    has = "has" if count == 1 else "have"
    return [f"{count:,} of {plural(of, noun)} {has} no caption"] if count else []


def shapes_lines(manifest: "Manifest") -> list[str]:
    """Return the line on how many samples have each shape; none if all are squares."""
    counts = shape_counts(manifest.settings, manifest.counts)
    shapes = f"in {plural(len(counts), 'shape')}, width x height (batches have the height first)"
    return [f"{shapes}: {human_counts(counts, 8)}"] if counts else []


def load_step(places: Sequence[str], manifests: "Iterable[Manifest]") -> str:
    """Return the line that proposes to load latents, in batches that they can fill.

    The first of `places` has the latents; any others are joined to it.
    """
    joined = "".join(f', join=["{place}"]' for place in places[1:])
    batch = min(batch_that_fits(m.settings, m.counts, m.samples) for m in manifests)
    return f'next: wdsprep.load("{places[0]}"{joined}, global_batch={batch}) in your trainer'


def rejects_lines(rejects: Mapping[str, int], url: str) -> list[str]:
    """Return the lines on the number of rejects by code, and where they are listed."""
    if not rejects:
        return []
    count = plural(sum(rejects.values()), "reject")
    lines = [f"{count} ({human_counts(rejects, 8)}): see {url}/rejects/"]
    if scattered := rejects.get(Code.TAR_SCATTERED.value):
        apart = f"the members of {plural(scattered, 'sample')} stand apart in the tar"
        remedy = "write the tars in the order of names (tar --sort=name), then run with --overwrite"
        lines.append(KeptLine(f"{apart}, so captions may be lost: {remedy}"))
    return lines


def rejected_lines(
    outcome: "Outcome", url: str, remedies: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return the line that over a tenth of the samples were rejected, and what to do; else none.

    Samples that could not be fetched, or that were left out by the user's own wish, do not count,
    unless nothing was kept at all. Where units have failed, they come first.
    """
    rejects, samples = outcome.manifest.rejects, outcome.manifest.samples
    if samples:
        rejects = {code: n for code, n in rejects.items() if Code(code).stage not in WISHED}
    count = sum(rejects.values())
    if outcome.quarantined or count * 10 <= samples + count:
        return []
    worst = max(sorted(rejects), key=lambda code: rejects[code])
    which = f"{rejects[worst]:,} of them" if rejects[worst] < count else "all of them"
    what = f"{count:,} of {samples + count:,} {'was' if count == 1 else 'were'} rejected"
    remedy = remedies.get(worst, f"{url}/rejects/ says why for each")
    start = "warning" if samples else "nothing was kept"
    return [KeptLine(f"{start}: {what}, {which} as {worst}: {remedy}")]


def left_out_lines(kinds: Mapping[str, int]) -> list[str]:
    """Return the line about files that are neither images nor captions of samples."""
    if not kinds:
        return []
    formats = [kind[1:] for kind in (".parquet", ".csv", ".tsv", ".jsonl") if kind in kinds]
    formats += ["tars"] if {".tar", ".tgz"} & kinds.keys() else []
    hint = f"--input-format {' or '.join(formats)} packs those" if formats else ""
    if {".csv", ".json", ".jsonl"} & kinds.keys():
        hint += "; a list of these images has to be called metadata.jsonl or metadata.csv"
    named = ", ".join(f"{count:,} {kind}" for kind, count in Counter(kinds).most_common())
    what = "left out, neither images nor captions of samples by their names"
    return [f"{what}: {named}{hint and f' ({hint})'}"]
