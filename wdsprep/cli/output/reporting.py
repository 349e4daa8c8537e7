"""What `report`, `card` and `inspect` print: where a page is, a card, a dataset or a sample."""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click

from wdsprep.cli.output.shared import CommandOutput, echo
from wdsprep.dataset.npy_arrays import fields_of
from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.settings import SCORES, Settings
from wdsprep.errors import UsageError
from wdsprep.reporting.card import LICENCE, Card
from wdsprep.reporting.inspect import FoundSample, MatchingSamples, inspect
from wdsprep.reporting.overview import Overview
from wdsprep.reporting.report import WrittenReport
from wdsprep.terminal import ProgressLine
from wdsprep.text import human_bytes, human_counts, join_lines, one_line, plural


class ReportOutput(CommandOutput[WrittenReport]):
    """The output of `report`: the plan, a progress line, and where the page is."""

    waits = False

    def confirm(self, output: object) -> bool:
        return ask_to_replace(f"{output}", "not a report")

    def facts(self, written: WrittenReport) -> Iterator[dict[str, Any]]:
        yield {"nbytes": written.nbytes, "report": written.output, "samples": written.samples}

    def summary(self, written: WrittenReport) -> Iterator[str]:
        shown = f"{human_bytes(written.nbytes)}, {plural(written.samples, 'sample')} shown"
        yield f"{written.output}: {shown}: open it in a browser"


def ask_to_replace(output: str, kind: str) -> bool:
    """Ask whether to replace a file, and return the answer; false if nobody can answer.

    `kind` says in the question what the file is.
    """
    question = one_line(f"{output} exists already and is {kind}: replace it?")
    try:
        return sys.stdin.isatty() and click.confirm(question, err=True)
    except click.Abort:  # no answer, or Ctrl-C
        return False


class CardOutput(CommandOutput[Card]):
    """The output of `card`: the file and the next steps, or the card itself."""

    waits = False

    def confirm(self, output: object) -> bool:
        return ask_to_replace(f"{output}", "not a card, or was changed since")

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


DESCRIBED = {"caption": "characters in a caption", "side": "pixels of the shorter side"}


def describe(dataset: str, key: str, *, list_urls: bool, as_json: bool, **options: Any) -> str:
    """Return the text that `wdsprep inspect` prints, and write the sample if that is asked for."""
    if list_urls and (key or options["where"]):
        raise UsageError("--urls lists the shards of a whole dataset: leave out KEY and --where")
    line = ProgressLine()

    def heard(done: int, of: int) -> None:
        line.show(f"searched {done:,} of {plural(of, 'shard')}")

    found = inspect(dataset, key, heard=heard, **options)
    line.clear()
    if isinstance(found, Overview):
        if list_urls:
            return json.dumps(found.patterns) if as_json else join_lines(found.patterns)
        facts = found.facts
        return json.dumps(facts, sort_keys=True) if as_json else join_lines(_screen(dataset, facts))
    if isinstance(found, Reject):
        detail = f": {found.detail}" if found.detail else ""
        reject = f"{found.key} is a reject ({found.code}){detail}: it came from {found.source}"
        return found.to_json().strip() if as_json else join_lines([reject])
    if as_json:
        return json.dumps(found.facts, ensure_ascii=False, sort_keys=True)
    if isinstance(found, MatchingSamples):
        return join_lines(_matching(found))
    return join_lines([*_sample(found), *(f"written: {path}" for path in found.written)])


def _screen(url: str, facts: Mapping[str, Any]) -> Iterator[str]:
    state = "complete" if facts["complete"] else "not complete"
    what = f"{plural(facts['samples'], 'sample')} in {plural(facts['shards'], 'shard')}"
    yield f"{url}: {facts['kind']}, {state}: {what}, {human_bytes(facts['nbytes'])}"
    yield ""
    yield from settings_lines(facts["settings"], facts["extra"])
    yield ""
    yield f"{'bucket':>8} {'samples':>14} {'shards':>8} {'size':>10}"
    for bucket, row in facts["buckets"].items():
        size = human_bytes(row["nbytes"])
        yield f"{bucket:>8} {row['samples']:>14,} {row['shards']:>8,} {size:>10}"
    yield ""
    for name, count in facts["shapes"].items():
        yield f"{name:>12} {plural(count, 'sample')}"
    for resolution, phase in facts.get("phases", {}).items():
        samples, shards = plural(phase["samples"], "sample"), plural(phase["shards"], "shard")
        yield f"phase {resolution}: {samples} in {shards}"
    rejected = sum(facts["rejects"].values())
    codes = f" ({human_counts(facts['rejects'], 8)})" if rejected else ""
    yield f"{plural(facts['inputs'], 'input')}, {plural(rejected, 'reject')}{codes}"
    if facts["counts"]:
        yield human_counts(facts["counts"], 8)
    for what, ranges in facts["quantiles"].items():
        parts = [
            f"{float(s):.0%} {least:,}" + ("" if least == most else f"-{most:,}")
            for s, (least, most) in ranges.items()
        ]
        yield f"{DESCRIBED[what]}, as ranges: {', '.join(parts)}"


MOST_LISTED = 8
CAPTION = 60
"""The most characters of a caption in a list of samples."""


def settings_lines(settings: Settings, extra: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines about settings, without those that are off or empty."""
    shown = {**extra, **{name: value for name, value in settings.items() if name != "layout"}}
    parts = []
    for name, value in shown.items():
        if value not in (0, "", [], {}, None, False):
            parts.append(f"{name.replace('_', '-')} {_setting(name, value)}")
    members = fields_of(settings.get("layout", ()))
    yield from _wrap_parts([*parts, *(f"{item.name} {item}" for item in members)])


def _setting(name: str, value: Any) -> str:
    if name == SCORES:
        return ", ".join(f"{column} ({holds})" for column, holds in value["columns"].items())
    if name == "trial" and isinstance(value, Mapping) and "each" in value:  # of a --limit
        parts = [f"{value['each']:,.1f} samples/s on one {value.get('device', 'worker')}"]
        parts += [f"device busy {value['busy']:.0%} of the time"] if "busy" in value else []
        parts += [f"{value['text']:.0%} of that with text"] if "text" in value else []
        parts += [f"launching {value['launching']:.0%}"] if "launching" in value else []
        return ", ".join(parts)
    if isinstance(value, Mapping):
        if all(isinstance(part, str) for part in value.values()):
            return ", ".join(f"{part} {text}" for part, text in value.items())
        is_counts = all(type(count) is int for count in value.values())
        return human_counts(value) if is_counts else json.dumps(value)
    if isinstance(value, list):
        if name == "shapes":
            value = ["x".join(map(str, size)) for size in value]
        return ",".join(map(str, value)) if len(value) <= MOST_LISTED else f"{len(value)} numbers"
    if name in ("max_shard_size", "max_bytes"):
        return human_bytes(value)
    return str(value)[:12] if name == "weights" else str(value)


def _wrap_parts(parts: list[str], width: int = 98) -> Iterator[str]:
    line = ""
    for part in parts:
        if line and len(line) + len(part) > width:
            yield line
            line = ""
        line += ("; " if line else "") + part
    yield line


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
        if name not in ("caption", "key"):
            yield f"{name:>{width}}: {json.dumps(value, ensure_ascii=False)}"
    caption = json.dumps(str(facts["json"].get("caption", "")), ensure_ascii=False)
    yield f"{'caption':>{width}}: {caption}"


def _matching(found: MatchingSamples) -> Iterator[str]:
    of = plural(found.samples, "sample")
    yield f"{found.matching:,} of {of} of {found.dataset} meet {found.where!r}"
    rows = found.first
    columns = {
        "key": [row.key for row in rows],
        "shard": [row.shard for row in rows],
        "sample": [f"{row.number:,}" for row in rows],
    }
    if any(row.width for row in rows):  # scores and text alone have no sizes
        columns["size"] = [f"{row.width or '?'}x{row.height or '?'}" for row in rows]
    cells = []
    for head, column in columns.items():
        width = max(map(len, [head, *column]))
        cells.append([cell.rjust(width) for cell in [head, *column]])
    if any(row.caption for row in rows):
        captions = [json.dumps(row.caption or "", ensure_ascii=False) for row in rows]
        short = (text if len(text) <= CAPTION else f"{text[:CAPTION]}..." for text in captions)
        cells.append(["caption", *short])
    yield from map("  ".join, zip(*cells, strict=True) if rows else ())
    if 0 < len(rows) < found.matching:
        yield f"and {found.matching - len(rows):,} more: --limit shows more of them"


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
