"""The figures that the project shows: the last ones measured of each group.

`results/figures.json` holds them. From it are made `results/figures.md`, with every table, and in
`README.md` here the machines, and one table with a line for each group that has somebody to be
compared with.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.benches import Role, tables
from tools.benches.turns import Measured

HERE = Path(__file__).parent
RECORD, TABLES = HERE / "results/figures.json", HERE / "results/figures.md"
PAGE = HERE / "README.md"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
TITLE = """# Figures

Made by `tools/bench`, not by hand. Rivals take turns, each in a process of its own; *time* is how
many times as long as wdsprep one takes, in the median of the rounds; CPU seconds and the peak of
memory are those of all its processes. Lines with (limit) do a part of the work alone.
"""
HEAD = ("", "wdsprep", "fastest other", "", "times", "target")


def record(found: Measured, order: Sequence[str], machine: dict[str, Any]) -> None:
    """Keep this, and show it with what is known of the other groups."""
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    kept[found.group.name] = tables.facts(found) | {"machine": machine}
    ranks = {name: rank for rank, name in enumerate(order)}
    rank = {name: ranks.get(name.partition("-")[0], len(ranks)) for name in kept}
    _keep(dict(sorted(kept.items(), key=lambda item: rank[item[0]])))


def drop_others(bench: str, groups: Collection[str]) -> None:
    """Drop what is known of groups of a benchmark that it no longer has."""
    kept = json.loads(RECORD.read_text())
    gone = [name for name in kept if name.partition("-")[0] == bench and name not in groups]
    for name in gone:
        del kept[name]
    _keep(kept)


def _keep(kept: dict[str, dict[str, Any]]) -> None:
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")
    show(kept)


def show(kept: dict[str, dict[str, Any]]) -> None:
    measured = [tables.from_facts(facts) for facts in kept.values()]
    places = [_place(facts["machine"]) for facts in kept.values()]
    TABLES.write_text("\n".join([TITLE, *_sections(measured, places)]))
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    lines = [HEAD, ("---",) * len(HEAD), *(line for one in measured for line in _lines(one))]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    machines = "\n".join(f"- {place}" for place in sorted({*places}))
    PAGE.write_text(f"{before}{BEGIN}\n{rows}\n\nMeasured on\n\n{machines}\n{END}{after}")


def _place(machine: dict[str, Any]) -> str:
    at = f", commit {machine['commit']}" if "commit" in machine else ""
    return f"{machine['date']}{at}, {machine['cores']} cores of {machine['cpu']}"


def _sections(measured: Sequence[Measured], places: Sequence[str]) -> Iterator[str]:
    before = ""
    for one, place in zip(measured, places, strict=True):
        if place != before:
            yield f"Measured {place}.\n"
            before = place
        yield tables.table(one) + "\n"
        yield from (f"- {note}" for note in tables.notes(one))
        yield ""


def _lines(measured: Measured) -> Iterator[tuple[str, ...]]:
    """A line for the page, where anything is faster or slower than we are."""
    others = [rival for rival in measured.group.rivals if rival.role is Role.RIVAL]
    others = others or [rival for rival in measured.group.rivals if rival.role is Role.LIMIT]
    if not others:
        return
    ours, best = measured.group.rivals[0], min(others, key=lambda one: measured.median(one.name))
    limit = " (limit)" if best.role is Role.LIMIT else ""
    yield (
        measured.group.title,
        tables.speed(measured, ours.name),
        best.name + limit,
        tables.speed(measured, best.name),
        f"{measured.ratio(best.name):.2f}",
        f"{wanted:.2g}" if (wanted := measured.group.targets.get(best.name)) else "",
    )
