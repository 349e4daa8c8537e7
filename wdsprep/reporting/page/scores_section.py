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
    return section("scores", "Scores", *parts)


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
            parts.append(el("h4", ends.column))
            of = plural(ends.of, "sample")
            parts.append(note(f"The lowest and the highest of {of}, picked by chance."))
            parts += [_row(f"lowest {ends.column}", ends.low)]
            parts += [_row(f"highest {ends.column}", ends.high)]
    return parts


def _row(label: str, items: tuple[SheetItem, ...]) -> Html:
    cards = el("ul", *map(card, items), class_="cards", role="list")
    return el("section", cards, class_="group", aria_label=label)
