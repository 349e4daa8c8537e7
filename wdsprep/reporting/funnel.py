"""Where samples went and how fast: the funnel, the rejects, and the throughput of a run.

Receipts count all samples and rejects. The rejects themselves are read from a bounded number of
units: for each code one that has it, and others by chance.

Receipts hold no times, so that equal input gives equal bytes, but a store knows when each was
written, which is when its unit was done. A copy of a dataset may have lost these times, and a unit
that was done again has the later time.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from wdsprep.dataset.file_names import RECEIPTS, receipt_name
from wdsprep.dataset.manifest import Receipt
from wdsprep.dataset.reject_codes import Code, by_stage
from wdsprep.dataset.rejects import Reject, rejects_in
from wdsprep.dataset.thread_map import read_each
from wdsprep.reporting.datasets import DAMAGE, Datasets, ReportDataset
from wdsprep.text import Counting

LOST_BY_STAGE = {
    "absent": "captions without an image",  # not an error: there is nothing to pack
    "read": "could not be read",
    "fetch": "could not be fetched",
    "filter": "left out by a filter",
    "check": "failed the image check",
    "encode": "could not be encoded",
    "remove": "removed",
}


Row = dict[str, Any]
"""A row of the funnel: its `label`, and the `samples` left after a step, or lost in it (`is_lost`).

It is drawn as so many samples, which begin at `start`.
"""


def _row(label: str, samples: int) -> Row:
    return {"label": label, "samples": samples, "start": 0, "is_lost": False}


def losses(rejects: Mapping[str, int]) -> dict[str, int]:
    """Count the rejects by the label of their stage, in the order of the stages."""
    counts = by_stage(rejects)
    counts["absent"] = rejects.get(Code.NO_IMAGE.value, 0)
    counts["read"] -= counts["absent"]
    return {label: counts[stage] for stage, label in LOST_BY_STAGE.items() if counts[stage]}


def funnel(datasets: Datasets) -> Iterator[Row]:
    """Yield the rows of the funnel, from the source to each dataset of latents."""
    images = datasets.images
    if images:
        yield _row("samples in the source", images.manifest.inputs)
        yield from _loss_rows(images.manifest.inputs, losses(images.manifest.rejects))
        yield _row("packed", images.manifest.samples)
    labels = Counter(latents.label for latents in datasets.latents)
    for latents in datasets.latents:
        name = latents.label.removeprefix("latents ")
        name += "" if labels[latents.label] == 1 else f" ({latents.shown})"
        yield from _phase_rows(images, latents, name)


def _loss_rows(left: int, counts: Mapping[str, int], of: str = "") -> Iterator[Row]:
    for label, count in counts.items():
        left -= count
        if count:
            yield {"label": f"{label}{of}", "samples": count, "start": left, "is_lost": True}


def _phase_rows(images: ReportDataset | None, latents: ReportDataset, name: str) -> Iterator[Row]:
    manifest = latents.manifest
    wanted = manifest.inputs
    if images:
        buckets = latents.encoded_buckets(images)
        fit = [shard.samples for shard in images.manifest.shards if shard.bucket in buckets]
        wanted = max(wanted, sum(fit))
    done = "given" if manifest.is_scored else "encoded"
    of = f" at {name}" if latents.has_latents else f" as {name}"
    of = f" {name}" if manifest.is_scored else of
    yield _row(f"for {'phase ' if latents.has_latents else ''}{name}", wanted)
    removed = manifest.rejects.get(Code.REMOVED.value, 0)
    rejected = sum(manifest.rejects.values()) - removed
    yield from _loss_rows(wanted, {f"not {done}{of} so far": wanted - manifest.inputs})
    lost = {f"could not be {done}": rejected, "removed": removed}
    yield from _loss_rows(manifest.inputs, lost, of)
    yield _row(f"{done}{of}", manifest.samples)


UNITS = 24
EXAMPLES = 4
HOSTS = 20


def look_at_rejects(dataset: ReportDataset, seed: str, heard: Counting) -> dict[str, Any]:
    """Read the rejects of some units of a dataset, and return examples and the worst hosts.

    `failures` is the number of failures that the hosts are picked from. Of the `units` with
    rejects, `units_read` were read, and `units_damaged` could not be read.
    """
    receipts = [receipt for receipt in dataset.manifest.receipts if receipt.rejects]
    chosen = _choose_units(receipts, seed)

    def read(receipt: Receipt) -> list[Reject] | None:
        try:
            return rejects_in(dataset.store, receipt.unit)
        except DAMAGE:
            return None

    files = read_each(read, chosen, dataset.store.readers, lambda done: heard(done, len(chosen)))
    examples: dict[str, list[Reject]] = defaultdict(list)
    failures: dict[str, Counter[str]] = defaultdict(Counter)
    for reject in (reject for file in files for reject in file or ()):
        if len(examples[reject.code.value]) < EXAMPLES:
            examples[reject.code.value].append(reject)
        if reject.code.stage == "fetch" and (host := host_of(reject.url)):
            failures[host][reject.code.value] += 1
    hosts = [
        {"name": name, "failures": codes.total(), "codes": codes.most_common()}
        for name, codes in sorted(failures.items(), key=lambda pair: (-pair[1].total(), pair[0]))
    ]
    damaged = files.count(None)
    return {
        "examples": examples,
        "hosts": hosts[:HOSTS],
        "failures": sum(codes.total() for codes in failures.values()),
        "units_read": len(files) - damaged,
        "units_damaged": damaged,
        "units": len(receipts),
    }


def _choose_units(receipts: Sequence[Receipt], seed: str) -> list[Receipt]:
    """Choose units to read: for each code one that has it, then others by chance."""
    shuffled = random.Random(seed).sample(receipts, len(receipts))  # noqa: S311
    chosen: dict[str, Receipt] = {}
    met: set[str] = set()
    for receipt in shuffled:
        if not met >= receipt.rejects.keys():
            met |= receipt.rejects.keys()
            chosen[receipt.unit] = receipt
    for receipt in shuffled[:UNITS]:
        if len(chosen) < UNITS:
            chosen[receipt.unit] = receipt
    return sorted(chosen.values(), key=lambda receipt: receipt.unit)


def host_of(url: str) -> str:
    """Return the host of a URL, or "" if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


PERIODS = 48
PAUSE_S = 600.0
SHORT_PAUSE_S = 60.0
PAUSE_TIMES = 8
"""How many times as long as usual a step takes that is a pause."""


def pace_of(dataset: ReportDataset) -> dict[str, Any] | None:
    """Return the pace of a run by the times of its receipts; None with fewer than three times.

    `rates` are inputs a second, over equal parts of the time in which work was done. Pauses, such
    as between a kill and a resume, are left out. `inputs` counts those of all units, except those
    done at `first_s`.

    A pause is a step of over 10 minutes that takes 8 times as long as is usual for its inputs, or
    one of over a minute that takes 8 times as long as all other steps together. It counts as long
    as is usual. What is usual is taken from the faster steps, since of a few steps most may be
    pauses.
    """
    times = {entry.name: entry.written_s for entry in dataset.store.list(RECEIPTS)}
    inputs_by_time: Counter[float] = Counter()
    for receipt in dataset.manifest.receipts:
        inputs_by_time[times.get(receipt_name(receipt.unit), 0.0)] += receipt.inputs
    moments = sorted((at, inputs) for at, inputs in inputs_by_time.items() if at)
    if len(moments) < 3:
        return None
    at_s, inputs = np.array(moments).T
    gaps, inputs = np.diff(at_s), inputs[1:]
    weights = inputs.clip(1)
    usual = weights * np.sort(gaps / weights)[(len(gaps) - 1) // 3]
    is_pause = (gaps > PAUSE_S) & (gaps > PAUSE_TIMES * usual)
    is_pause |= (gaps > SHORT_PAUSE_S) & (gaps > PAUSE_TIMES * (gaps.sum() - gaps))
    steps = np.where(is_pause, np.minimum(gaps, usual), gaps)
    ends, totals = (np.cumsum([0, *numbers]) for numbers in (steps, inputs))
    edges = np.linspace(0, ends[-1], min(PERIODS, len(steps)) + 1)
    return {
        "first_s": float(at_s[0]),
        "last_s": float(at_s[-1]),
        "active_s": float(steps.sum()),
        "pauses": int(is_pause.sum()),
        "inputs": int(inputs.sum()),
        "rates": (np.diff(np.interp(edges, ends, totals)) / edges[1]).tolist(),
    }
