"""The contact sheet of the page. It has all items, of which the script hides some."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from wdsprep.reporting.facts.gather import ReportFacts
from wdsprep.reporting.page.charts import note
from wdsprep.reporting.page.markup import Child, Html, el
from wdsprep.reporting.page.sections import section
from wdsprep.reporting.sheet.items import SheetItem
from wdsprep.reporting.sheet.pictures import SheetPicture
from wdsprep.text import plural

PAGE_SIZES = (12, 24, 48, 96)
SHORT = 220


def sheet_section(facts: ReportFacts) -> Html | None:
    """Return the section with the contact sheet, or None if it has no samples."""
    if not facts.items:
        return None
    is_decoded = any(c.decoding and c.decoding.model for c in facts.chapters)
    groups = [(name, list(some)) for name, some in groupby(facts.items, lambda item: item.group)]
    return section(
        "samples",
        note(f"{plural(len(facts.items), 'sample')}, picked by chance with seed {facts.seed}. "),
        *_remarks(facts),
        _controls([name for name, _ in groups]),
        el(
            "div",
            *(
                el(
                    "section",
                    el("h3", name),
                    el("ul", *(card(item) for item in items), class_="cards", role="list"),
                    class_="group",
                    aria_label=name,
                    data_group=name,
                )
                for name, items in groups
            ),
            id="sheet",
            class_=None if is_decoded else "undecoded",
        ),
    )


def copies_section(facts: ReportFacts) -> Html | None:
    """Return the section with groups of copies side by side; None without a table of copies."""
    copies = facts.copies
    if copies is None:
        return None
    return section(
        "copies",
        note(
            f"{plural(len(copies.groups), 'group')} of {copies.total:,} in {copies.table}, those "
            "whose copies differ most first. The first of a group stays."
        ),
        *(
            el(
                "section",
                el("h3", f"{group.items[0].key} and {plural(group.copies, 'copy', 'copies')}"),
                el("ul", *(card(item) for item in group.items), class_="cards", role="list"),
                class_="group",
            )
            for group in copies.groups
        ),
    )


def _remarks(facts: ReportFacts) -> Iterator[Html]:
    for chapter in facts.chapters:
        decoding = chapter.decoding
        if decoding is None:
            continue
        shown = chapter.given.shown
        if decoding.model is None:
            yield note(f"{shown} is not decoded: {decoding.reason}.")
        else:
            warning = f" Beware: {decoding.reason}." if decoding.reason else ""
            yield note(f"{shown} is decoded with {decoding.model.name}.{warning}")


def _controls(groups: Sequence[str]) -> Html:
    """Return the controls of the sheet. The script shows them, since they need it."""
    return el(
        "div",
        _labelled("Search", el("input", id="search", type="search", autocomplete="off")),
        _labelled("Group", _select("group", [("", "all"), *((name, name) for name in groups)])),
        _labelled("On a page", _select("size", [(str(n), str(n)) for n in PAGE_SIZES])),
        el(
            "div",
            el("button", "Previous", type="button", id="previous"),
            el("output", id="shown", aria_live="polite"),
            el("button", "Next", type="button", id="next"),
            class_="pages",
        ),
        id="controls",
        role="search",
        aria_label="Samples",
        hidden=True,
    )


def _labelled(text: str, control: Html) -> Html:
    return el("label", el("span", text), control)


def _select(name: str, options: Sequence[tuple[str, str]]) -> Html:
    return el("select", *(el("option", text, value=value) for value, text in options), id=name)


def card(item: SheetItem, *, level: int = 4) -> Html:
    """Return the card of a sample: its pictures, caption and facts, under a heading of a level."""
    return el("li", el(f"h{level}", item.key, class_="path"), *_parts(item), class_="card")


def _parts(item: SheetItem) -> Iterator[Child]:
    if item.score:
        name, value = item.score
        yield el("p", name, " ", el("strong", value), class_="score", dir="auto")
    if item.problem:
        yield el(
            "p", f"This sample could not be read: {item.problem}", class_="problem", dir="auto"
        )
        return
    yield el("div", *(_picture(one, item.key) for one in item.pictures), class_="pictures")
    yield el("p", _short(item.caption), class_="caption", dir="auto")
    facts = [*item.facts]
    if len(item.caption) > SHORT:
        facts.append(("whole caption", item.caption))
    pairs = ((el("dt", name), el("dd", value, dir="auto")) for name, value in facts)
    yield el(
        "details",
        el("summary", "Facts", el("span", f" of {item.key}", class_="unseen")),
        el("dl", *pairs),
    )


def _short(caption: str) -> Child:
    if not caption.strip():
        return el("em", "no caption")
    return caption if len(caption) <= SHORT else f"{caption[:SHORT].rstrip()}…"


def _picture(picture: SheetPicture, key: str) -> Html:
    shown = el("p", picture.note, class_="problem", dir="auto")
    if picture.source:
        shown = el(
            "img",
            src=picture.source,
            alt=f"{key}: {picture.alt}",
            width=picture.width,
            height=picture.height,
            decoding="async",
        )
    return el(
        "figure",
        shown,
        el("figcaption", picture.title, " ", el("span", picture.measure)),
        class_=picture.kind or None,
    )
