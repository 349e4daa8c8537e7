"""What `wdsprep select` says on the way and at the end."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from wdsprep.changes.select import Selected, SelectListener
from wdsprep.cli.output import Kept, RunShow, memory_lines, rejects_lines
from wdsprep.runners.run import Outcome
from wdsprep.text import command, human_bytes, plural


class SelectShow(RunShow):
    """Prints what is selected for each place, a progress line, and at the end what came of it."""

    unit, done, counted = "shard", "copied", "sample"

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(as_json=as_json)
        self._places: Sequence[str] = ()
        self.listener = SelectListener(told=self.told, begun=self._begun, status=self.status)

    def _begun(self, place: str, samples: int, of: int) -> None:
        self.told(f"{place}: {samples:,} of {plural(of, 'sample')} selected")

    def report(self, selected: Selected) -> list[str]:
        """The end of a run, for a person or for a program."""
        self._places = list(selected.outcomes)
        return self.result(list(selected.outcomes.values()))

    def result(self, outcomes: Sequence[Outcome]) -> list[str]:
        self.line.clear()
        if not self.as_json:
            return self.summary(outcomes)
        both = zip(self._places, outcomes, strict=True)
        facts = [{"dataset": place, **self.facts(outcome)} for place, outcome in both]
        return [Kept(json.dumps(each, sort_keys=True)) for each in facts]

    def facts(self, outcome: Outcome) -> dict[str, Any]:
        manifest = outcome.manifest
        return {
            "complete": manifest.complete,
            "copied": outcome.samples,
            "copied_bytes": outcome.nbytes,
            "kind": manifest.dataset,
            "quarantined": [failed.unit.name for failed in outcome.quarantined],
            "rejects": manifest.rejects,
            "samples": manifest.samples,
            "shards": len(manifest.shards),
            "shards_before": outcome.units_before,
        }

    def summary(self, outcomes: Sequence[Outcome]) -> list[str]:
        lines = [self.headline(outcomes)]
        for place, outcome in zip(self._places, outcomes, strict=True):
            lines += _of(place, outcome)
        failed = [one for outcome in outcomes for one in outcome.quarantined]
        lines += memory_lines(failed, "--max-shard-size")
        if failed:
            lines.append(Kept("run the same command again to copy what is left out"))
        else:
            lines.append(f"next: {command('verify', *self._places)}")
        return lines


def _of(place: str, outcome: Outcome) -> Iterator[str]:
    manifest = outcome.manifest
    shards = plural(len(manifest.shards), "shard")
    nbytes = human_bytes(manifest.nbytes)
    yield f"{place}: {plural(manifest.samples, 'sample')} in {shards}, {nbytes}"
    yield from rejects_lines(manifest.rejects, place)
    for failed in outcome.quarantined:
        times = plural(failed.attempts, "time")
        yield Kept(f"shard {failed.unit.name} failed {times} and is left out: {failed.reason}")
