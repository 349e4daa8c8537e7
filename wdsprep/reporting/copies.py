"""Groups of copies to show side by side, from the table that `wdsprep duplicates --table` wrote.

Groups whose copies differ most from the image that stays come first: whoever sees that these are
copies need not doubt the others.
"""

import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from wdsprep.errors import FormatError, UsageError
from wdsprep.reporting.contact_sheet import SheetItem, fact_pairs, sheet_item, unread_item
from wdsprep.reporting.datasets import Datasets, places_of, read_samples
from wdsprep.reporting.pictures import open_picture
from wdsprep.store import split_url
from wdsprep.text import command

GROUPS, COPIES = 8, 3
"""The most groups that are shown, and the most copies of each beside the image that stays."""


def choose_copies(
    datasets: Datasets, table: str, max_area: int, heard: Callable[[str], None]
) -> dict[str, Any]:
    """Read a table of copies, and return up to 8 groups whose copies differ most, with pictures.

    `total` counts all groups whose remaining image is in the dataset. A group shows the image that
    stays and up to 3 copies, and counts all its `copies`. An image of more than `max_area` pixels
    has a note in place of a picture. `heard` gets a line before the table is read. Raise UsageError
    if no dataset of images is given, or if the table lists other samples.
    """
    images = datasets.images
    if images is None:
        raise UsageError("--duplicates shows images: give the dataset of images too")
    heard(f"reading {table}")
    mismatch = UsageError(
        f"--duplicates {table} lists other samples than {images.shown} has now: run "
        f"{command('duplicates', images.shown)} with --table again"
    )
    names = ("group", "duplicate", "distance")
    batches = [
        [batch.column(name).to_numpy() for name in names] for batch in _batches(table, *names)
    ]
    group, duplicate, distance = (
        np.concatenate([np.arange(0), *(batch[at] for batch in batches)]) for at in range(3)
    )
    if len(group) != images.manifest.samples:
        raise mismatch
    is_copy = duplicate > 0
    total = np.count_nonzero((group > 0) & ~is_copy & np.isin(group, group[is_copy]))
    # The rows of groups, each from the image that stays on. A group is left out unless this dataset
    # has both that image and a copy of it.
    grouped = np.flatnonzero(group)
    by_group = (grouped, -distance[grouped], duplicate[grouped] > 0, group[grouped])
    order = grouped[np.lexsort(by_group)]
    groups = np.split(order, np.flatnonzero(np.diff(group[order], prepend=-1))[1:])
    whole = [rows for rows in groups if len(rows) > 1 and not duplicate[rows[0]]]
    chosen = sorted(whole, key=lambda rows: -int(distance[rows].max()))[:GROUPS]
    shown = np.concatenate([np.arange(0), *(rows[: 1 + COPIES] for rows in chosen)])
    places = places_of(images.manifest.shards, shown.tolist())
    samples = dict(zip(shown.tolist(), read_samples(images, places), strict=True))
    first = 0
    for batch in _batches(table, "key") if samples else ():
        for row, sample in samples.items():
            if sample.problem or not first <= row < first + len(batch):
                continue
            if sample.key != str(batch.column("key")[row - first]):
                raise mismatch
        first += len(batch)

    def item(row: int) -> SheetItem:
        sample = samples[row]
        if sample.problem:
            return unread_item(sample)
        text = "equal to the byte" if duplicate[row] == 2 else f"{distance[row]} of 64 bits differ"
        title = text if is_copy[row] else "it stays"
        picture = open_picture(sample, max_area)[1] | {"title": title}
        return sheet_item(sample, fact_pairs(sample.facts), [picture])

    shown_groups = [
        {"shown": [item(row) for row in rows[: 1 + COPIES].tolist()], "copies": len(rows) - 1}
        for rows in chosen
    ]
    return {"groups": shown_groups, "total": int(total), "table": table}


def _batches(url: str, *names: str) -> Iterator[pa.RecordBatch]:
    store, name = split_url(url)
    try:
        # opened by Python: Arrow opens no path that is not UTF-8
        data = (store.root / name).open("rb") if store.root else io.BytesIO(store.read(name))
        with data, pq.ParquetFile(data) as file:
            for batch in file.iter_batches(columns=list(names), use_threads=False):
                if batch.schema.names != list(names):
                    raise KeyError(names)
                yield batch
    except (pa.ArrowException, KeyError, OSError) as error:
        raise FormatError(
            f"--duplicates {url} is not a table of copies: give the file that wdsprep duplicates "
            "--table has written"
        ) from error
