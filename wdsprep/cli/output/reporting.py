"""What `report`, `card` and `inspect` print: where a page is, a card, a dataset or a sample."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from wdsprep.cli.output.shared import CommandOutput, echo
from wdsprep.dataset.rejects import Reject
from wdsprep.errors import UsageError
from wdsprep.reporting.card import LICENCE, Card
from wdsprep.reporting.inspect import FoundSample, MatchingSamples, inspect
from wdsprep.reporting.overview import Overview, overview_lines
from wdsprep.reporting.report import WrittenReport
from wdsprep.terminal import ProgressLine
from wdsprep.text import human_bytes, join_lines, plural


class ReportOutput(CommandOutput[WrittenReport]):
    """The output of `report`: the plan, a progress line, and where the page is."""

    waits = False
    question = "{} exists already, and is not a report: replace it?"

    def facts(self, written: WrittenReport) -> Iterator[dict[str, Any]]:
        yield {"nbytes": written.nbytes, "report": written.output, "samples": written.samples}

    def summary(self, written: WrittenReport) -> Iterator[str]:
        shown = f"{human_bytes(written.nbytes)}, {plural(written.samples, 'sample')} shown"
        yield f"{written.output}: {shown}: open it in a browser"


class CardOutput(CommandOutput[Card]):
    """The output of `card`: the file and the next steps, or the card itself."""

    waits = False
    question = "{} exists already, and is not a card or was changed since: replace it?"

    def facts(self, card: Card) -> Iterator[dict[str, Any]]:
        yield {"card": card.output, "text": card.text, "uploads": card.uploads}

    def summary(self, card: Card) -> Iterator[str]:
        """Yield the last lines. Without a file there are none: the card itself is printed.

        The next steps then go to stderr, so that stdout can be redirected to a file.
        """
        steps = [f"next: {command}" for command in card.uploads]
        if card.output:
            todo = ", and state the license at the top" if LICENCE in card.text else ""
            yield from [f"{card.output}: look it over{todo}", *steps]
            return
        echo(card.text.rstrip("\n"))
        for step in (
            *steps,
            "next: run the same command with -o README.md to write the card to a file",
        ):
            self.line.say(step)


def describe(dataset: str, key: str, *, list_urls: bool, as_json: bool, **options: Any) -> str:
    """Return the text that `wdsprep inspect` prints, and write the sample if that is asked for."""
    if list_urls and (key or options["where"]):
        raise UsageError("--urls lists the shards of a whole dataset: leave out KEY and --where")
    line = ProgressLine()
    found = inspect(dataset, key, heard=line.counting("shard"), **options)
    line.clear()
    if isinstance(found, Overview):
        if list_urls:
            return json.dumps(found.patterns) if as_json else join_lines(found.patterns)
        if as_json:
            return json.dumps(found.facts, sort_keys=True)
        return join_lines(overview_lines(dataset, found.facts))
    if isinstance(found, Reject):
        detail = f": {found.detail}" if found.detail else ""
        reject = f"{found.key} is a reject ({found.code}){detail}: it came from {found.source}"
        return found.to_json().strip() if as_json else join_lines([reject])
    if as_json:
        return json.dumps(found.facts, ensure_ascii=False, sort_keys=True)
    if isinstance(found, MatchingSamples):
        return join_lines(_matching(found))
    return join_lines([*_sample(found), *(f"written: {path}" for path in found.written)])


CAPTION = 60
"""The most characters of a caption in a list of samples."""


def _sample(sample: FoundSample) -> Iterator[str]:
    facts = sample.facts
    shape = f", in shape {facts['shape']}" if facts["shape"] else ""
    yield f"{facts['key']}: sample {facts['number']:,} of {facts['shard']}{shape}"
    yield ""
    for name, member in facts["members"].items():
        yield f"{name:>12} {human_bytes(member['nbytes']):>10}{_statistics(member)}"
    yield ""
    width = max(map(len, facts["json"]), default=0)
    for name, value in facts["json"].items():
        if name != "key":
            yield f"{name:>{width}}: {json.dumps(value, ensure_ascii=False)}"


def _matching(found: MatchingSamples) -> Iterator[str]:
    of = plural(found.samples, "sample")
    yield f"{found.matching:,} of {of} of {found.dataset} meet {found.where!r}"
    for row in found.first:
        size = f"  {row['width']}x{row['height']}" if row["width"] else ""
        caption = json.dumps(row["caption"] or "", ensure_ascii=False)
        short = caption if len(caption) <= CAPTION else f"{caption[:CAPTION]}..."
        said = f"{size}  {short}" if row["caption"] else size  # scores have no captions
        yield f"{row['key']}  {row['number']:,} of {row['shard']}{said}"
    if 0 < len(found.first) < found.matching:
        yield f"and {found.matching - len(found.first):,} more: --limit shows more of them"


def _statistics(member: Mapping[str, Any]) -> str:
    if "problem" in member:
        return f"  {member['problem']}"
    if "dtype" not in member:
        return ""
    shape = " x ".join(map(str, member["shape"]))
    measures = ", ".join(
        f"{name} {member[name]:.4g}" for name in ("min", "max", "mean", "std") if name in member
    )
    return f"  {member['dtype']} {shape}: {measures}" + ("" if member["finite"] else ", not finite")
