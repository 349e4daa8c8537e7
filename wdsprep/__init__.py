"""wdsprep turns image-caption downloads into tar shards that diffusion trainers stream.

The commands that work on datasets are the functions of their names here, with the same options.
They are loaded when they are first used: `import wdsprep` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wdsprep.changes.duplicates import duplicates
    from wdsprep.changes.remove import remove
    from wdsprep.changes.select import select
    from wdsprep.checks.repair import repair
    from wdsprep.checks.verify import verify
    from wdsprep.encoding.encode import encode
    from wdsprep.encoding.recipe import Encode
    from wdsprep.exporting.export import export
    from wdsprep.importing.import_latents import import_
    from wdsprep.loading.loader import load
    from wdsprep.loading.open_datasets import Stream
    from wdsprep.loading.streaming import stream
    from wdsprep.packing.pack import pack
    from wdsprep.reporting import report
    from wdsprep.reporting.card import card
    from wdsprep.reporting.inspect import inspect
    from wdsprep.scoring.score import score


__all__ = [
    "Encode",
    "Stream",
    "card",
    "duplicates",
    "encode",
    "export",
    "import_",
    "inspect",
    "load",
    "pack",
    "remove",
    "repair",
    "report",
    "score",
    "select",
    "stream",
    "verify",
]

_PLACES = {
    "Encode": "wdsprep.encoding.recipe",
    "Stream": "wdsprep.loading.open_datasets",
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
    "report": "wdsprep.reporting",
    "score": "wdsprep.scoring.score",
    "select": "wdsprep.changes.select",
    "stream": "wdsprep.loading.streaming",
    "verify": "wdsprep.checks.verify",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from wdsprep.version import __version__

        return __version__
    if name not in _PLACES:
        raise AttributeError(f"module 'wdsprep' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
