"""Charts as inline SVG that stretch with the page: places in percent, so text keeps its size.

Each has a sentence that says the same, and a table with its numbers; what a chart shows is never
told by colour alone.
"""

from collections.abc import Sequence
from math import exp, pi, sqrt

from wdsprep.report.markup import Child, Html, el
from wdsprep.report.spectrum import SIDES, Channel

HEIGHT, BASE, TOP = 150, 126, 16
MOST_LABELS = 7
CURVE_POINTS = 60


def bar(start: float, width: float, kind: str) -> Html:
    """One bar of a table's row, in shares of the cell; the row says the number too."""
    rect = el(
        "rect",
        x=_percent(start),
        y=2,
        width=_percent(max(width, 0.002)),
        height=12,
        rx=2,
        class_=kind,
    )
    return el("svg", rect, class_="bar", width="100%", height=16, aria_hidden="true")


def columns(
    bars: Sequence[tuple[str, str, float]], label: str, *, peak: str, gap: float = 0.16
) -> Html:
    """Upright bars of a short label, what is said of one, and its height. The highest is as high as
    the chart, and `peak` is written on it."""
    most = max(height for _, _, height in bars) or 1
    step = 1 / len(bars)
    parts: list[Child] = []
    for number, (_, says, height) in enumerate(bars):
        pixels = round((BASE - TOP) * height / most, 1)
        parts.append(
            el(
                "rect",
                el("title", says),
                x=_percent((number + gap / 2) * step),
                y=round(BASE - pixels, 1),
                width=_percent((1 - gap) * step),
                height=pixels,
                class_="kept",
            )
        )
    highest = max(range(len(bars)), key=lambda number: bars[number][2])
    parts.append(_text(peak, (highest + 0.5) * step, TOP - 5, "peak"))
    every = -(-len(bars) // MOST_LABELS)
    for number in range(0, len(bars), every):
        parts.append(_text(bars[number][0], (number + 0.5) * step, BASE + 18, "tick"))
    return _svg(parts, label)


def _text(text: str, place: float, y: int, kind: str) -> Html:
    return el("text", text, x=_percent(place), y=y, class_=kind)


def _svg(parts: Sequence[Child], label: str) -> Html:
    base = el("line", x1="0", x2="100%", y1=BASE, y2=BASE, class_="axis")
    return el(
        "svg",
        *parts,
        base,
        role="img",
        aria_label=label,
        class_="chart",
        width="100%",
        height=HEIGHT,
    )


def distribution(channel: Channel, label: str) -> Html:
    """A channel's values, and the bell that they should fill."""
    count = len(channel.shares)
    width = 2 * SIDES / count
    most = max(*channel.shares, width / sqrt(2 * pi)) * 1.08
    steps = " ".join(
        f"H{100 * number / count:.2f}V{100 - 100 * share / most:.2f}"
        for number, share in enumerate(channel.shares)
    )
    places = [-SIDES + 2 * SIDES * number / CURVE_POINTS for number in range(CURVE_POINTS + 1)]
    curve = "L".join(
        f"{10 * (z + SIDES):.2f} {100 - 100 * width * exp(-z * z / 2) / sqrt(2 * pi) / most:.2f}"
        for z in places
    )
    return el(
        "svg",
        el("path", d=f"M0 100{steps}H100V100Z", class_="kept"),
        el("path", d=f"M{curve}", class_="curve", vector_effect="non-scaling-stroke"),
        role="img",
        aria_label=label,
        class_="bell",
        viewBox="0 0 100 100",
        preserveAspectRatio="none",
        width="100%",
        height=84,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"
