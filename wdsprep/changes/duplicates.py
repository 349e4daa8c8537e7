"""`duplicates`: which images of datasets are copies of others, equal or nearly.

1. Each image shard is read once, on any number of workers, and what its pictures look like is kept
   in a file of its own (`image_hashes`): a run that was killed goes on, a later one reads these
   files alone, and a shard that was packed anew is looked at again.
2. Samples that do not meet `where` are left out (`find_compared`). The others stand in an order
   of who is to be kept: the highest value of the column `keep` first, then more pixels, then as the
   datasets are named and as they lie there, which is by key. Those of one hash are one thing, whose
   best sample stands for them. `near_duplicates` finds all pairs of things within a distance.
3. From the best thing on, each stays unless it is near one that stays already; if it is, it goes
   with the best such one. So a *group* is what is near the one that stays, not near each other: of
   a chain A~B~C, where A is the best, B goes with A, and C stays if it is not near A. No two that
   stay are near each other, and each that goes is near one that stays.
4. Pictures without a hash (next to no detail, or damaged) are copies only of what has the same
   bytes. A copy is *equal* if it has the bytes of the one that stays, else *near*.
5. What may go leaves as a list of keys, which `wdsprep remove --keys` takes, and as a table of all
   samples that were compared, which `join=` and `where=` of a loader take.

Memory is 12 bytes a sample for hashes and sizes, 8 for their order, 8 for each hash that is there
once, and as many for each sort that is done at once: 5 GB in all for 100 million samples. Values of
a column are 8 bytes more.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from wdsprep.changes.duplicate_groups import CopySearch, DuplicateGroup, copy_files, largest_groups
from wdsprep.changes.image_hashes import (
    Hashing,
    ImagesLooked,
    find_compared,
    hashes_folder,
    open_images,
)
from wdsprep.changes.options import DuplicatesOptions
from wdsprep.dataset.damage import verify_step
from wdsprep.errors import UsageError
from wdsprep.options import Place, as_places, takes_datasets
from wdsprep.runners.base import Runner
from wdsprep.runners.job import JobListener, JobStatus, check_all_done, job_largest_first
from wdsprep.runners.make_runner import runner_for
from wdsprep.store.base import absolute
from wdsprep.store.schemes import place_scheme
from wdsprep.text import NotebookTable


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicates(NotebookTable):
    """The result of a search: how many samples were compared, how many may go, the largest groups.

    `flat` have too little detail for a hash, and `damaged` cannot be read.
    """

    datasets: tuple[str, ...]
    distance: int
    samples: int
    equal: int
    near: int
    groups: int
    flat: int
    damaged: int
    largest: tuple[DuplicateGroup, ...]
    output: tuple[str, ...]
    table: tuple[str, ...]
    complete: bool

    def __repr__(self) -> str:
        return (
            f"<Duplicates {', '.join(map(repr, self.datasets))}: {self.equal:,} equal and "
            f"{self.near:,} near of {self.samples:,} samples>"
        )


@takes_datasets(DuplicatesOptions)
def duplicates(datasets: Sequence[Place], options: DuplicatesOptions) -> Duplicates:
    """Find images of `datasets` that are equal, or look alike within `distance` bits of 64.

        found = wdsprep.duplicates("shards/images", output="copies.txt")
        found.equal, found.near, found.largest

    The keys of the copies go into the file `output`, one a line; with several datasets `{number}`
    in it says of which, from 1 on. `table` is a Parquet file of all samples, for `join` and `where`
    of a loader. Of copies the one with the highest value in the column `keep` stays, and samples
    that do not meet `where` are not compared: both may name columns of `join`, such as scores.
    What the pictures look like is kept in the folder `hashes`, beside each dataset
    unless given. The datasets are not changed.
    """
    listener = options.heard_by
    images = _opened([os.fspath(url) for url in datasets], os.fspath(options.hashes))
    join = [os.fspath(place) for place in as_places(options.join)]
    with copy_files(os.fspath(options.output), os.fspath(options.table), images) as files:
        compared = find_compared(images, join, options.where, options.keep)
        make_runner = partial(runner_for, options, told=listener.told, name="duplicates")
        _look(images, make_runner, listener)
        search = CopySearch(images, compared)
        copies = search.copies(options.distance, listener.compared)
        files.write(copies, compared)
    return Duplicates(
        datasets=tuple(one.shown for one in images),
        distance=options.distance,
        samples=search.samples,
        equal=int(copies.equal.sum()),
        near=int((~copies.equal).sum()),
        groups=len(copies.stays),
        flat=search.flat,
        damaged=search.damaged,
        largest=tuple(largest_groups(images, copies)),
        output=tuple(files.lists),
        table=tuple(files.tables),
        complete=all(one.manifest.complete for one in images),
    )


def _opened(shown: Sequence[str], hashes: str) -> list[ImagesLooked]:
    if not shown:
        raise UsageError("nothing to compare: give a dataset of images")
    places = [absolute(url) for url in shown]
    if twice := [url for url, count in Counter(places).items() if count > 1]:
        raise UsageError(f"{twice[0]} is given twice: give each dataset once")
    lasts = [url.rstrip("/").rpartition("/")[2] for url in places]
    if hashes and len(set(lasts)) < len(lasts):
        raise UsageError(
            f"--hashes {hashes}: two datasets have the same last name ({', '.join(lasts)}), and "
            "would be kept in one folder: leave --hashes out, or give it for one dataset at a time"
        )
    for url in places:
        if not hashes and place_scheme(url) == "hf":
            raise UsageError(
                f"{url}: the hub is only read, and what its pictures look like has to be kept: "
                "give a folder for that with --hashes"
            )
    kept = [
        f"{absolute(hashes)}/{last}" if hashes else hashes_folder(place)
        for place, last in zip(places, lasts, strict=True)
    ]
    for url in kept:
        if any(f"{url}/".startswith(f"{place}/") for place in places):
            raise UsageError(
                f"the hashes would lie in {url}, which is inside a dataset: give another folder "
                "with --hashes"
            )
    return [open_images(*each) for each in zip(places, shown, kept, strict=True)]


def _look(
    images: Sequence[ImagesLooked],
    make_runner: Callable[[int, int], Runner],
    listener: JobListener,
) -> None:
    """Compute the hashes of each shard that has none yet, and keep them.

    Raise WorkError at the end if a shard failed.
    """
    units = [unit for one in images for unit in one.missing()]
    if not units:
        return
    samples = 0

    def heard(status: Callable[[], JobStatus]) -> None:
        listener.status(lambda: replace(status(), samples=samples))

    job = job_largest_first(make_runner, Hashing(), units, heard=heard)
    with closing(job):
        for unit, _ in job.results():
            samples += unit.shard.samples
    step = f"run the same command again, or {verify_step(*(one.shown for one in images))}"
    check_all_done(job.quarantined, "shard", "looked at", step)
