"""wdsprep turns image-caption downloads into tar shards that diffusion trainers stream.

The commands that work on datasets are the functions of their names here, with the same options.
They are loaded when they are first used: `import wdsprep` costs nothing.

The way of an image through the package, in the order in which a newcomer should read it:

 1. `cli.commands:pack` reads a command line, and calls
 2. `packing.pack:pack`, whose options `packing.options:PackOptions` declares.
 3. `sources.recognise:recognise` tells what kind of source there is.
 4. `packing.slices:SlicePlan` divides it into slices, the units of work.
 5. `runners.run:do_runs` has workers do these; `runners.schedule:Schedule` says who gets which, and
    what a failure costs.
 6. `packing.worker:PackWorker` packs slices.
 7. `fetch.client:Fetcher` fetches an image that is a URL.
 8. `packing.worker:PackedSlice` decides on each sample, by its caption and its metadata,
 9. `images.pixel_rule:prepare` by its image, which it makes upright and sRGB if it is not.
10. `dataset.tar.write:TarWriter` writes the sample into a tar of its bucket.
11. `dataset.draft:Draft` gives the files of a slice their names, its receipt last.
12. `runners.run:Run` lists all receipts in the manifest.
13. `encoding.encode:encode` begins with the image shards; `make_plan` there plans all
    of it before anything is written, and `encoding.run_plan:do_plan` does it.
14. `encoding.worker:EncodeWorker` makes a latent shard of each image shard.
15. `encoding.image_shards:read_rows` reads the shard; `images.crop:crop` decodes and crops the
    image. `encoding.sample_chain` lists all steps of a sample from here to its latents.
16. `encoding.engine:Engine` puts images and captions into batches for the device.
17. `encoding.models.encoder:LatentEncoder` runs the VAE and the text encoder.
18. `encoding.latent_shard:LatentShard` writes what comes back, in the order of the image shard.
19. `loading.loader:load` opens the latents; `loading.order.global_order:Order` says which sample
    comes when.
20. `loading.batch_reader:Reader` reads samples into the batch that a trainer gets.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wdsprep.changes.duplicates import duplicates as duplicates
    from wdsprep.changes.remove import remove as remove
    from wdsprep.changes.select import select as select
    from wdsprep.checks.repair import repair as repair
    from wdsprep.checks.verify import verify as verify
    from wdsprep.encoding.encode import encode as encode
    from wdsprep.encoding.recipe_options import Encode as Encode
    from wdsprep.exporting.export import export as export
    from wdsprep.importing.import_latents import import_ as import_
    from wdsprep.loading.loader import load as load
    from wdsprep.loading.options import Stream as Stream
    from wdsprep.loading.streaming.stream import stream as stream
    from wdsprep.packing.pack import pack as pack
    from wdsprep.reporting.card import card as card
    from wdsprep.reporting.inspect import inspect as inspect
    from wdsprep.reporting.report import report as report
    from wdsprep.scoring.score import score as score
    from wdsprep.tables.relation import table as table

PLACES = {
    "Encode": "wdsprep.encoding.recipe_options",
    "Stream": "wdsprep.loading.options",
    "card": "wdsprep.reporting.card",
    "duplicates": "wdsprep.changes.duplicates",
    "encode": "wdsprep.encoding.encode",
    "export": "wdsprep.exporting.export",
    "import_": "wdsprep.importing.import_latents",
    "inspect": "wdsprep.reporting.inspect",
    "load": "wdsprep.loading.loader",
    "pack": "wdsprep.packing.pack",
    "remove": "wdsprep.changes.remove",
    "repair": "wdsprep.checks.repair",
    "report": "wdsprep.reporting.report",
    "score": "wdsprep.scoring.score",
    "select": "wdsprep.changes.select",
    "stream": "wdsprep.loading.streaming.stream",
    "table": "wdsprep.tables.relation",
    "verify": "wdsprep.checks.verify",
}
"""The module of each public name."""
__all__ = sorted(PLACES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from wdsprep.version import __version__

        return __version__
    if name not in PLACES:
        raise AttributeError(f"module 'wdsprep' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
