"""wdsprep turns image-caption downloads into tar shards that diffusion trainers stream.

The commands that work on datasets are the functions of their names here, with the same options.
They are loaded when they are first used: `import wdsprep` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wdsprep.checks.inspect import inspect
    from wdsprep.checks.repair import repair
    from wdsprep.checks.verify import verify
    from wdsprep.encoding.encode import encode
    from wdsprep.encoding.recipe import Encode
    from wdsprep.loading.catalog import Stream
    from wdsprep.loading.loader import load
    from wdsprep.loading.streaming import stream
    from wdsprep.packing.pack import pack
    from wdsprep.reporting import report


__all__ = [
    "Encode",
    "Stream",
    "encode",
    "inspect",
    "load",
    "pack",
    "repair",
    "report",
    "stream",
    "verify",
]

_PLACES = {
    "Encode": "wdsprep.encoding.recipe",
    "Stream": "wdsprep.loading.catalog",
    "encode": "wdsprep.encoding.encode",
    "inspect": "wdsprep.checks.inspect",
    "load": "wdsprep.loading.loader",
    "pack": "wdsprep.packing.pack",
    "repair": "wdsprep.checks.repair",
    "report": "wdsprep.reporting",
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
