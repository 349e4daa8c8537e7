"""`select`: a subset, a split, other shards, or several datasets in one, by copying samples.

1. *Places.* Datasets go where OUT says: `{name}` there is the last part of a dataset's place, and
   `{split}` a part of the split. What has the same place becomes one dataset, in the order in which
   it was named. So `shards/images shards/latents-256 'subset/{name}'` gives subset/images and
   subset/latents-256: as `{resolution}` in the OUT of encode, it says what several outputs are
   called, and there is nothing to guess from how many words there are.
2. *Who decides.* Where images are given, they are selected from, and latents and text follow: what
   was made of the samples that are selected, so all of it is a pair again. Otherwise latents are
   selected from (`selection`).
3. *Units.* What is selected is cut into shards of so many samples (`shard_plan`), numbered over all
   buckets; each is a unit of its own. It depends on the datasets' contents and the options alone,
   so any number of workers gives the same bytes, and a run that was killed goes on.
4. *Work.* A unit copies bytes (`copying`), and looks at its sources' receipts before and after: if
   one has changed meanwhile, nothing is finished. Images first, then what was made of them, since
   its receipts have the digest of the new image shard as their input, as those of encode do.
5. *What it is.* Settings of selected images say that they are a selection (`source`), of what and
   by which words, so another selection in the same place is refused. Their keys are unique and rise
   in a shard, but are not slice and number. Their units' inputs are lists of shards by digest and
   numbers, without a key, a caption or a URL. Nothing is rejected.
   Settings of selected latents are those that they were encoded with: encode finds nothing left to
   do, and can make again what is damaged. Rejects of selected samples come along. What they were
   selected by stands beside, in the manifest (`selection`), and their receipts' inputs tell all
   else: latents made of other images are refused.
6. *Keys* stay. If two datasets have the same one, that is refused, and `prefix` puts the number of
   the dataset (0, 1, ...) before each: names in the tar and the json change, so these samples are
   written anew.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from wdsprep.changes.options import SelectOptions
from wdsprep.errors import UsageError
from wdsprep.options import as_places, taking
from wdsprep.runners.base import WorkerOptions, WorkerRangeOptions, with_runner
from wdsprep.runners.job import JobListener
from wdsprep.store.base import check_apart
from wdsprep.text import NotebookTable, plural

if TYPE_CHECKING:
    from wdsprep.changes.selected_datasets import SelectRequest
    from wdsprep.changes.selection import Parts
    from wdsprep.runners.run import Outcome

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class Selected(NotebookTable):
    """The outcome of each dataset that was written, by its place."""

    outcomes: "Mapping[str, Outcome]"

    def table_rows(self) -> Iterator[tuple[str, object]]:
        yield from ((place, repr(outcome)) for place, outcome in self.outcomes.items())

    def __repr__(self) -> str:
        each = (f"{place!r}: {outcome!r}" for place, outcome in self.outcomes.items())
        return f"<Selected {', '.join(each)}>"

    @property
    def is_damaged(self) -> bool:
        return any(outcome.quarantined for outcome in self.outcomes.values())


@taking(SelectOptions)
def select(options: SelectOptions) -> Selected:
    """Copy samples of datasets into new ones.

    They are those that meet `where`, have one of `keys`, are among `count` drawn at random, or
    all; in parts, if there is a `split`.

        wdsprep.select("shards/images", "shards/large", where="width >= 768")
        wdsprep.select(["shards/images", "shards/latents-256"], "{split}/{name}",
                       split={"train": 0.9, "val": 0.1})
        wdsprep.select(["january", "february"], "both", prefix=True)

    The options are those of `wdsprep select`; `keys` may be keys, too, and the datasets one or
    several. Interrupted or killed, the same call goes on where it was.
    """
    from wdsprep.changes.selected_datasets import SelectRequest
    from wdsprep.changes.selection import WantedKeys

    keys = options.keys
    asked = SelectRequest(
        where=options.where,
        keys=None if isinstance(keys, str) and not keys else WantedKeys.of(keys),
        count=options.count,
        seed=options.seed,
        parts=parts_of(options.split),
        samples=options.samples_per_shard,
        nbytes=options.max_shard_nbytes,
        prefix=options.prefix,
    )
    return _selected(
        options.places,
        os.fspath(options.out),
        asked,
        options.part(WorkerRangeOptions),
        options.overwrite,
        options.track,
        options.heard_by,
        join=[os.fspath(place) for place in as_places(options.join)],
    )


def parts_of(split: "str | Mapping[str, float]") -> "Parts":
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
        raise UsageError(f"--split {split}: shares are above 0, and 1 or less together")
    return found


# --- doing it
def _selected(
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
    from wdsprep.changes.grouping import SPLIT, group_datasets
    from wdsprep.changes.joined_columns import find_columns
    from wdsprep.changes.selected_datasets import SelectedDataset, check_room, plan_shards

    if asked.parts and SPLIT not in out:
        raise UsageError(f"--split makes several datasets: put {SPLIT} into OUT: {out}/{SPLIT}")
    if SPLIT in out and not asked.parts:
        raise UsageError(f"{out}: {SPLIT} is for --split, such as train=0.9,val=0.1")
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
        return Selected(outcomes={each.shown: each.finished() for each in outs})
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
            continue  # what is to be made of shards that are not there
        outcomes[each.shown] = each.filled(own, images, options, listener)
    return Selected(outcomes=outcomes)
