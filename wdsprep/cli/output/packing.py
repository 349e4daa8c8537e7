"""The output of `wdsprep pack`: the source, progress, and the result."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from wdsprep.cli.output.shared import (
    CommandOutput,
    KeptLine,
    captionless_lines,
    left_out_lines,
    rejected_lines,
    rejects_lines,
)
from wdsprep.dataset.coarse_histograms import IN_ROLE, REPEATS
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.reject_codes import Code, by_stage
from wdsprep.dataset.rejects import rejects_in
from wdsprep.dataset.samples import TARGET, roles_of
from wdsprep.dataset.stored_dataset import phases
from wdsprep.options import remedies_of
from wdsprep.packing.options import PackOptions
from wdsprep.packing.retry_rejected import retryable
from wdsprep.packing.slices import SourceSurvey
from wdsprep.reporting.overview import bucket_lines, images_from, overview
from wdsprep.runners.job import JobStatus
from wdsprep.runners.run import Outcome
from wdsprep.sources.base import left_out_among
from wdsprep.sources.captions import CAPTIONS, NAMES, first_of
from wdsprep.store import open_store
from wdsprep.text import command_line, human_bytes, human_counts, plural

if TYPE_CHECKING:
    from wdsprep.sources.table_sources import TableSource


KOHYA = ".caption"
"""The extension of the captions that kohya's tools write."""
USUAL_RESOLUTIONS = (256, 512, 768, 1024)
"""Resolutions that people train at. Each is an edge of the histogram of shorter sides."""
WORST_HOSTS = 5
AGAIN = "--retry-rejected fetches them again"
REMEDIES: dict[str, str] = {
    **remedies_of(PackOptions),
    Code.NO_IMAGE: "put each image beside its caption, with the same name",
    Code.ROLE_GAP: "number the images of a role without gaps, and put nulls behind them",
    Code.BAD_URL: "give URLs that begin with http:// or https://",
    Code.DISALLOWED: "their owners want no training on them",
    **dict.fromkeys((Code.DNS, Code.REFUSED, Code.UNREACHABLE, Code.TIMEOUT), AGAIN),
    **dict.fromkeys((Code.BROKEN_OFF, Code.HTTP_429, Code.HTTP_5XX), AGAIN),
}
"""The advice for a run that packed nothing, by the reason of most rejects."""
RETRIES: dict[str, str] = {
    Code.PRIVATE_ADDRESS: "--retry-rejected --allow-private-hosts fetches them, or --allow-s3 "
    "where their URLs are s3://, gs://, az:// or hf://",
    Code.TOO_MANY_BYTES: "--retry-rejected with a larger --max-bytes fetches them",
}
"""The options that fetch what was forbidden. What its owners forbid is not among that."""


class PackOutput(CommandOutput[Outcome]):
    """The output of `pack`: the source, a progress line, and the result."""

    unit, touched, done = "slice", "touched input", "packed"
    counted, place_name = "image", "images"
    _fetches = False

    def on_begin(self, survey: SourceSurvey) -> None:
        self.on_message(f"{self.options['source']}: {describe(survey)}")
        self._fetches = survey.source.kind == "urls"
        self.start_counting()

    def details(self, status: JobStatus) -> list[str]:
        parts = [f"{human_bytes(status.nbytes / self.working_s)}/s"]
        if self._fetches and (status.samples or status.rejects):
            parts.append(f"{_fetched_share(status.samples, status.rejects):.0%} fetched")
        return parts

    def facts(self, packed: Outcome) -> Iterator[dict[str, Any]]:
        manifest = packed.manifest
        yield {
            **self.outcome_facts(packed, self.options["images"]),
            "captionless": packed.captionless,
            "failed_hosts": packed.failed_hosts,
            "left_out": _left_out(manifest),
            "phases": overview(manifest)["phases"],
            "retryable": retryable(manifest),
            "slices": len(manifest.receipts),
        }

    def summary(self, packed: Outcome) -> Iterator[str]:
        manifest, images = packed.manifest, self.options["images"]
        is_fetched, resolutions = manifest.settings["source"] == "urls", phases(manifest)
        yield self.headline([packed])
        if manifest.shards:
            yield from ("", *bucket_lines(overview(manifest)["buckets"]), "")
            usual = (side for side in USUAL_RESOLUTIONS if side > min(resolutions))
            sides = sorted({*resolutions, *usual})
            parts = [f"{images_from(manifest, side):,} at {side}" for side in sides]
            yield f"images large enough to encode: {', '.join(parts)}"
        yield from rejects_lines(manifest.rejects, images)
        yield from left_out_lines(_left_out(manifest))
        if is_fetched:
            yield from _fetch_report(packed, self.options)
        yield from self.failed_units(packed, images)
        yield from captionless_lines(packed) if packed.has_captions else [_captionless(manifest)]
        named = ((name.partition(REPEATS)[2], count) for name, count in manifest.counts.items())
        repeats = sorted((int(n), count) for n, count in named if n.isdecimal() and len(n) < 20)
        if repeats:
            parts = [f"{plural(count, 'image')} x {times}" for times, count in repeats]
            yield f"repeats: {', '.join(parts)}"
        if roles := roles_of(manifest.settings):
            counts = {role: manifest.counts.get(f"{IN_ROLE}{role}", 0) for role in roles}
            parts = [f"{plural(count, 'sample')} with {role}" for role, count in counts.items()]
            yield f"roles: {', '.join(parts)}"
        yield from self.retry_lines([packed])
        remedies = REMEDIES | (RETRIES if is_fetched else {})
        if packed.is_void and Code.NO_FIELD in manifest.rejects:
            unit = next(r.unit for r in manifest.receipts if Code.NO_FIELD in r.rejects)
            rejects = rejects_in(open_store(images), unit)
            detail = next(r.detail for r in rejects if r.code is Code.NO_FIELD)
            remedies[Code.NO_FIELD] = (
                f'--filter asks for what their json or row lacks, such as "{detail}": for sizes '
                "give --min-size, or select --where afterwards"
            )
        yield from rejected_lines(packed, images, remedies)
        if manifest.shards and not packed.quarantined:
            smallest = next(side for side, (samples, _) in resolutions.items() if samples)
            words = [] if images == "shards/images" else [images]
            words += ["--resolution", str(smallest)]
            if roles:
                words += ["--roles", ",".join((TARGET, *roles))]
            yield f"next: {command_line('encode', *words)}, with --model tiny for a trial"


def describe(survey: SourceSurvey) -> str:
    """Return a line about a source: its kind, and what it has."""
    kind = survey.source.kind
    if kind == "folder":
        images = (
            f"{plural(survey.samples, 'image')} in a folder, {survey.captioned:,} with captions"
        )
        unlisted = f", {survey.unlisted:,} in no row of its metadata" if survey.unlisted else ""
        return images + unlisted
    size = human_bytes(survey.nbytes)
    if kind == "tars":
        return f"{plural(survey.count, 'tar')}, {size}"
    source = cast("TableSource", survey.source)
    image, names = source.columns_of(next(survey.items()))
    caption = source.columns.caption or first_of(NAMES, names)
    if kind == "urls":
        columns = f"{plural(survey.samples, 'URL')} to download"
        if source.kinds == {"txt"}:  # lists
            return f"{columns}, without captions"
        columns += f", in column {image!r}"
    else:
        form = source.form
        rows = plural(survey.samples, "row") if survey.samples else plural(survey.count, "file")
        columns = f"{rows} of image bytes in {form}, images in {image!r}"
    if caption:
        return f"{columns}, captions in {caption!r}"
    return f"{columns}, no captions (give their column with --caption-col)"


def _fetched_share(samples: int, rejects: Mapping[str, int]) -> float:
    """Return the share of the images that could be fetched."""
    stages = by_stage(rejects)
    asked = samples + stages["fetch"] + stages["check"]
    return (asked - stages["fetch"]) / asked if asked else 1.0


def _fetch_report(packed: Outcome, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines on how much was fetched, the worst hosts, and what another run may fetch.

    What was forbidden is mentioned with the options that allow it. Images whose owner asked to be
    left alone are mentioned only after the user has allowed them.
    """
    manifest = packed.manifest
    share = _fetched_share(manifest.samples, manifest.rejects)
    yield f"{share:.1%} of the images could be fetched"
    codes: dict[str, Counter[str]] = {}
    for name, count in packed.failed_hosts.items():  # such as "example.org (timeout)"
        host, _, failure = name.rpartition(" (")
        codes.setdefault(host, Counter())[failure.rstrip(")")] += count
    if worst := sorted(codes, key=lambda host: (-codes[host].total(), host)):
        hosts = [f"{host} ({human_counts(codes[host])})" for host in worst[:WORST_HOSTS]]
        yield f"worst hosts: {', '.join([*hosts, *['...'] * (len(worst) > WORST_HOSTS)])}"
    if count := retryable(manifest):
        yield f"{count:,} failed in a way that may pass: --retry-rejected fetches them again"
    retries = dict(RETRIES)
    allows = options["ignore_robots"] or options["ignore_opt_outs"]
    if allows and packed.units_before and not options["retry_rejected"]:
        retries[Code.DISALLOWED] = "--retry-rejected fetches those that are allowed now"
    for code, how in retries.items():
        if count := manifest.rejects.get(code, 0):
            yield f"{code} {count:,}: {how}"


def _captionless(manifest: Manifest) -> KeptLine:
    settings, others = manifest.settings, _left_out(manifest)
    remedy = "put the caption of a.jpg into a.txt beside it, or write a metadata.jsonl"
    if column := settings["caption_col"]:
        remedy = f"nothing has a field {column!r}: give another --caption-col, or none"
    elif settings["source"] in ("table", "urls"):
        remedy = "give a table with a column of captions, by --caption-col if it is not recognised"
    elif named := settings.get("caption_ext"):
        remedy = f"no text beside an image ends in {' or '.join(named)}: give another --caption-ext"
    if beside := next((kind for kind in others if kind[0] == "." and " in " in kind), ""):
        extension, _, role = beside.split()
        files = plural(others[beside], f"{extension} file")
        remedy = f"{files} lie beside images in {role}: if those are the targets, exchange the two"
    for kind in (*CAPTIONS, KOHYA):
        if settings["source"] in ("folder", "tars") and (count := others.get(kind, 0)):
            remedy = f"--caption-ext {kind} takes those of {plural(count, f'{kind} file')}"
    return KeptLine(f"warning: no sample has a caption: {remedy}; then pack again with --overwrite")


def _left_out(manifest: Manifest) -> dict[str, int]:
    """Return how many files of each kind were left out: of the source, and of its tars."""
    beside: Mapping[str, int] = manifest.extra.get("left_out", {})
    return dict(left_out_among(manifest.counts) + Counter(beside))
