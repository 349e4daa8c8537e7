"""Charts as inline SVG that stretch with the page. Places are in percent, so text keeps its size.

Each chart is in a figure, with a sentence that says the same and a table of its numbers. Nothing is
shown by colour alone.
"""

from collections.abc import Iterable, Sequence
from math import exp, pi, sqrt

from wdsprep.reporting.facts.histograms import Histogram
from wdsprep.reporting.facts.latent_statistics import SIDES, Channel
from wdsprep.reporting.page.markup import DASH, Child, Html, el
from wdsprep.text import plural

HEIGHT, BASE, TOP = 150, 126, 16
MOST_LABELS = 7
CURVE_POINTS = 60


def bar(start: float, width: float, kind: str) -> Html:
    """Draw the bar of a table row, with its start and width as shares of the cell.

    The row states the number too. A width above 0 is always visible; 0 draws nothing. `kind` is the
    CSS class.
    """
    rect = el(
        "rect",
        x=_percent(start),
        y=2,
        width=_percent(max(width, 0.002) if width else 0),
        height=12,
        rx=2,
        class_=kind,
    )
    return el("svg", rect, class_="bar", width="100%", height=16, aria_hidden="true")


def columns(
    bars: Sequence[tuple[str, str, float]], label: str, *, peak: str, gap: float = 0.16
) -> Html:
    """Draw upright bars, each from a short label, a tooltip and a height.

    The highest bar is as high as the chart, and `peak` is written on it. `label` is the text for
    screen readers, and `gap` the share of a bar's room that stays empty.
    """
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
    """Draw the distribution of a channel's values, with the bell curve that they should fill."""
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


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[Child]], *, numbers: int = 0
) -> Html:
    """Return a table. Its first column names the rows, its last `numbers` columns have numbers."""
    first = len(head) - numbers
    kinds = [_column_class(at, text, at >= first) for at, text in enumerate(head)]
    heads = (
        el("th", text, scope="col", class_=kind) for text, kind in zip(head, kinds, strict=True)
    )
    body = (
        el(
            "tr",
            el("th", row[0], scope="row"),
            *(el("td", cell, class_=kind) for cell, kind in zip(row[1:], kinds[1:], strict=True)),
        )
        for row in rows
    )
    whole = el(
        "table",
        el("caption", caption, class_="unseen"),
        el("thead", el("tr", *heads)),
        el("tbody", *body),
    )
    return el("div", whole, class_="scroll", role="region", aria_label=caption, tabindex=0)


def _column_class(at: int, title: str, is_number: bool) -> str | None:
    """Return the CSS class of a column; None for a first column without numbers.

    A column of bars has no title.
    """
    if is_number or not at:
        return "number" if is_number else None
    return "words" if title else "drawn"


def figure(title: str, says: str, chart: Html, numbers: Html) -> Html:
    """Return a figure: a chart, a sentence that says what it shows, and its numbers on demand."""
    return el(
        "figure",
        el("figcaption", el("strong", title), " ", el("span", says)),
        chart,
        el("details", el("summary", f"{title}: the numbers"), numbers),
    )


def histogram_figure(histogram: Histogram, *, label: str) -> Html:
    """Return the figure of a histogram of samples. `label` names their dataset."""
    total = histogram.count
    top = max(histogram.bars, key=lambda bar: bar.count)
    unit = f" {histogram.unit}" if histogram.unit else ""
    basis = "all samples" if histogram.is_of_all else f"{plural(total, 'sample')} picked by chance"
    says = f"of {basis}; most often {top.range}{unit} ({share(top.count, total)})"
    rows = ((bar.range, f"{bar.count:,}", share(bar.count, total)) for bar in histogram.bars)
    head = (histogram.unit or histogram.title.lower(), "samples", "share")
    return figure(
        histogram.title,
        says,
        columns(
            [(bar.label, f"{bar.range}{unit}: {bar.count:,}", bar.count) for bar in histogram.bars],
            f"{label}, {histogram.title}: {says}",
            peak=share(top.count, total),
        ),
        table(f"{label}, {histogram.title}", head, rows, numbers=2),
    )


def share(count: float, total: float) -> str:
    """Return a share in percent.

    A share above 0 is never shown as 0 %, and a share below 1 never as 100 %.
    """
    if not total:
        return DASH
    percent = 100 * count / total
    if 0 < percent < 0.1:
        return "< 0.1 %"
    if 99.9 < percent < 100:
        return "> 99.9 %"
    return f"{percent:.1f} %"


def note(*children: Child, is_problem: bool = False) -> Html:
    """Return a paragraph with a remark, or with a problem."""
    return el("p", *children, class_="note problem" if is_problem else "note")
