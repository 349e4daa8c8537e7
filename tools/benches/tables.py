"""What was measured: as a table, as JSON, and as a plot."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tools.benches import Group, Rival, Role
from tools.benches.turns import Measured, Taken

BAR, ROW, LEFT, WIDTH = 360, 22, 330, 800
COLOURS = {Role.OURS: "#2563a8", Role.RIVAL: "#8a8f98", Role.LIMIT: "#c9a227"}
LEGEND = "Speed, wdsprep's being 1. Blue is wdsprep, grey are others, yellow is a part of the work."


def rows(measured: Measured) -> Iterator[tuple[str, ...]]:
    """Name, rate or time, spread, how many times as long as the first, CPU and memory."""
    group = measured.group
    for rival in group.rivals:
        times = sorted(run.seconds for run in measured.runs[rival.name])
        spread = (
            f"{_number(group.count / times[-1])}..{_number(group.count / times[0])}"
            if group.count
            else f"{_time(times[0])}..{_time(times[-1])}"
        )
        name = f"{rival.name} (limit)" if rival.role is Role.LIMIT else rival.name
        cpu, peak = (measured.median(rival.name, what) for what in ("cpu_s", "peak_mb"))
        yield (
            name,
            speed(measured, rival.name),
            spread,
            f"{measured.ratio(rival.name):.2f}",
            f"{cpu:.1f}",
            f"{peak:,.0f}",
        )


def speed(measured: Measured, name: str) -> str:
    """Its rate, or its time where a single thing is timed."""
    group, middle = measured.group, measured.median(name)
    if not group.count:
        return _time(middle)
    return _number(group.count / middle) + (" MB/s" if group.unit == "MB" else "/s")


def table(measured: Measured) -> str:
    """Markdown."""
    group, count = measured.group, len(next(iter(measured.runs.values())))
    rounds = "1 round" if count == 1 else f"{count} rounds"
    what = f"{group.count:,.0f} {group.unit}, " if group.count else ""
    head = (f"{group.title}: {what}{rounds}", "median", "spread", "time", "CPU s", "MB")
    lines = [head, ("---",) * len(head), *rows(measured)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def notes(measured: Measured) -> Iterator[str]:
    """What the last run of each rival had to say."""
    for name, runs in measured.runs.items():
        yield from (f"{name}: {text}" for text in runs[-1].notes)


def verdicts(measured: Measured) -> Iterator[str]:
    """Each target, and whether it was met."""
    for name, wanted in measured.group.targets.items():
        found = measured.ratio(name)
        word = "met" if found >= wanted else "missed"
        yield f"{measured.group.title}: {found:.2f} x {name}, target {wanted:g} x: {word}"


def from_facts(facts: dict[str, Any]) -> Measured:
    """What `facts` were made of, but for the commands."""
    rivals = [
        Rival(name=one["name"], command=(), role=Role(one["role"])) for one in facts["rivals"]
    ]
    names = ("name", "title", "unit", "count", "targets")
    group = Group(**{name: facts[name] for name in names}, rivals=rivals)
    runs = {one["name"]: [Taken(**run) for run in one["runs"]] for one in facts["rivals"]}
    return Measured(group=group, runs=runs)


def facts(measured: Measured) -> dict[str, Any]:
    """For a program."""
    group = measured.group
    return {
        "name": group.name,
        "title": group.title,
        "unit": group.unit,
        "count": group.count,
        "targets": dict(group.targets),
        "rivals": [
            {
                "name": rival.name,
                "role": rival.role.value,
                "ratio": round(measured.ratio(rival.name), 3),
                "runs": [asdict(run) for run in measured.runs[rival.name]],
            }
            for rival in group.rivals
        ],
    }


def plot(found: Sequence[Measured]) -> str:
    """Bars of each rival's speed, that of wdsprep being 1, as SVG."""
    lines, y = [f'<text x="10" y="{ROW}">{LEGEND}</text>'], ROW + 10
    for measured in found:
        y += ROW
        lines.append(
            f'<text x="10" y="{y}" font-weight="bold">{_escaped(measured.group.title)}</text>'
        )
        speeds = {rival.name: 1 / measured.ratio(rival.name) for rival in measured.group.rivals}
        most = max(speeds.values())
        for rival in measured.group.rivals:
            y += ROW
            speed = speeds[rival.name]
            lines.append(
                f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{_escaped(rival.name)}</text>'
            )
            lines.append(
                f'<rect x="{LEFT}" y="{y - 13}" width="{max(1.0, BAR * speed / most):.1f}" '
                f'height="16" fill="{COLOURS[rival.role]}"/>'
            )
            lines.append(
                f'<text x="{LEFT + BAR * speed / most + 6:.1f}" y="{y}">{speed:.2f}</text>'
            )
        y += ROW // 2
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 20}" '
        f'viewBox="0 0 {WIDTH} {y + 20}" font-family="sans-serif" font-size="13">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>\n"])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
