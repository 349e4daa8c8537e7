"""Columns that a condition of `select` may use beside the json of samples.

They are those of scores that are selected together with images, and of `--join`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from wdsprep.changes.grouping import Group, open_origin
from wdsprep.changes.selection import Origin
from wdsprep.dataset.digests import DigestKind
from wdsprep.errors import UsageError
from wdsprep.loading.join import join_datasets
from wdsprep.loading.open_datasets import Stream, open_stream
from wdsprep.loading.tables import is_table, open_keyed_table
from wdsprep.loading.where import Subset, Where, find_subset


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedColumns:
    """The places of joined scores and tables, for each dataset that is selected from.

    `digest` is a digest of their content.
    """

    places: tuple[tuple[str, ...], ...] = ()
    digest: str = ""


def find_columns(groups: Sequence[Group], join: Sequence[str], condition: str) -> JoinedColumns:
    """Return the places of the columns that a condition may use.

    They are those in `join`, and scores that are selected together with the first group.
    """
    origins = groups[0].origins
    if not condition:
        return JoinedColumns(places=((),) * len(origins))
    follow = [g for g in groups[1:] if g.follows and g.origins[0].manifest.is_scored]
    along = [tuple(group.origins[at].url for group in follow) for at in range(len(origins))]
    named = [place for place in join if not is_table(place)]
    if named and len(origins) > 1:
        raise UsageError(
            f"--join {named[0]} has columns of one dataset, and several are selected from: give it "
            "among the datasets, with the scores of the others"
        )
    urls = [open_origin(place).url for place in named]
    tables = [place for place in join if is_table(place)]
    places = tuple(tuple(dict.fromkeys((*urls, *own, *tables))) for own in along)
    return JoinedColumns(places=places, digest=_digest(places, condition))


def _digest(places: Sequence[Sequence[str]], condition: str) -> str:
    """Return a digest of the content of joined columns; empty if nothing is joined."""
    texts = [str(name[0]) for name in Where(condition).names if len(name) == 1]
    each = dict.fromkeys(place for own in places for place in own)
    contents = [
        open_keyed_table(place, None, texts).digest
        if is_table(place)
        else open_origin(place).content
        for place in each
    ]
    return DigestKind.BLAKE3.hex("\n".join(contents).encode()) if contents else ""


def subsets_of(origins: Sequence[Origin], columns: JoinedColumns, condition: str) -> list[Subset]:
    """Return the samples of each dataset that meet a condition.

    Samples that a joined dataset lacks do not meet it.
    """
    found = []
    for origin, places in zip(origins, columns.places, strict=True):
        stream = Stream(origin.url, where=condition, join=places)
        dataset = join_datasets(open_stream(stream))[0]
        subset = find_subset(dataset, None, None)
        if subset is not None:
            found.append(subset)
    return found
