"""`import`: turn latents that another tool has cached into a dataset, file by file."""

from collections.abc import Sequence
from functools import partial
from itertools import chain

from wdsprep.dataset.manifest import Manifest, image_shard_digest
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.unit_locks import Edition
from wdsprep.encoding.image_shards import ImageShard, first_shards
from wdsprep.encoding.run_plan import PendingShards, pending_shards
from wdsprep.encoding.shape_lists import sizes_of
from wdsprep.errors import FingerprintError, SourceError
from wdsprep.importing.column_names import ImportPlan, choose_columns, parse_columns
from wdsprep.importing.import_plan import ZEROS, empty_of, settings_of, settle_plan
from wdsprep.importing.latent_caches import LatentCache, find_cache, stem_of
from wdsprep.importing.options import ImportOptions
from wdsprep.importing.sample_files import find_sample_files
from wdsprep.importing.worker import import_file
from wdsprep.options import takes_options
from wdsprep.runners.make_runner import prepare_nothing, runner_for
from wdsprep.runners.run import Outcome, Run, do_runs, open_dataset_to_write, remove_units
from wdsprep.sources.base import Item
from wdsprep.store.base import absolute, check_apart
from wdsprep.text import examples, plural, shown

PROBED_FILES = 4
ImportBegun = tuple[str, int, ImportPlan]
"""An import before its first worker starts: the kind of its cache, its files, and its plan."""


@takes_options(ImportOptions)
def import_(options: ImportOptions) -> Outcome:
    """Turn latents that another tool has cached in `source` into the dataset `latents`.

        imported = wdsprep.import_("cache-mds", "shards/latents-256")
        wdsprep.load("shards/latents-256", global_batch=64)

    The options are those of `wdsprep import`. After an interrupt or a kill, the same call goes on
    where it was.
    """
    listener = options.listener_or_mute
    asked, resolution = parse_columns(options.columns), options.resolution
    sizes = sizes_of(options.shapes, resolution)
    source, latents = absolute(options.source), absolute(options.latents)  # workers run elsewhere
    cache = find_sample_files(source) or find_cache(source)
    check_apart(cache.url, latents)
    if not (items := list(cache.items())):
        raise SourceError(f"{source} lists no samples: give a cache that has some")
    first = f"{cache.url}/{shown(items[0].name)}"
    chosen = choose_columns(cache.columns(items), asked, resolution=resolution, what=first)
    rows = chain.from_iterable(cache.rows(item, chosen.names) for item in items[:PROBED_FILES])
    plan = settle_plan(chosen, rows, options=options, sizes=sizes, what=first)
    settings = settings_of(plan, cache, options, sizes=sizes)
    no_caption = empty_of(options.empty, plan.fields)
    if options.empty:
        digest = hex_digest(b"".join(no_caption.values()))
        settings["empty"] = ZEROS if options.empty == ZEROS else digest
    shards = _shards(cache, items, settings["resolution"])
    edition, manifest = open_dataset_to_write(
        latents, "latents", settings, overwrite=options.overwrite
    )
    wanted = first_shards(shards, options.limit, cache.count)
    left = _find_pending(edition, manifest, cache, shards, wanted)
    pending = left.shards
    begun: ImportBegun = cache.kind, len(items), plan
    listener.on_begin(begun)
    runner = None
    if pending:
        nbytes = sum(shard.item.nbytes for shard in pending)
        runner = runner_for(
            options, len(pending), nbytes, on_message=listener.on_message, name="import"
        )
    run = Run(
        edition, left.manifest, count=len(pending), limit=options.limit if wanted != shards else 0
    )
    import_unit = partial(
        import_file, cache=cache, plan=plan, edition=edition, settings=settings, empty=no_caption
    )
    work = partial(prepare_nothing, import_unit)
    (imported,) = do_runs([run], runner, work, pending, listener=listener, track=options.track)
    return imported


def _shards(cache: LatentCache, items: Sequence[Item], resolution: int) -> tuple[ImageShard, ...]:
    """Return the files of the cache as units of work, whose names begin with the resolution.

    Raise SourceError if two of them would have the same name, or if a name is not UTF-8.
    """
    shards: dict[str, ImageShard] = {}
    for item in items:
        stem, folder = stem_of(item.name), f"{resolution}/"
        if shown(stem) != stem:
            raise SourceError(
                f"{cache.url}/{shown(stem)} has a name that is not UTF-8: rename the file"
            )
        shard = ImageShard(name=folder + stem.removeprefix(folder), item=item)
        if shards.setdefault(shard.name.replace(".", "_"), shard) is not shard:  # as in its keys
            raise SourceError(
                f"{cache.url}/{item.name} and another file would have the same name here: rename "
                "one"
            )
    return tuple(shards.values())


def _find_pending(
    edition: Edition,
    manifest: Manifest,
    cache: LatentCache,
    shards: Sequence[ImageShard],
    wanted: Sequence[ImageShard],
) -> PendingShards:
    """Return the wanted files that are not imported yet.

    If an earlier `--limit` ended within a file, its unit is removed and imported again. Raise
    FingerprintError if a file that was imported has changed or is gone.
    """
    left = pending_shards(edition.store, manifest, shards, wanted, redo_changed=True)
    now = {shard.name: shard.whole_input for shard in shards}
    made_of = ((unit, image_shard_digest(stated)) for unit, stated in left.stale.items())
    if changed := [unit for unit, digest in made_of if now.get(unit) != digest]:
        raise FingerprintError(
            f"{edition.store.url} was made of other files, as {plural(len(changed), 'file')} of "
            f"{cache.url} changed or went away since, or has another date ({examples(changed)}): "
            "give another place for the new latents, or start over with --overwrite"
        )
    remove_units(edition, left.stale)
    return left
