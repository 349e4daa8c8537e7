"""`import`: turn latents that another tool has cached into a dataset, file by file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wdsprep.errors import FingerprintError, SourceError
from wdsprep.importing.options import ImportOptions
from wdsprep.options import takes_options
from wdsprep.runners.job import JobListener
from wdsprep.runners.options import WorkerOptions
from wdsprep.text import examples, plural, shown

if TYPE_CHECKING:
    from wdsprep.dataset.manifest import Manifest
    from wdsprep.dataset.settings import Settings
    from wdsprep.dataset.shapes import Size
    from wdsprep.dataset.unit_locks import Edition
    from wdsprep.encoding.image_shards import ImageShard
    from wdsprep.importing.column_names import CachedColumn
    from wdsprep.importing.import_plan import ImportPlan
    from wdsprep.importing.latent_caches import LatentCache
    from wdsprep.importing.worker import ImportWorker
    from wdsprep.runners.base import Runner
    from wdsprep.runners.run import Outcome
    from wdsprep.sources.base import Item

PROBED_FILES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportBegun:
    """A summary of an import before its first worker starts."""

    kind: str
    files: int
    columns: Mapping[str, str]
    """The columns that are imported, by the names of the arrays that they become."""
    fields: tuple[str, ...]
    """The arrays of a sample, with their dtypes and shapes."""
    bits: tuple[str, ...]
    """The columns whose whole numbers are read as the bits of bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportWork:
    """The work of an import, which can be pickled.

    Its units are `ImageShard`s, each of which is a file of the cache.
    """

    cache: "LatentCache"
    plan: "ImportPlan"
    latents: str
    settings: "Settings"
    edition: str = ""
    """The mark of the dataset's edition."""
    caption_col: str = ""
    empty: Mapping[str, bytes]
    """The arrays of the empty caption by the name of their member, if the user gives them."""

    def open(self) -> "ImportWorker":
        from wdsprep.importing.worker import ImportWorker  # torch: for workers alone

        return ImportWorker(self)


@takes_options(ImportOptions)
def import_(options: ImportOptions) -> "Outcome":
    """Turn latents that another tool has cached in `source` into the dataset `latents`.

        imported = wdsprep.import_("cache-mds", "shards/latents-256")
        wdsprep.load("shards/latents-256", global_batch=64)

    The options are those of `wdsprep import`. After an interrupt or a kill, the same call goes on
    where it was.
    """
    from wdsprep.encoding.shape_lists import sizes_of
    from wdsprep.importing.column_names import parse_columns
    from wdsprep.importing.import_plan import empty_of, empty_setting, resolution_of, settings_of
    from wdsprep.importing.latent_caches import find_cache
    from wdsprep.runners.run import Run, do_runs, open_dataset_to_write
    from wdsprep.runners.track import RunTracking
    from wdsprep.store.base import absolute, check_apart

    listener = options.heard_by
    resolution, text_length = options.resolution, options.text_length
    asked = parse_columns(options.columns)
    sizes = sizes_of(options.shapes, resolution)
    source, latents = absolute(options.source), absolute(options.latents)  # workers run elsewhere
    cache = find_cache(source)
    check_apart(cache.url, latents)
    items = list(cache.items())
    plan = _plan(cache, items, asked, resolution=resolution, sizes=sizes, text_length=text_length)
    pixels = resolution_of(plan, resolution, cache.url)
    settings = settings_of(
        plan,
        kind=cache.kind,
        resolution=pixels,
        scale=options.scale,
        shift=options.shift,
    )
    settings |= {"caption_col": options.caption_col} if options.caption_col else {}
    no_caption = empty_of(options.empty, plan.fields)
    settings |= empty_setting(options.empty, no_caption)
    shards = _shards(cache, items, pixels)
    edition, manifest = open_dataset_to_write(
        latents, "latents", settings, overwrite=options.overwrite
    )
    wanted, pending, manifest = _find_pending(edition, manifest, cache, shards, options.limit)
    listener.begun(_summarise(cache, items, plan))
    work = ImportWork(
        cache=cache,
        plan=plan,
        latents=latents,
        settings=settings,
        edition=edition.mark,
        caption_col=options.caption_col,
        empty=no_caption,
    )
    made = _runner(options, pending, listener) if pending else None
    run = Run(
        edition,
        manifest,
        count=len(pending),
        limit=options.limit if wanted != shards else 0,
    )
    with RunTracking(
        options.track if pending else "",
        [latents],
        listener,
        settings=manifest.settings,
        before=manifest.samples,
    ) as status:
        (imported,) = do_runs([run], made, work, iter(pending), status=status)
    return imported


def _plan(
    cache: "LatentCache",
    items: "Sequence[Item]",
    asked: "Sequence[CachedColumn]",
    *,
    resolution: int,
    sizes: "tuple[Size, ...]",
    text_length: int,
) -> "ImportPlan":
    """Plan the import from the first rows of the first files."""
    from wdsprep.importing.column_names import choose_columns
    from wdsprep.importing.import_plan import settle_plan
    from wdsprep.importing.latent_caches import rows_of

    what = f"{cache.url}/{shown(items[0].name)}"
    chosen = choose_columns(cache.columns(items[0]), asked, resolution=resolution, what=what)
    rows = rows_of(cache, items[:PROBED_FILES], chosen.names)
    return settle_plan(
        chosen, rows, text_length=text_length, sizes=sizes, resolution=resolution, what=what
    )


def _shards(
    cache: "LatentCache", items: "Sequence[Item]", resolution: int
) -> "tuple[ImageShard, ...]":
    """Return the files of the cache as units of work, whose names begin with the resolution.

    Raise SourceError if two of them would have the same name, or if a name is not UTF-8.
    """
    from wdsprep.encoding.image_shards import ImageShard
    from wdsprep.importing.latent_caches import stem_of

    found: dict[str, ImageShard] = {}
    keys: set[str] = set()
    for item in items:
        stem = stem_of(item.name)
        if shown(stem) != stem:
            raise SourceError(
                f"{cache.url}/{shown(stem)} has a name that is not UTF-8: rename the file"
            )
        folder = f"{resolution}/"
        name, key = folder + stem.removeprefix(folder), stem.replace(".", "_")
        if name in found or key in keys:
            raise SourceError(
                f"{cache.url}/{item.name} and another file would have the same name here: rename "
                "one"
            )
        keys.add(key)
        found[name] = ImageShard(name=name, item=item)
    return tuple(found.values())


def _find_pending(
    edition: "Edition",
    manifest: "Manifest",
    cache: "LatentCache",
    shards: "tuple[ImageShard, ...]",
    limit: int,
) -> "tuple[tuple[ImageShard, ...], list[ImageShard], Manifest]":
    """Return the files that are wanted, those not imported yet, and the manifest.

    Units of files that an earlier limit had cut are removed, and imported again. Raise
    FingerprintError if a file that was imported has changed or is gone.
    """
    from wdsprep.encoding.image_shards import ImageShards
    from wdsprep.encoding.pending_shards import pending_shards, remove_stale_units

    units = manifest.ledger.units()
    done = dict(zip(units, manifest.ledger.column("input"), strict=True))
    now = {shard.name: shard.whole_input for shard in shards}
    if changed := [unit for unit, made in done.items() if now.get(unit) != made.partition(":")[0]]:
        raise FingerprintError(
            f"{edition.store.url} was made of other files, as {plural(len(changed), 'file')} of "
            f"{cache.url} changed or went away since, or has another date ({examples(changed)}): "
            "give another place for the new latents, or start over with --overwrite"
        )
    known = ImageShards(
        url=cache.url,
        resolution=0,
        shards=shards,
        is_whole=True,
        max_area=0,
        count=cache.count,
    )
    wanted = known.first(limit)
    left = pending_shards(edition.store, manifest, shards, wanted)
    remove_stale_units(edition, left.stale)
    return wanted, left.shards, left.manifest


def _runner(
    options: WorkerOptions, pending: "Sequence[ImageShard]", listener: JobListener
) -> "Runner":
    from wdsprep.runners.make_runner import runner_for

    nbytes = sum(shard.item.nbytes for shard in pending)
    return runner_for(options, len(pending), nbytes, told=listener.told, name="import")


def _summarise(cache: "LatentCache", items: "Sequence[Item]", plan: "ImportPlan") -> ImportBegun:
    return ImportBegun(
        kind=cache.kind,
        files=len(items),
        columns={column.role: column.name for column in plan.chosen.columns},
        fields=tuple(f"{field.name} {field}" for field in plan.fields),
        bits=plan.bits,
    )
