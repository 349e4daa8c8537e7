"""`select`: a subset, a split, other shards, or several datasets in one, by copying samples.

1. *Places.* OUT says where datasets are written: `{name}` there stands for the last part of a
   dataset's path, and `{split}` for a part of the split. Datasets with the same place become one
   dataset, in the order in which they were given. So `shards/images shards/latents-256
   'subset/{name}'` gives subset/images and subset/latents-256: as `{resolution}` in the OUT of
   encode, it tells the names of several outputs, and nothing depends on the number of words.
2. *Who decides.* Given images, samples are selected from them, and latents and text follow: the
   samples that were made of the selected ones, so that all are pairs again. Otherwise samples are
   selected from latents (`selected_samples`).
3. *Units.* The selection is cut into shards (`shard_plan`), which are numbered over all buckets;
   each is a unit of work. The cut depends on the content of the datasets and on the options alone,
   so any number of workers gives the same bytes, and a run that was killed goes on.
4. *Work.* A unit copies bytes (`copy_samples`), and reads the receipts of its sources before and
   after: if one has changed meanwhile, the unit is not finished. Images come first, then what was
   made of them, since its receipts state the digest of the new image shard, as those of encode do.
5. *Settings.* Those of selected images say that they are a selection (`source`), of which datasets
   and by which options, so another selection in the same place is refused. Their keys are unique
   and rise in a shard, but are not slice and number. The inputs of their units are lists of shards
   by digest and numbers, without a key, a caption or a URL. Nothing is rejected.
   Settings of selected latents are those that they were encoded with: encode finds nothing left to
   do, and can make damaged shards again. The rejects of selected samples are copied too. The
   manifest states the selection (`selection`), and the inputs in their receipts the rest: latents
   made of other images are refused.
6. *Keys* stay. If two datasets have the same key, that is refused. `prefix` puts the number of the
   dataset (0, 1, ...) before each key: names in the tar and the json change, so these samples are
   written again.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from wdsprep.changes.options import SelectOptions
from wdsprep.errors import UsageError
from wdsprep.options import as_places, takes_options
from wdsprep.runners.job import JobListener
from wdsprep.runners.options import WorkerOptions, WorkerRangeOptions, with_runner
from wdsprep.store.base import check_apart
from wdsprep.text import NotebookTable, plural

if TYPE_CHECKING:
    from wdsprep.changes.selected_datasets import SelectRequest
    from wdsprep.changes.selected_samples import Parts
    from wdsprep.runners.run import Outcome

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class Selected(NotebookTable):
    """The result of a selection: the outcome of each dataset that was written, by its place."""

    outcomes: "Mapping[str, Outcome]"

    def table_rows(self) -> Iterator[tuple[str, object]]:
        yield from ((place, repr(outcome)) for place, outcome in self.outcomes.items())

    def __repr__(self) -> str:
        each = (f"{place!r}: {outcome!r}" for place, outcome in self.outcomes.items())
        return f"<Selected {', '.join(each)}>"

    @property
    def is_damaged(self) -> bool:
        return any(outcome.quarantined for outcome in self.outcomes.values())


@takes_options(SelectOptions)
def select(options: SelectOptions) -> Selected:
    """Copy samples of datasets into new ones.

    The samples are those that have one of `keys` and meet `where`, as far as these are given. With
    `count`, so many of them are drawn at random. `split` divides the result into parts.

        wdsprep.select("shards/images", "shards/large", where="width >= 768")
        wdsprep.select(["shards/images", "shards/latents-256"], "{split}/{name}",
                       split={"train": 0.9, "val": 0.1})
        wdsprep.select(["january", "february"], "both", prefix=True)

    The options are those of `wdsprep select`; `keys` may also be a list of keys. After an
    interrupt or a kill, the same call goes on where it was.
    """
    from wdsprep.changes.selected_datasets import SelectRequest
    from wdsprep.changes.selected_samples import WantedKeys

    keys = options.keys
    asked = SelectRequest(
        where=options.where,
        keys=None if isinstance(keys, str) and not keys else WantedKeys(keys),
        count=options.count,
        seed=options.seed,
        parts=parse_split(options.split),
        samples=options.samples_per_shard,
        nbytes=options.max_shard_nbytes,
        prefix=options.prefix,
    )
    return _select(
        options.places,
        os.fspath(options.out),
        asked,
        options.part(WorkerRangeOptions),
        options.overwrite,
        options.track,
        options.heard_by,
        join=[os.fspath(place) for place in as_places(options.join)],
    )


def parse_split(split: "str | Mapping[str, float]") -> "Parts":
    """Parse the shares of a split: "train=0.9,val=0.1", or a mapping."""
    if isinstance(split, Mapping):
        words = [(str(name), str(share)) for name, share in split.items()]
    else:
        words = [(a, c) for a, _, c in (w.strip().partition("=") for w in split.split(",") if w)]
    example = "give names and shares, such as train=0.9,val=0.1"
    try:
        found = {name: Fraction(share) for name, share in words}
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"--split {split}: {example}") from None
    if len(found) < len(words) or not all(map(WORD.fullmatch, found)):
        raise UsageError(f"--split {split}: {example}")
    if any(share <= 0 for share in found.values()) or sum(found.values()) > 1:
        are_percent = min(found.values()) >= 1 and sum(found.values()) <= 100
        meant = ",".join(f"{name}={float(share / 100):g}" for name, share in found.items())
        hint = f": did you mean {meant}?" if are_percent else ""
        raise UsageError(f"--split {split}: give shares above 0 that are 1 or less together{hint}")
    return found


# --- the run
def _select(
    given: "Sequence[str | os.PathLike[str]]",
    out: str,
    asked: "SelectRequest",
    options: WorkerOptions,
    overwrite: bool,
    track: str,
    listener: JobListener,
    *,
    join: Sequence[str],
) -> Selected:
    from wdsprep.changes.merged_datasets import SPLIT, find_columns, group_datasets
    from wdsprep.changes.selected_datasets import SelectedDataset, check_room, plan_shards

    if asked.parts and SPLIT not in out:
        raise UsageError(f"--split makes several datasets: put {SPLIT} into OUT, as {out}/{SPLIT}")
    if SPLIT in out and not asked.parts:
        raise UsageError(f"{out} has {SPLIT} in it: give a --split, such as train=0.9,val=0.1")
    groups = group_datasets(given, out)
    asked = replace(asked, columns=find_columns(groups, join, asked.where))
    outs = [
        SelectedDataset(group=group, part=part, asked=asked, overwrite=overwrite, track=track)
        for part in asked.parts or [""]
        for group in groups
    ]
    for each in outs:
        for origin in (origin for group in groups for origin in group.origins):
            check_apart(origin.url, each.place)
        each.check()
    if all(each.is_done for each in outs) and not overwrite:
        return Selected(outcomes={each.shown: each.finish() for each in outs})
    cuts = plan_shards(groups[0], asked)
    planned = [(each, cuts[each.part]) for each in outs]
    check_room(planned)
    options = with_runner(options, listener.told)
    outcomes: dict[str, Outcome] = {}
    of = sum(origin.manifest.samples for origin in groups[0].origins)
    for each, own in planned:
        samples = sum(one.samples for one in own)
        listener.told(f"{each.shown}: {samples:,} of {plural(of, 'sample')} selected")
        follows = each.group.follows
        images = outcomes[follows.place_of(each.part)] if follows else None
        if images is not None and images.quarantined:
            continue  # its image shards are not complete
        outcomes[each.shown] = each.fill(own, images, options, listener)
    return Selected(outcomes=outcomes)
