"""The section on latents: their statistics, channel by channel, against N(0, 1)."""

from collections.abc import Iterator

from wdsprep.progress import plural
from wdsprep.report.charts import distribution
from wdsprep.report.gather import Chapter, Facts
from wdsprep.report.markup import MINUS, Child, Html, el
from wdsprep.report.sections import section, unread
from wdsprep.report.spectrum import FAR, VERY_FAR, Channel, Spectrum, usual_share
from wdsprep.report.tables import note, share, table


def latents_section(facts: Facts) -> Html | None:
    chapters = [
        chapter for chapter in facts.chapters if chapter.given.manifest.dataset == "latents"
    ]
    if not chapters:
        return None
    return section("latents", "Latents", *(_chapter(chapter) for chapter in chapters))


def _chapter(chapter: Chapter) -> Iterator[Child]:
    given, spectrum = chapter.given, chapter.spectrum
    yield el("h3", given.shown)
    counts = given.manifest.counts
    yield note(
        f"{plural(counts.get('cut', 0), 'caption')} cut to what the text encoder takes, "
        f"{counts.get('empty_caption', 0):,} empty, of {given.samples:,}."
    )
    yield unread(chapter)
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
    return note("Furthest out: ", *parts, ".")
