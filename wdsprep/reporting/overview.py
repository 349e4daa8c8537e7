"""The overview of a dataset that its manifest gives.

`inspect` and the card show it as lines, the page of a report as tables; `plan` calculates with it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from wdsprep.dataset.coarse_histograms import histogram, quantile
from wdsprep.dataset.manifest import Manifest, Shard
from wdsprep.dataset.npy_arrays import fields_of
from wdsprep.dataset.sealed_json import FORMAT
from wdsprep.dataset.settings import SCORES, Settings, columns_of
from wdsprep.dataset.shapes import shape_counts
from wdsprep.dataset.stored_dataset import phases
from wdsprep.store import open_store
from wdsprep.text import human_bytes, human_counts, plural

SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)
DESCRIBED = {"caption": "characters in a caption", "side": "pixels of the shorter side"}
MOST_LISTED = 8
DIGITS = 12
"""The digits of a digest that are shown."""
NO_BREAK = "\xa0"
"""A space at which no line ends."""
WRAPPED: dict[str, Any] = {"width": 98, "break_long_words": False, "break_on_hyphens": False}


@dataclass(frozen=True, kw_only=True)
class Overview:
    """An overview of a dataset, as `inspect` returns it."""

    dataset: str
    manifest: Manifest

    def __repr__(self) -> str:
        manifest = self.manifest
        state = "complete" if manifest.complete else "not complete"
        samples, shards = plural(manifest.samples, "sample"), plural(len(manifest.shards), "shard")
        what = f"{manifest.kind}, {state}: {samples} in {shards}"
        return f"<Overview {self.dataset!r}: {what}>"

    @property
    def facts(self) -> dict[str, Any]:
        return overview(self.manifest)

    @property
    def urls(self) -> list[str]:
        """Return the list of URLs of all shards, as webdataset takes it."""
        store_url = open_store(self.dataset).url
        return [f"{store_url}/{shard.name}" for shard in self.manifest.shards]

    @property
    def patterns(self) -> list[str]:
        """Return the URLs of all shards, as a brace pattern for each bucket.

        A bucket whose numbers have gaps has a URL for each shard. webdataset takes the patterns one
        by one, or joined by `::`.
        """
        store_url = open_store(self.dataset).url
        return [
            f"{store_url}/{name}"
            for shards in shards_by_bucket(self.manifest.shards).values()
            for name in _braces(store_url, [shard.name for shard in shards])
        ]


def overview(manifest: Manifest) -> dict[str, Any]:
    """Return the facts of a dataset that its manifest tells.

    A quantile of captions or sides is given as the range that holds it: receipts count in ranges.
    """
    quantiles = {
        what: {f"{share:.2f}": quantile(manifest.counts, what, share) for share in SHARES}
        for what in ("caption", "side")
        if histogram(manifest.counts, what)
    }
    shards = manifest.shards
    shapes = shape_counts(manifest.settings, manifest.counts)
    facts: dict[str, Any] = {
        "buckets": {
            bucket: {
                "nbytes": sum(shard.nbytes for shard in shards_there),
                "samples": sum(shard.samples for shard in shards_there),
                "shards": len(shards_there),
            }
            for bucket, shards_there in shards_by_bucket(shards).items()
        },
        "complete": manifest.complete,
        "counts": {n: c for n, c in manifest.counts.items() if "<" not in n and n not in shapes},
        "extra": dict(manifest.extra),
        "format": FORMAT,
        "generations": list(manifest.generations),
        "inputs": manifest.inputs,
        "kind": manifest.kind,
        "nbytes": manifest.nbytes,
        "quantiles": quantiles,
        "rejects": manifest.rejects,
        "samples": manifest.samples,
        "settings": dict(manifest.settings),
        "shapes": shapes,
        "shards": len(shards),
        "units": len(manifest.receipts),
    }
    if manifest.dataset == "images":
        facts["phases"] = {
            str(resolution): {"samples": samples, "shards": count}
            for resolution, (samples, count) in phases(manifest).items()
        }
    return facts


def bucket_lines(buckets: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield the lines of a table of buckets, as an overview has them."""
    yield f"{'bucket':>8} {'samples':>12} {'shards':>8} {'size':>10}"
    for bucket, row in buckets.items():
        size = human_bytes(row["nbytes"])
        yield f"{bucket:>8} {row['samples']:>12,} {row['shards']:>8,} {size:>10}"


def overview_lines(name: str, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that tell people the facts of an overview; `name` is that of the dataset."""
    state = "complete" if facts["complete"] else "not complete"
    what = f"{plural(facts['samples'], 'sample')} in {plural(facts['shards'], 'shard')}"
    yield f"{name}: {facts['kind']}, {state}: {what}, {human_bytes(facts['nbytes'])}"
    yield ""
    texts = setting_texts(facts["settings"], facts["extra"])
    whole = (f"{name} {text}".replace(" ", NO_BREAK) for name, text in texts.items())
    yield from (line.replace(NO_BREAK, " ") for line in wrap("; ".join(whole), **WRAPPED))
    yield ""
    yield from bucket_lines(facts["buckets"])
    yield ""
    for name, count in facts["shapes"].items():
        yield f"{name:>12} {plural(count, 'sample')}"
    for resolution, phase in facts.get("phases", {}).items():
        samples, shards = plural(phase["samples"], "sample"), plural(phase["shards"], "shard")
        yield f"phase {resolution}: {samples} in {shards}"
    rejected = sum(facts["rejects"].values())
    codes = f" ({human_counts(facts['rejects'], 8)})" if rejected else ""
    yield f"{plural(facts['inputs'], 'input')}, {plural(rejected, 'reject')}{codes}"
    if facts["counts"]:
        yield human_counts(facts["counts"], 8)
    for what, ranges in facts["quantiles"].items():
        parts = [
            f"{float(share):.0%} {least:,}" + ("" if least == most else f"-{most:,}")
            for share, (least, most) in ranges.items()
        ]
        yield f"{DESCRIBED[what]}, as ranges: {', '.join(parts)}"


def setting_texts(settings: Settings, extra: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings as texts by name, without those that are off or empty.

    The columns of scores, and the arrays of a sample, are among them.
    """
    of_dataset = {name: value for name, value in settings.items() if name not in (SCORES, "layout")}
    texts = {
        name.replace("_", "-"): _setting_text(name, value)
        for name, value in {**extra, **of_dataset}.items()
        if value not in (0, "", [], {}, None, False)
    }
    if columns := columns_of(settings):
        texts[SCORES] = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
    return texts | {item.name: str(item) for item in fields_of(settings.get("layout", ()))}


def _setting_text(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{part} {_setting_text(part, of)}" for part, of in value.items())
    if isinstance(value, list):
        items = [
            "x".join(map(str, part)) if isinstance(part, list) else str(part) for part in value
        ]
        return ",".join(items) if len(items) <= MOST_LISTED else f"{len(items)} values"
    if name in ("max_shard_size", "max_bytes"):
        return human_bytes(value)
    return str(value)[:DIGITS] if name == "weights" else str(value)


def images_from(manifest: Manifest, resolution: int) -> int:
    """Return how many images have a shorter side of this resolution or more.

    It is exact for a bucket and for 256, 384, 512, 768, 1024, 1536, and so on; for a number between
    two of these it counts from the next one on, and so too few.
    """
    counted = phases(manifest)
    if resolution in counted:
        return counted[resolution][0]
    sides = histogram(manifest.counts, "side")
    return sum(number for (least, _), number in sides if least >= resolution)


def shards_by_bucket(shards: Sequence[Shard]) -> dict[str, list[Shard]]:
    """Return the shards by the folder that they are in."""
    by_bucket: dict[str, list[Shard]] = {}
    for shard in shards:
        by_bucket.setdefault(shard.name.partition("/")[0], []).append(shard)
    return by_bucket


def _braces(store_url: str, names: list[str]) -> list[str]:
    """Return the names as one pattern like `{000..123}.tar`, or as they are if none fits."""
    first, last = (re.fullmatch(r"(.*?)(\d+)\.tar", name) for name in (names[0], names[-1]))
    if len(names) < 2 or not (first and last) or set(store_url + names[0]) & set("{},"):
        return names
    head, number, width = first[1], int(first[2]), len(first[2])
    wanted = [f"{head}{number + at:0{width}d}.tar" for at in range(len(names))]
    if names != wanted or len(last[2]) != width:
        return names
    return [f"{head}{{{first[2]}..{last[2]}}}.tar"]
