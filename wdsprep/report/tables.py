"""Tables and figures of the page, the way a screen reader wants them."""

from collections.abc import Iterable, Sequence

from wdsprep.report.charts import columns
from wdsprep.report.markup import DASH, Child, Html, el
from wdsprep.report.survey import Histogram


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[Child]], *, numbers: int = 0
) -> Html:
    """A table whose first column names its rows, and whose last `numbers` columns are numbers."""
    first = len(head) - numbers
    kinds = [_kind(at, text, at >= first) for at, text in enumerate(head)]
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


def _kind(at: int, title: str, is_number: bool) -> str | None:
    """How a column is set; a bar's has no title."""
    if is_number or not at:
        return "number" if is_number else None
    return "words" if title else "drawn"


def figure(title: str, says: str, chart: Html, numbers: Html) -> Html:
    """A chart with the sentence that says what it shows, and its numbers behind a button."""
    return el(
        "figure",
        el("figcaption", el("strong", title), " ", el("span", says)),
        chart,
        el("details", el("summary", f"{title}: the numbers"), numbers),
    )


def histogram_figure(histogram: Histogram, *, label: str) -> Html:
    total = histogram.count
    top = max(histogram.bars, key=lambda bar: bar.count)
    unit = f" {histogram.unit}" if histogram.unit else ""
    basis = "all samples" if histogram.is_of_all else f"{total:,} samples picked by chance"
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
    """A part of a whole, in percent; never 0 % or 100 % of what is something or not everything."""
    if not total:
        return DASH
    percent = 100 * count / total
    if 0 < percent < 0.1:
        return "< 0.1 %"
    if 99.9 < percent < 100:
        return "> 99.9 %"
    return f"{percent:.1f} %"


def note(*children: Child, is_problem: bool = False) -> Html:
    return el("p", *children, class_="note problem" if is_problem else "note")
