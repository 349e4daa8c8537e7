"""What `wdsprep pack` says on the way and at the end."""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from wdsprep.cli.output import (
    ProgressLine,
    broken_tars_lines,
    left_out_lines,
    memory_lines,
    rejects_lines,
)
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.reject_codes import Code, by_stage
from wdsprep.dataset.state import phases
from wdsprep.packing.pack import PackListener
from wdsprep.packing.retry_rejected import retryable
from wdsprep.packing.slices import SourceSurvey
from wdsprep.runners.run import Outcome, RunStatus
from wdsprep.sources import LeftOut
from wdsprep.text import human_bytes, human_counts, human_time, plural, printed

if TYPE_CHECKING:
    from wdsprep.sources.image_tables import TableSource
    from wdsprep.sources.url_tables import UrlSource


WORST_HOSTS = 5
ALLOWING = {
    Code.PRIVATE_ADDRESS: ("allow_private_hosts", "allow_s3"),
    Code.DISALLOWED: ("ignore_robots", "ignore_opt_outs"),
    Code.TOO_MANY_BYTES: ("max_bytes",),
}
"""The options that allow to fetch what has these codes."""


class PackShow:
    """Prints what the source is, a progress line, and at the end what came of it."""

    def __init__(self, source: str, options: Mapping[str, Any], *, as_json: bool) -> None:
        self._source, self._options, self._as_json = source, options, as_json
        self._fetches = False
        self._line = ProgressLine()
        self.listener = PackListener(listed=self._listed, found=self._found, status=self._status)

    def _listed(self, count: int) -> None:
        self._line.show(f"listing the source: {count:,} so far")

    def _found(self, survey: SourceSurvey) -> None:
        self._line.say(f"{self._source}: {describe(survey)}")
        self._fetches = survey.source.kind == "urls"
        self._line = ProgressLine()

    def _status(self, status: Callable[[], RunStatus]) -> None:
        self._line.offer(lambda: self._text(status()))

    def _text(self, status: RunStatus) -> str:
        elapsed = self._line.elapsed_s
        done = status.samples + sum(status.rejects.values())
        parts = [
            f"{status.samples:,} images",
            f"{done / elapsed:,.0f} images/s",
            f"{human_bytes(status.nbytes / elapsed)}/s",
            f"slice {status.units_done:,} of {status.units:,}",
        ]
        if self._fetches and done:
            parts.insert(2, f"{_fetched_share(status.samples, status.rejects):.0%} fetched")
        return ", ".join([*parts, *status.remarks(elapsed)])

    def result(self, packed: Outcome, images: str) -> str:
        """The end of a run, for a person or for a program."""
        self._line.clear()
        if self._as_json:
            return json.dumps(_facts(packed, images), sort_keys=True)
        return printed(_summary(packed, images, self._options, self._line.elapsed_s))


def describe(survey: SourceSurvey) -> str:
    """What a source is, in one line."""
    kind = survey.source.kind
    if kind == "folder":
        return f"{plural(survey.samples, 'image')} in a folder, {survey.captioned:,} with captions"
    size = human_bytes(survey.nbytes)
    if kind == "tars":
        return f"{plural(survey.count, 'tar')}, {size}"
    source = cast("TableSource | UrlSource", survey.source)
    image, caption = source.chosen()
    if kind == "urls":
        columns = f"{plural(survey.samples, 'URL')} to download"
        if cast("UrlSource", source).is_list:
            return f"{columns}, without captions"
        columns += f", in column {image!r}"
    else:
        rows = plural(survey.samples, "row")
        columns = f"{rows} of image bytes in Parquet, images in {image!r}"
    if caption:
        return f"{columns}, captions in {caption!r}"
    return f"{columns}, no captions (--caption-col names their column)"


def _fetched_share(samples: int, rejects: Mapping[str, int]) -> float:
    """Of the images that were asked for."""
    stages = by_stage(rejects)
    asked = samples + stages["fetch"] + stages["check"]
    return (asked - stages["fetch"]) / asked if asked else 1.0


def _fetch_report(packed: Outcome, options: Mapping[str, Any]) -> list[str]:
    """How much could be fetched, which hosts failed most in this run, and what may yet be had."""
    manifest = packed.manifest
    if manifest.settings["source"] != "urls":
        return []
    lines = [
        f"{_fetched_share(manifest.samples, manifest.rejects):.1%} of the images could be fetched"
    ]
    if packed.failed_hosts:
        lines.append(f"worst hosts: {human_counts(packed.failed_hosts, WORST_HOSTS)}")
    if count := retryable(manifest):
        lines.append(
            f"{count:,} failed in a way that may pass: --retry-rejected fetches them again"
        )
    return [*lines, *_forbidden_lines(packed, options)]


def _forbidden_lines(packed: Outcome, options: Mapping[str, Any]) -> Iterator[str]:
    """What was forbidden, with what allows it; or, where that is given, how it is done. Who asks to
    be left alone is not to be asked again unless the user says so first."""
    manifest = packed.manifest
    for code, names in ALLOWING.items():
        count = manifest.rejects.get(code.value, 0)
        given = [f"--{name.replace('_', '-')}" for name in names if options.get(name)]
        if code is Code.TOO_MANY_BYTES and given:
            given = given if options["max_bytes"] > manifest.settings["max_bytes"] else []
        if count and given and packed.units_before and not options["retry_rejected"]:
            yield (
                f"{count:,} rejected as {code}, some before {' and '.join(given)}: run again with "
                "--retry-rejected to fetch what that allows"
            )
        elif count and not given and code is Code.PRIVATE_ADDRESS:
            yield (
                f"{code} {count:,}: --retry-rejected --allow-private-hosts fetches them, or "
                "--allow-s3 where their URLs are s3://"
            )
        elif count and not given and code is Code.TOO_MANY_BYTES:
            yield f"{code} {count:,}: --retry-rejected with a larger --max-bytes fetches them"


def _summary(
    packed: Outcome, images: str, options: Mapping[str, Any], elapsed_s: float
) -> list[str]:
    manifest = packed.manifest
    lines = [
        _headline(packed, elapsed_s),
        "",
        f"{'bucket':>8} {'samples':>12} {'shards':>8} {'size':>10}",
    ]
    for bucket in manifest.settings["buckets"]:
        shards = [shard for shard in manifest.shards if shard.bucket == bucket]
        samples = sum(shard.samples for shard in shards)
        size = human_bytes(sum(shard.nbytes for shard in shards))
        lines.append(f"{bucket:>8} {samples:>12,} {len(shards):>8,} {size:>10}")
    lines.append("")
    for resolution, (samples, shards_of) in phases(manifest).items():
        lines.append(
            f"phase {resolution}: {plural(samples, 'sample')} in {plural(shards_of, 'shard')}"
        )
    lines += rejects_lines(manifest.rejects, images)
    lines += left_out_lines(_left_out(manifest))
    lines += _fetch_report(packed, options)
    for failed in packed.quarantined:
        lines.append(
            f"slice {failed.unit.name} failed {plural(failed.attempts, 'time')} and is left out: "
            f"{failed.reason}"
        )
    lines += broken_tars_lines(packed.broken_tars, images)
    if packed.quarantined:
        lines += memory_lines(packed.quarantined, "--max-area")
        lines.append("run the same command again to retry what is left out")
    elif manifest.shards:
        where = "" if images == "shards/images" else f"{shlex.quote(images)} "
        lines.append(f"next: wdsprep encode {where}--resolution {_first_phase(manifest)}")
    else:
        lines.append(f"nothing of the source was kept: {images}/rejects/ says why of each sample")
    return lines


def _left_out(manifest: Manifest) -> dict[str, int]:
    """Files beside the items of the source, and in its tars."""
    beside: Mapping[str, int] = manifest.extra.get("left_out", {})
    return dict(LeftOut.among(manifest.counts) + Counter(beside))


def _first_phase(manifest: Manifest) -> int:
    return next(resolution for resolution, (samples, _) in phases(manifest).items() if samples)


def _headline(packed: Outcome, elapsed_s: float) -> str:
    before = plural(packed.units_before, "slice")
    if len(packed.manifest.receipts) == packed.units_before and not packed.quarantined:
        return f"nothing left to do: {before} packed before"
    new = f"{plural(packed.samples, 'image')} packed in {human_time(elapsed_s)}"
    return new + (f", after {before} packed before" if packed.units_before else "")


def _facts(packed: Outcome, images: str) -> dict[str, Any]:
    manifest = packed.manifest
    return {
        "complete": manifest.complete,
        "broken_tars": packed.broken_tars,
        "failed_hosts": packed.failed_hosts,
        "images": images,
        "left_out": _left_out(manifest),
        "packed": packed.samples,
        "packed_bytes": packed.nbytes,
        "phases": {
            str(resolution): {"samples": samples, "shards": shards}
            for resolution, (samples, shards) in phases(manifest).items()
        },
        "quarantined": [failed.unit.name for failed in packed.quarantined],
        "rejects": manifest.rejects,
        "retryable": retryable(manifest),
        "samples": manifest.samples,
        "shards": len(manifest.shards),
        "slices": len(manifest.receipts),
        "slices_before": packed.units_before,
    }
