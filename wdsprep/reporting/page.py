"""The page of a report: gather what it says, and fill the template `page.html` with it.

The template escapes whatever is put into it. Captions, names, hosts and keys come from the web.
What looks like an element, a comment or the end of an attribute in them becomes text on the page,
and characters that no text should have become replacement characters.

The page opens from a disk and loads nothing: its content security policy allows no request, and no
script but its own, whose digest it names.
"""

import base64
import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from math import pi, sqrt
from typing import Any

import jinja2
import numpy as np

from wdsprep.dataset.reject_codes import Code
from wdsprep.errors import without_secrets
from wdsprep.reporting.contact_sheet import Sheet, column_ends, count_items
from wdsprep.reporting.datasets import Datasets, ReportDataset
from wdsprep.reporting.distributions import (
    FAR,
    SIDES,
    VERY_FAR,
    Bar,
    spectrum_of,
    survey_of,
    usual_share,
)
from wdsprep.reporting.funnel import EXAMPLES, funnel, look_at_rejects, losses, pace_of
from wdsprep.reporting.options import ReportOptions
from wdsprep.reporting.overview import setting_texts
from wdsprep.reporting.pictures import decoder_loader, find_decoding, model_name
from wdsprep.text import Counting, human_bytes, human_time, plural
from wdsprep.version import __version__


def plan_of(datasets: Datasets, samples: int, model: str) -> str:
    """Return a line for the user that says what the report will show and decode."""
    shown, latents = count_items(datasets, samples)
    names = {model_name(dataset, model) for dataset in datasets.latents if dataset.has_latents}
    plan = f"{datasets.title}: {plural(shown, 'sample')} to show"
    if not latents or not any(names):
        return plan
    return (
        f"{plan}, up to {plural(latents, 'latent')} to decode with "
        f"{' and '.join(sorted(filter(None, names)))}: without a GPU this can take minutes "
        "(--model none leaves it out)"
    )


def gather(datasets: Datasets, options: ReportOptions) -> dict[str, Any]:
    """Gather the facts of a report: read receipts, and a bounded number of samples and rejects.

    The listener of the options gets a line for each model that is loaded, and hears what is being
    done now.
    """
    listener, seed, max_area = options.listener_or_mute, options.seed, options.max_area
    copies = None
    if options.duplicates:
        from wdsprep.reporting.copies import choose_copies  # pyarrow is slow to import

        table = os.fspath(options.duplicates)
        copies = choose_copies(datasets, table, max_area, listener.on_step)
    decodings = {
        dataset.shown: find_decoding(dataset, options.model)
        for dataset in datasets.latents
        if dataset.has_latents
    }

    def chapter(dataset: ReportDataset) -> dict[str, Any]:
        def counts(noun: str, many: str = "") -> Counting:
            return lambda done, of: listener.on_step(
                f"{done:,} of {plural(of, noun, many)} read: {dataset.shown}"
            )

        surveyed = survey_of(dataset, f"survey {seed}", counts("sample"))
        samples, settings = surveyed["samples"], dataset.manifest.settings
        of_files = counts("file of rejects", "files of rejects")
        return {
            "dataset": dataset,
            "refused": look_at_rejects(dataset, f"rejects {seed}", of_files),
            "pace": pace_of(dataset),
            "surveyed": surveyed,
            "spectrum": spectrum_of(samples, settings) if dataset.has_latents else None,
            "decoding": decodings.get(dataset.shown),
            "ends": [*column_ends(datasets.images, dataset, samples=samples, max_area=max_area)],
        }

    sheet = Sheet(datasets, decodings, decoder_loader(listener.on_message), options)
    chapters = list(map(chapter, datasets.every))
    groups = sheet.groups()
    return {
        "datasets": datasets,
        "funnel": list(funnel(datasets)),
        "chapters": chapters,
        "groups": groups,
        "samples": sum(map(len, groups.values())),
        "copies": copies,
        "seed": seed,
    }


NAME = "wdsprep report"
MARK = f" · {NAME}</title>".encode()
"""The text near the start of each report that distinguishes it from other pages."""
MINUS, DASH = "\N{MINUS SIGN}", "\N{EN DASH}"
UNREADABLE = "\N{REPLACEMENT CHARACTER}"
# Control characters except tab and line feed, and halves of surrogate pairs, which JSON may have.
_BAD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
CURVE_POINTS = 60
SHORT = 220


def page_of(facts: Mapping[str, Any]) -> str:
    """Return the HTML page of a report with the facts that `gather` returns."""
    template, style, script = map(_asset, ("page.html", "page.css", "page.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{_digest(style)}'; "
        f"script-src 'sha256-{_digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    return fill(template, facts=facts, policy=policy, style=style, script=script)


def fill(template: str, **values: Any) -> str:
    """Return a template filled with values, all of which become text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {
        "NAME": NAME,
        "EXAMPLES": EXAMPLES,
        "FAR": FAR,
        "VERY_FAR": VERY_FAR,
        "SHORT": SHORT,
        "MINUS": MINUS,
        "Code": Code,
        "version": __version__,
        "n": "{:,}".format,
        **{function.__name__: function for function in FUNCTIONS},
    }
    return _BAD.sub(UNREADABLE, environment.from_string(template).render(values))


def _asset(name: str) -> str:
    return (files("wdsprep.reporting") / name).read_text("utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")


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


def percent(share: float) -> str:
    """Return a place or a width of a drawing, in percent of it."""
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def signed(value: float, places: int) -> str:
    return f"{value:+.{places}f}".replace("-", MINUS)


def rate(inputs_per_s: float) -> str:
    return f"{inputs_per_s:,.1f}" if inputs_per_s >= 1 else f"{inputs_per_s:.2g}"


def span(seconds: float) -> str:
    return human_time(seconds) if seconds >= 10 or not seconds else f"{seconds:.1f} s"


def pace_bars(pace: Mapping[str, Any]) -> list[Bar]:
    """Return a bar for each period of a run: after which time it begins, and its rate."""
    period = pace["active_s"] / len(pace["rates"])
    return [
        {"label": span(at * period), "range": rate(height), "height": height}
        for at, height in enumerate(pace["rates"])
    ]


def moments(first_s: float, last_s: float) -> str:
    """Return two times, the second without its date if that is the same."""
    first, last = (time.strftime("%Y-%m-%d %H:%M", time.gmtime(at)) for at in (first_s, last_s))
    return f"{first} to {last[11:] if first[:10] == last[:10] else last} UTC"


def bell_paths(shares: Sequence[float]) -> tuple[str, str]:
    """Return the paths of a channel's distribution, and of the bell curve that it should fill."""
    count = len(shares)
    z = np.linspace(-SIDES, SIDES, CURVE_POINTS + 1)
    bell = 2 * SIDES / count * np.exp(-z * z / 2) / sqrt(2 * pi)
    most = max(*shares, bell.max()) * 1.08
    steps = " ".join(
        f"H{100 * number / count:.2f}V{100 - 100 * share / most:.2f}"
        for number, share in enumerate(shares)
    )
    curve = "L".join(
        f"{x:.2f} {y:.2f}" for x, y in zip(10 * (z + SIDES), 100 - 100 * bell / most, strict=True)
    )
    return f"M0 100{steps}H100V100Z", f"M{curve}"


FUNCTIONS: list[Callable[..., object]] = [share, percent, signed, rate, span, moments]
FUNCTIONS += [pace_bars, bell_paths, setting_texts, usual_share, losses]
FUNCTIONS += [human_bytes, plural, without_secrets]
