"""What is said of captions before a run of `encode` and after it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.samples import Sample
from wdsprep.encoding.captions.sources import CaptionSource, FieldCaptions
from wdsprep.encoding.captions.table import CaptionRecord
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.encoding.shard_rows import ShardRows
from wdsprep.errors import FormatError
from wdsprep.runners.base import HopelessError
from wdsprep.sources.fingerprints import Content
from wdsprep.sources.tars import TarsSource
from wdsprep.text import list_columns, plural

if TYPE_CHECKING:
    from wdsprep.encoding.captions.laid_out import CaptionLayout

LOOKED_AT = 1_000
"""The first samples, which are taken to be like the others."""


def warn_of_field(path: str, tars: TarsSource, shards: Sequence[ImageShard]) -> str:
    """Return a warning if none of the first samples has a caption at a path of its json, or "".

    If the first shard is missing or damaged, a worker reports that later.
    """
    captions, there, seen = FieldCaptions(path), dict[str, None](), 0
    tars = replace(tars, has_images=False)
    for shard in shards[:1]:
        rows = ShardRows(source=tars, shard=shard, content=Content(is_kept=False)).read()
        with suppress(FormatError, HopelessError):
            for key, sample in islice(rows, LOOKED_AT):
                if not isinstance(sample, Sample):
                    continue
                if captions.find(key, sample):
                    return ""
                seen += 1
                meta = sample.facts.get("meta")
                of_meta = (f"meta.{name}" for name in (meta if isinstance(meta, dict) else ()))
                there |= dict.fromkeys((*sample.facts, *of_meta))
    if not seen:
        return ""
    return (
        f"none of the first {plural(seen, 'sample')} of {tars.url} has a caption in {path}: "
        f"samples without one keep their own captions; their json has {list_columns(sorted(there))}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionReport:
    """The number of samples of a dataset with a caption from a table or a field, and without."""

    source: CaptionSource
    named: int
    """The number of samples that have a caption from the table or the field."""
    unnamed: int
    """The number of samples that keep their own caption."""
    table: str = ""
    read: CaptionRecord | None = None
    unmatched: int | None = None
    """The number of names in the table that no sample has; None while samples are missing."""


def report_captions(
    layout: "CaptionLayout | None", source: CaptionSource, place: str, manifest: Manifest
) -> CaptionReport:
    """Return a report of the captions of a dataset.

    Names in a table that no sample has are known once the dataset is complete.
    """
    named = manifest.counts.get("named", 0)
    report = CaptionReport(source=source, named=named, unnamed=manifest.samples - named)
    if layout is None or (read := layout.records[place]) is None:
        return report
    unmatched = read.unused if manifest.complete else None
    return replace(report, table=layout.table.url, read=read, unmatched=unmatched)
