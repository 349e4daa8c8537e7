"""`report`: write a page about datasets that needs no network, for people to look at."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from wdsprep.options import Place, takes_datasets
from wdsprep.reporting.options import ReportOptions
from wdsprep.store import split_url


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenReport:
    """A report that was written: its path or URL, its size, and the number of its samples."""

    output: str
    nbytes: int
    samples: int


@takes_datasets(ReportOptions)
def report(datasets: Sequence[Place], options: ReportOptions) -> WrittenReport:
    """Write a report on `datasets` as one HTML file.

    `datasets` are at most one dataset of images, and any latents made of them. `output` is a
    path, or a URL of a bucket.

        written = wdsprep.report("shards/images", "shards/latents-256", output="report.html")

    The report shows `samples` of each bucket, picked by `seed`. Latents are decoded with
    `model`, by default the model that made them if it is on this machine; `none` decodes
    nothing, and nothing is ever fetched. Images of more than `max_area` pixels are not shown.
    `duplicates` is a table of copies among the images that `wdsprep.duplicates` has written:
    some groups are shown side by side. An earlier report is replaced; `yes` replaces any other
    file too. The same datasets, table, seed and model give the same bytes,
    where pictures are decoded on the same device.
    """
    from wdsprep.reporting.datasets import check_output, open_all
    from wdsprep.reporting.page import MARK, gather, page_of, plan_of

    output, listener = os.fspath(options.output), options.listener_or_mute
    opened = open_all([os.fspath(dataset) for dataset in datasets])
    check_output(
        options,
        opened.every,
        "report",
        is_ours=lambda start: MARK in start,
        endings=(".html", ".htm"),
    )
    store, name = split_url(output)
    with store.write(name) as sink:  # fails before the work if the place cannot be written to
        listener.on_message(plan_of(opened, options.samples, options.model))
        facts = gather(opened, options)
        data = page_of(facts).encode()
        sink.write(data)
    return WrittenReport(output=output, nbytes=len(data), samples=facts["samples"])
