"""Columns that conditions of `select` and `duplicates` may use beside the json of samples.

They are those of `--join`, and of scores that are selected together with images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from wdsprep.changes.merged_datasets import Group, open_origin
from wdsprep.changes.selected_samples import Origin
from wdsprep.dataset.digests import hex_digest
from wdsprep.dataset.manifest import Manifest
from wdsprep.errors import UsageError
from wdsprep.loading.join import join_datasets
from wdsprep.loading.open_datasets import open_stream
from wdsprep.loading.options import Stream
from wdsprep.loading.where import Subset, find_subset
from wdsprep.sources.patterns import is_table


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedColumns:
    """The places of joined scores and tables, for each dataset that is selected from.

    `digest` is a digest of their content.
    """

    places: tuple[tuple[str, ...], ...] = ()
    digest: str = ""


def find_columns(groups: Sequence[Group], join: Sequence[str], condition: str) -> JoinedColumns:
    """Return the places of the scores and tables whose columns a condition may use.

    They are those in `join`, and the scores that are selected together with the first group. There
    are none if the condition is empty.
    """
    origins = groups[0].origins
    if not condition:
        return JoinedColumns(places=((),) * len(origins))
    follow = [g for g in groups[1:] if g.follows and g.origins[0].manifest.is_scored]
    along = [tuple(group.origins[at].url for group in follow) for at in range(len(origins))]
    named = match_places([(origin.url, origin.manifest) for origin in origins], join)
    places = tuple(
        tuple(dict.fromkeys((*own, *beside))) for own, beside in zip(along, named, strict=True)
    )
    columns = JoinedColumns(places=places)
    return replace(columns, digest=_digest(origins, columns, condition))


def match_places(
    datasets: Sequence[tuple[str, Manifest]], join: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return the places in `join` that belong to each dataset, given by its place and manifest.

    Scores belong to the datasets of their images, and tables to all. A single dataset gets all
    places: those that do not fit are refused when they are joined. With several datasets, raise
    UsageError for scores that belong to none of them.
    """
    tables = [place for place in join if is_table(place)]
    scores = [open_origin(place) for place in join if not is_table(place)]
    if len(datasets) == 1:
        return [(*(each.url for each in scores), *tables)]
    made_of = [manifest.image_digests() for _, manifest in datasets]
    found: list[list[str]] = [[] for _ in datasets]
    for each in scores:
        own = each.manifest.image_digests()
        fits = [at for at, digests in enumerate(made_of) if not own.isdisjoint(digests)]
        if not fits:
            raise UsageError(
                f"--join {each.shown} is of other images than {datasets[0][0]} and the datasets "
                "after it: give the scores of these"
            )
        for at in fits:
            found[at].append(each.url)
    return [(*own, *tables) for own in found]


def _digest(origins: Sequence[Origin], columns: JoinedColumns, condition: str) -> str:
    """Return a digest of the content of joined columns, or "" if nothing is joined."""
    places = dict.fromkeys(chain.from_iterable(columns.places))
    contents = [open_origin(place).content for place in places if not is_table(place)]
    if len(contents) < len(places):
        subsets = subsets_of(origins, columns, condition)
        tables = chain.from_iterable(subset.tables for subset in subsets)
        contents += dict.fromkeys(table.digest for table in tables if is_table(table.url))
    return hex_digest("\n".join(contents).encode()) if contents else ""


def subsets_of(origins: Sequence[Origin], columns: JoinedColumns, condition: str) -> list[Subset]:
    """Return the samples of each dataset that meet a condition.

    Samples that a joined dataset lacks do not meet it.
    """
    each = zip(origins, columns.places, strict=True)
    return [select_samples(origin.url, places, condition) for origin, places in each]


def select_samples(
    url: str, places: Sequence[str], condition: str, *, columns: Sequence[str] = ()
) -> Subset:
    """Return the samples of a dataset that meet a condition on its columns and joined ones.

    The joined tables have the columns that the condition names, and `columns`.
    """
    stream = Stream(url, where=condition, join=places)
    (dataset, *_) = join_datasets(open_stream(stream, has_states=False))
    return find_subset(dataset, None, None, columns=columns)
