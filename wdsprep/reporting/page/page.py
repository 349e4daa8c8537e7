"""The whole page: its head, the most important figures, links, sections and settings.

It opens from a disk and loads nothing: its content security policy allows no request, and no script
but its own, whose digest it names.
"""

import base64
import hashlib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from wdsprep.dataset.shapes import shape_name, shapes_of
from wdsprep.reporting.facts.datasets import NAME, ReportDataset
from wdsprep.reporting.facts.gather import ReportFacts, join_names
from wdsprep.reporting.page.charts import note, share, table
from wdsprep.reporting.page.contact_sheet import copies_section, sheet_section
from wdsprep.reporting.page.markup import DASH, Child, Html, el, format_sides
from wdsprep.reporting.page.scores_section import scores_section
from wdsprep.reporting.page.sections import (
    TITLES,
    buckets_section,
    funnel_section,
    hosts_section,
    latents_section,
    pace_section,
    rejects_section,
    samples_section,
    section,
)
from wdsprep.text import human_bytes, plural
from wdsprep.version import __version__


def page_of(facts: ReportFacts) -> str:
    """Return the HTML page of a report."""
    style, script = _asset("page.css"), _asset("page.js")
    made = {name: make(facts) for name, make in SECTIONS.items()}
    there = {name: made[name] for name in TITLES if made[name] is not None}
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", f"{join_names(facts.datasets.every)} · {NAME}"),
        el("link", rel="icon", href="data:,"),
        el("style", style),
    )
    body = el(
        "body",
        el("a", "Skip to the report", href="#report", class_="skip"),
        _header(facts, list(there)),
        el("main", *there.values(), id="report"),
        el("footer", f"Made by wdsprep {__version__}. This page loads nothing from anywhere."),
        el("script", script),
    )
    return f"<!DOCTYPE html>\n{el('html', head, body, lang='en')}\n"


def _asset(name: str) -> Html:
    return Html((files("wdsprep.reporting.page") / name).read_text("utf-8"))


def _policy(style: str, script: str) -> str:
    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")

    return (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest(style)}'; "
        f"script-src 'sha256-{digest(script)}'; base-uri 'none'; form-action 'none'"
    )


def _header(facts: ReportFacts, there: list[str]) -> Html:
    return el(
        "header",
        el("p", NAME, class_="kicker"),
        el("h1", join_names(facts.datasets.every)),
        el("p", *_state(facts), class_="lead"),
        el("dl", *_figures(facts), class_="figures-of-note"),
        el(
            "nav",
            el(
                "ul",
                *(el("li", el("a", TITLES[name], href=f"#{name}")) for name in there),
            ),
            aria_label="Sections",
        ),
    )


def _state(facts: ReportFacts) -> Iterator[Child]:
    for number, given in enumerate(facts.datasets.every):
        state = "complete" if given.manifest.complete else "not complete"
        yield f"{' ' if number else ''}{_describe(given)}: {state}."


def _describe(given: ReportDataset) -> str:
    if given.manifest.dataset == "images":
        return "Images"
    settings = given.manifest.settings
    if given.manifest.is_scored:
        return f"{given.shown}, scores"
    if given.is_of_text:
        return f"{given.shown}, text ({settings['text']})"
    how = f"{settings['latents']}, {settings['text']}"
    return f"{given.shown}, latents at {settings['resolution']} ({how})"


def _figures(facts: ReportFacts) -> Iterator[Html]:
    images = facts.datasets.images
    if images:
        yield _figure(
            f"{images.samples:,}", f"{_noun('image', images)}, {human_bytes(images.nbytes)}"
        )
        of = f"rejected, of {images.inputs:,}"
        yield _figure(share(images.rejected, images.inputs), of)
    for latents in facts.datasets.latents:
        size = human_bytes(latents.nbytes)
        label = f"{_noun('latent', latents)} at {latents.resolution}, {size}"
        if latents.is_of_text:
            label = f"{_noun('caption', latents)} as text, {size}"
        if latents.manifest.is_scored:
            label = f"{_noun('sample', latents)} with scores, {size}"
        yield _figure(f"{latents.samples:,}", label)


def _noun(noun: str, given: ReportDataset) -> str:
    return noun if given.samples == 1 else f"{noun}s"


def _figure(value: str, label: str) -> Html:
    return el("div", el("dt", label), el("dd", value))


def _settings_section(facts: ReportFacts) -> Html:
    parts: list[Child] = [
        note("The settings that decide the bytes of each dataset, from its manifest.")
    ]
    for given in facts.datasets.every:
        manifest = given.manifest
        shown = {**manifest.extra, **manifest.settings}
        if sizes := shapes_of(shown):
            shown["shapes"] = [shape_name(size) for size in sizes]
        for line in shown.pop("layout", ()):
            first, *others = line["shape"]
            length = f"1 to {first}" if line.get("variable") else first
            shown[line["name"]] = f"{line['dtype']} {format_sides(length, *others)}"
        rows = ((name.replace("_", "-"), el("code", _value(shown[name]))) for name in sorted(shown))
        parts += [
            el("h3", given.shown),
            note(f"At {given.url}, {plural(len(manifest.receipts), 'unit')}."),
            el(
                "details",
                el("summary", "Settings of ", given.shown),
                table(f"Settings of {given.shown}", ("setting", "value"), rows),
            ),
        ]
    return section("settings", *parts)


def _value(value: Any) -> str:
    if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
        return ", ".join(map(str, value)) or DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if value not in ("", None) else DASH


SECTIONS = {
    "funnel": funnel_section,
    "samples": sheet_section,
    "buckets": buckets_section,
    "rejects": rejects_section,
    "sizes": samples_section,
    "pace": pace_section,
    "hosts": hosts_section,
    "latents": latents_section,
    "scores": scores_section,
    "copies": copies_section,
    "settings": _settings_section,
}
