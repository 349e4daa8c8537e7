"""What `wdsprep pack` says on the way and at the end, and how its options become a library call."""

import json
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from wdsprep.buckets import parse_buckets
from wdsprep.errors import UsageError
from wdsprep.filters import Filter
from wdsprep.images import Recode
from wdsprep.manifest import Manifest
from wdsprep.pack import Listener, pack, phases
from wdsprep.packer import Rules
from wdsprep.progress import ProgressLine, human_bytes, human_counts, human_time, plural
from wdsprep.resume import Survey
from wdsprep.run import Outcome, Status
from wdsprep.runners import make_runner
from wdsprep.runners.local import usable_cpus
from wdsprep.sources import Columns

if TYPE_CHECKING:
    from wdsprep.sources.table import TableSource


def pack_request(source: str, images: str, listener: Listener, **options: Any) -> Outcome:
    """Call `pack` as the command line asks."""
    condition = Filter(options["condition"]) if options["condition"] else None
    if options["append"] and options["overwrite"]:
        raise UsageError("--append keeps what is packed, --overwrite removes it: give one of them")
    if 0 < options["max_caption"] < options["min_caption"]:
        raise UsageError("--max-caption is below --min-caption: no caption fits both")
    if options["max_side"] and not options["reencode"]:
        raise UsageError("--max-side needs --reencode: a smaller image is a new image")
    recode = options["reencode"] and Recode(
        quality=options["reencode"], max_side=options["max_side"]
    )
    same = ("samples_per_shard", "min_size", "max_area", "max_aspect_ratio")
    rules = Rules(
        buckets=parse_buckets(options["buckets"]),
        max_shard_nbytes=options["max_shard_size"],
        full_check=options["check"] == "full",
        min_caption=options["min_caption"],
        max_caption=options["max_caption"],
        filter=condition,
        recode=recode or None,
        **{name: options[name] for name in same},
    )
    columns = Columns(
        image=options["image_col"],
        caption=options["caption_col"],
        filtered=tuple(sorted(condition.names - {"caption"})) if condition else (),
    )
    workers = options["workers"]
    if options["runner"] == "local":
        workers = workers or usable_cpus()
    return pack(
        source,
        images,
        rules=rules,
        columns=columns,
        make_runner=lambda count: make_runner(
            options["runner"],
            workers=count,
            max_attempts=options["max_attempts"],
            address=options["ray_address"],
            name="pack",
        ),
        workers=workers,
        limit=options["limit"] or 0,
        append=options["append"],
        overwrite=options["overwrite"],
        listener=listener,
    )


class PackShow:
    """Prints what the source is, a progress line, and at the end what came of it."""

    def __init__(self, source: str, *, as_json: bool) -> None:
        self._source, self._as_json = source, as_json
        self._line = ProgressLine()
        self.listener = Listener(listed=self._listed, found=self._found, status=self._status)

    def _listed(self, count: int) -> None:
        self._line.show(f"listing the source: {count:,} so far")

    def _found(self, survey: Survey) -> None:
        self._line.say(f"{self._source}: {describe(survey)}")
        self._line = ProgressLine()

    def _status(self, status: Callable[[], Status]) -> None:
        if self._line.due:
            self._line.show(self._text(status()))

    def _text(self, status: Status) -> str:
        elapsed = self._line.elapsed_s
        done = status.samples + sum(status.rejects.values())
        parts = [
            f"{status.samples:,} images",
            f"{done / elapsed:,.0f} images/s",
            f"{human_bytes(status.nbytes / elapsed)}/s",
            f"slice {status.units_done:,} of {status.units:,}",
        ]
        return ", ".join([*parts, *status.remarks(elapsed)])

    def result(self, packed: Outcome, images: str) -> str:
        """The end of a run, for a person or for a program."""
        self._line.clear()
        if self._as_json:
            return json.dumps(_facts(packed, images), sort_keys=True)
        return "\n".join(_summary(packed, images, self._line.elapsed_s))


def describe(survey: Survey) -> str:
    """What a source is, in one line."""
    kind = survey.source.kind
    if kind == "folder":
        return f"{plural(survey.samples, 'image')} in a folder, {survey.captioned:,} with captions"
    size = human_bytes(survey.nbytes)
    if kind == "tars":
        return f"{plural(survey.count, 'tar')}, {size}"
    rows = f"{plural(survey.samples, 'row')} of image bytes in Parquet"
    image, caption = cast("TableSource", survey.source).chosen()
    return (
        f"{rows}, images in {image!r}, captions in {caption!r}"
        if caption
        else (f"{rows}, images in {image!r}, no captions (--caption-col names their column)")
    )


def _summary(packed: Outcome, images: str, elapsed_s: float) -> list[str]:
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
    if manifest.rejects:
        count = plural(sum(manifest.rejects.values()), "reject")
        lines.append(f"{count} ({human_counts(manifest.rejects, 8)}): see {images}/rejects/")
    for failed in packed.quarantined:
        lines.append(
            f"slice {failed.unit.name} failed {failed.attempts} times and is left out: "
            f"{failed.reason}"
        )
    if packed.quarantined:
        lines.append("run the same command again to retry what is left out")
    elif manifest.shards:
        where = "" if images == "shards/images" else f"{shlex.quote(images)} "
        lines.append(f"next: wdsprep encode {where}--resolution {_first_phase(manifest)}")
    else:
        lines.append(f"nothing of the source was kept: {images}/rejects/ says why of each sample")
    return lines


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
        "images": images,
        "packed": packed.samples,
        "packed_bytes": packed.nbytes,
        "phases": {
            str(resolution): {"samples": samples, "shards": shards}
            for resolution, (samples, shards) in phases(manifest).items()
        },
        "quarantined": [failed.unit.name for failed in packed.quarantined],
        "rejects": manifest.rejects,
        "samples": sum(shard.samples for shard in manifest.shards),
        "shards": len(manifest.shards),
        "slices": len(manifest.receipts),
        "slices_before": packed.units_before,
    }
