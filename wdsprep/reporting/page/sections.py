"""The sections of the page about whole datasets: where samples went, and what they are like.

The section on latents compares their statistics, channel by channel, with N(0, 1).
"""

import time
from collections.abc import Iterator, Sequence

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.stored_dataset import phases
from wdsprep.errors import without_secrets
from wdsprep.reporting.facts.datasets import ReportDataset
from wdsprep.reporting.facts.funnel import RunPace, losses
from wdsprep.reporting.facts.gather import Chapter, ReportFacts
from wdsprep.reporting.facts.latent_statistics import FAR, VERY_FAR, Channel, Spectrum, usual_share
from wdsprep.reporting.facts.rejects import EXAMPLES, RejectSummary
from wdsprep.reporting.page.charts import (
    bar,
    columns,
    distribution,
    figure,
    histogram_figure,
    note,
    share,
    table,
)
from wdsprep.reporting.page.markup import MINUS, Child, Html, el
from wdsprep.text import human_bytes, human_time, plural

TITLES = {
    "funnel": "From source to shards",
    "samples": "Samples",
    "buckets": "Buckets and phases",
    "rejects": "Rejects",
    "sizes": "Sizes and captions",
    "pace": "Throughput",
    "hosts": "Worst hosts",
    "latents": "Latents",
    "scores": "Scores",
    "copies": "Copies",
    "settings": "Settings",
}
"""The sections of the page by name, in their order: in the menu, and as their headings."""


def section(name: str, *children: Child) -> Html:
    """Return a section of the page, with its title and a name to link to."""
    return el(
        "section",
        el("h2", TITLES[name], id=f"{name}-title"),
        *children,
        id=name,
        aria_labelledby=f"{name}-title",
    )


def funnel_section(facts: ReportFacts) -> Html:
    whole = facts.rows[0].count or 1
    rows = (
        (
            row.label,
            bar(row.start / whole, row.count / whole, "lost" if row.is_lost else "kept"),
            f"{MINUS}{row.count:,}" if row.is_lost else f"{row.count:,}",
            share(row.count, whole),
        )
        for row in facts.rows
    )
    head = ("step", "", "samples", "of the source")
    return section("funnel", table("Funnel", head, rows, numbers=2))


def buckets_section(facts: ReportFacts) -> Html:
    parts: list[Child] = []
    most = max(chapter.given.samples for chapter in facts.chapters) or 1
    for chapter in facts.chapters:
        given = chapter.given
        parts += [el("h3", given.shown), _buckets(given, most)]
        if given.manifest.dataset == "images":
            parts.append(_phases(given, most))
        if given.shapes:
            parts.append(_shapes(given, most))
    return section("buckets", *parts)


def _buckets(given: ReportDataset, most: int) -> Html:
    """Return the table of buckets. A bar of `most` samples fills its cell, here and below."""
    if not given.buckets:
        return note("There are no shards: no sample was kept, or none has been done so far.")
    counts = {b: sum(shard.samples for shard in some) for b, some in given.buckets.items()}
    rows = (
        (
            bucket,
            bar(0, counts[bucket] / most, "kept"),
            f"{counts[bucket]:,}",
            f"{len(shards):,}",
            human_bytes(sum(shard.nbytes for shard in shards)),
        )
        for bucket, shards in given.buckets.items()
    )
    head = ("bucket", "", "samples", "shards", "size")
    return table(f"Buckets of {given.shown}", head, rows, numbers=3)


def _phases(given: ReportDataset, most: int) -> Html:
    rows = (
        (
            f"phase {resolution}",
            bar(0, samples / most, "kept"),
            f"{samples:,}",
            f"{shards:,}",
        )
        for resolution, (samples, shards) in phases(given.manifest).items()
    )
    head = ("training phase", "", "samples", "shards")
    return table(f"Phases of {given.shown}", head, rows, numbers=2)


def _shapes(given: ReportDataset, most: int) -> Html:
    total = sum(given.shapes.values())
    rows = (
        (name, bar(0, count / most, "kept"), f"{count:,}", share(count, total))
        for name, count in given.shapes.items()
    )
    head = ("shape", "", "samples", "share")
    return table(f"Shapes of {given.shown}", head, rows, numbers=2)


def rejects_section(facts: ReportFacts) -> Html | None:
    chapters = [chapter for chapter in facts.chapters if chapter.given.rejected]
    if not chapters:
        return None
    most = max(count for c in chapters for count in c.given.manifest.rejects.values())
    return section("rejects", *(_rejects(chapter, most) for chapter in chapters))


def _rejects(chapter: Chapter, most: int) -> Iterator[Child]:
    given, refused = chapter.given, chapter.refused
    rejects = given.manifest.rejects
    total = given.rejected
    ranked = sorted(rejects.items(), key=lambda pair: (-pair[1], pair[0]))
    yield el("h3", given.shown)
    yield note(
        f"{plural(total, 'reject')} of {plural(given.inputs, 'sample')}: ",
        ", ".join(f"{count:,} {label}" for label, count in losses(rejects).items()),
        ".",
    )
    rows = (
        (
            el("code", code),
            Code.named(code).stage,
            bar(0, count / most, "lost"),
            f"{count:,}",
            share(count, total),
        )
        for code, count in ranked
    )
    head = ("code", "stage", "", "rejects", "share")
    yield table(f"Rejects of {given.shown} by code", head, rows, numbers=2)
    yield from _examples(refused, [code for code, _ in ranked])


def _examples(refused: RejectSummary, codes: Sequence[str]) -> Iterator[Child]:
    yield el(
        "div",
        *(
            el(
                "details",
                el("summary", "examples of ", el("code", code)),
                el("ul", *(el("li", reject_example(reject)) for reject in refused.examples[code])),
            )
            for code in codes
            if code in refused.examples
        ),
        class_="examples",
    )
    yield note(f"Up to {EXAMPLES} examples each, from {_read(refused)}.")


def _read(refused: RejectSummary) -> str:
    files = f"{plural(refused.units, 'file')} of rejects"
    if refused.units_damaged:
        damaged = f"{refused.units_damaged:,} could not be read: wdsprep verify says why"
        return f"{refused.units_read:,} of {files}, of which {damaged}"
    if refused.units_read < refused.units:
        return f"{refused.units_read:,} of {files}"
    return f"all {files}" if refused.units > 1 else "the file of rejects"


def reject_example(reject: Reject) -> Iterator[Child]:
    yield el("span", reject.source, class_="path", dir="auto")
    if reject.detail:
        yield el("span", " ", reject.detail, class_="detail", dir="auto")
    if reject.url:
        yield el("span", " ", without_secrets(reject.url), class_="path", dir="auto")


def hosts_section(facts: ReportFacts) -> Html | None:
    parts: list[Child] = []
    refusals = [chapter.refused for chapter in facts.chapters if chapter.refused.hosts]
    most = max((refused.hosts[0].failures for refused in refusals), default=0)
    for refused in refusals:
        rows = (
            (
                el("span", host.name, class_="path", dir="auto"),
                bar(0, host.failures / most, "lost"),
                ", ".join(f"{code} {count:,}" for code, count in host.codes[:3]),
                f"{host.failures:,}",
                share(host.failures, refused.failures),
            )
            for host in refused.hosts
        )
        head = ("host", "", "why", "failures", "share")
        parts.append(table("Worst hosts", head, rows, numbers=2))
        parts.append(note(f"Of {plural(refused.failures, 'failed download')} in {_read(refused)}."))
    return section("hosts", *parts) if parts else None


def samples_section(facts: ReportFacts) -> Html | None:
    """Return the section of sizes and captions, or None if there is nothing to show.

    With images it shows only these: latents made of them would repeat the same.
    """
    images = facts.datasets.images
    chapters = [c for c in facts.chapters if images is None or c.given is images]
    parts: list[Child] = []
    for chapter in chapters:
        shown = chapter.given.shown
        figures = [histogram_figure(one, label=shown) for one in chapter.surveyed.histograms]
        if figures:
            parts += [el("h3", shown), el("div", *figures, class_="figures")]
            parts.append(unread_note(chapter))
    return section("sizes", *parts) if parts else None


def unread_note(chapter: Chapter) -> Html | None:
    """Return a note on picked samples that could not be read, or None if all could."""
    surveyed = chapter.surveyed
    if not (lost := surveyed.picked - len(surveyed.samples)):
        return None
    return note(
        f"{lost:,} of {plural(surveyed.picked, 'picked sample')} could not be read: "
        "wdsprep verify says why.",
        is_problem=True,
    )


def pace_section(facts: ReportFacts) -> Html:
    figures = [_pace(c.given.shown, c.pace) for c in facts.chapters if c.pace]
    without_pace = [c.given.shown for c in facts.chapters if not c.pace]
    return section(
        "pace",
        el("div", *figures, class_="figures") if figures else None,
        note(
            f"{' and '.join(without_pace)}: too few units for a rate. The command that made them "
            "printed how fast it was."
        )
        if without_pace
        else None,
        note(
            "From the times at which receipts were written, without pauses. A copied dataset may "
            "have other times, and a unit that was done again has the time of the last run."
        )
        if figures
        else None,
    )


def _pace(shown: str, pace: RunPace) -> Html:
    width = pace.active_s / len(pace.rates)
    paused = f", with {plural(pace.pauses, 'pause')}" if pace.pauses else ""
    says = (
        f"{_rate(pace.mean)} samples a second, over {_span(pace.active_s)}{paused}; "
        f"{_moments(pace.first_s, pace.last_s)}"
    )
    rows = [(_span(number * width), _rate(rate)) for number, rate in enumerate(pace.rates)]
    bars = [
        (at, f"after {at}: {told} samples a second", rate)
        for (at, told), rate in zip(rows, pace.rates, strict=True)
    ]
    return figure(
        shown,
        says,
        columns(bars, f"{shown}: {says}", peak=f"{_rate(max(pace.rates))}/s", gap=0.06),
        table(f"Throughput of {shown}", ("after", "samples a second"), rows, numbers=1),
    )


def _rate(rate: float) -> str:
    return f"{rate:,.1f}" if rate >= 1 else f"{rate:.2g}"


def _span(seconds: float) -> str:
    return human_time(seconds) if seconds >= 10 or not seconds else f"{seconds:.1f} s"


def _moments(first_s: float, last_s: float) -> str:
    first, last = (time.strftime("%Y-%m-%d %H:%M", time.gmtime(at)) for at in (first_s, last_s))
    same_day = first[:10] == last[:10]
    return f"{first} to {last[11:] if same_day else last} UTC"


def latents_section(facts: ReportFacts) -> Html | None:
    chapters = [
        chapter
        for chapter in facts.chapters
        if chapter.given.manifest.dataset == "latents" and not chapter.given.manifest.is_scored
    ]
    if not chapters:
        return None
    return section("latents", *(_chapter(chapter) for chapter in chapters))


def _chapter(chapter: Chapter) -> Iterator[Child]:
    given, spectrum = chapter.given, chapter.spectrum
    yield el("h3", given.shown)
    counts = given.manifest.counts
    yield note(
        f"{plural(counts.get('cut', 0), 'caption')} cut to the length of the text encoder, "
        f"{counts.get('empty_caption', 0):,} empty, of {given.samples:,}."
    )
    yield unread_note(chapter)
    if given.is_of_text:
        yield note("This dataset holds text alone, and no latents.")
        return
    if spectrum is None:
        yield note("None of the latents that were picked could be read.")
        return
    kind = "means" if given.manifest.settings["latents"] == "moments" else "values"
    picked = "" if chapter.surveyed.picked == given.samples else " picked by chance"
    unsound = f" {spectrum.unsound:,} more could not be used." if spectrum.unsound else ""
    yield note(
        f"The {kind} of {plural(spectrum.samples, 'latent')}{picked}, as a trainer takes them, "
        f"against the normal distribution that they should be like.{unsound}"
    )
    yield _table(given.shown, spectrum)
    yield el("div", *(_bell(at, one) for at, one in enumerate(spectrum.channels)), class_="bells")
    yield _extremes(spectrum)


def _table(shown: str, spectrum: Spectrum) -> Html:
    head = (
        "channel",
        "mean",
        "std",
        "least",
        "most",
        f"beyond ±{FAR:.0f}",
        f"beyond ±{VERY_FAR:.0f}",
    )
    rows: list[tuple[Child, ...]] = [
        (
            f"{at}",
            _signed(one.mean, 3),
            f"{one.std:.3f}",
            _signed(one.least, 2),
            _signed(one.most, 2),
            share(one.far, 1),
            share(one.very_far, 1),
        )
        for at, one in enumerate(spectrum.channels)
    ]
    usual = (share(usual_share(beyond), 1) for beyond in (FAR, VERY_FAR))
    rows.append(("N(0, 1)", "0", "1", "", "", *usual))
    return table(f"Statistics of {shown} by channel", head, rows, numbers=6)


def _bell(at: int, channel: Channel) -> Html:
    says = f"mean {_signed(channel.mean, 2)}, std {channel.std:.2f}"
    label = f"channel {at}: {says}; the curve is N(0, 1), from {MINUS}5 to 5"
    return el(
        "figure",
        el("figcaption", el("strong", f"channel {at}"), " ", el("span", says)),
        distribution(channel, label),
        el(
            "p",
            el("span", f"{MINUS}5"),
            el("span", "0"),
            el("span", "5"),
            class_="scale",
            aria_hidden="true",
        ),
    )


def _signed(value: float, places: int) -> str:
    return f"{value:+.{places}f}".replace("-", MINUS)


def _extremes(spectrum: Spectrum) -> Html:
    parts = []
    for number, one in enumerate(spectrum.extremes):
        parts += [", "] if number else []
        parts += [el("code", one.key), f" ({_signed(one.value, 1)} in channel {one.channel})"]
    return note("Most extreme values: ", *parts, ".")
