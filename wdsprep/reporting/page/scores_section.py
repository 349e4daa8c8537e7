"""The section on scores: a histogram of each column, and its lowest and highest samples."""

from wdsprep.reporting.facts.gather import Chapter, ReportFacts
from wdsprep.reporting.page.charts import histogram_figure, note
from wdsprep.reporting.page.contact_sheet import card
from wdsprep.reporting.page.markup import Child, Html, el
from wdsprep.reporting.page.sections import section, unread_note
from wdsprep.reporting.sheet.items import SheetItem
from wdsprep.text import plural


def scores_section(facts: ReportFacts) -> Html | None:
    chapters = [chapter for chapter in facts.chapters if chapter.given.columns]
    if not chapters:
        return None
    parts: list[Child] = []
    for chapter in chapters:
        parts += _columns(chapter, facts)
    return section("scores", *parts)


def _columns(chapter: Chapter, facts: ReportFacts) -> list[Child]:
    shown = chapter.given.shown
    figures = [histogram_figure(one, label=shown) for one in chapter.surveyed.histograms]
    parts: list[Child] = [
        el("h3", shown),
        el("div", *figures, class_="figures"),
        unread_note(chapter),
    ]
    for ends in facts.ends:
        if ends.scores == shown and ends.low:
            of = f"Of {plural(ends.of, 'sample')}, picked by chance."
            parts += [_row(f"Lowest {ends.column}", ends.low, of)]
            parts += [_row(f"Highest {ends.column}", ends.high, of)]
    return parts


def _row(label: str, items: tuple[SheetItem, ...], of: str) -> Html:
    cards = el("ul", *(card(item, level=5) for item in items), class_="cards", role="list")
    return el("section", el("h4", label), note(of), cards, class_="group", aria_label=label)
