"""wdsprep turns image-caption downloads into tar shards that diffusion trainers stream.

The public names are loaded when they are first used: `import wdsprep` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wdsprep.encoding.encode import encode
    from wdsprep.encoding.on_the_way import Encode
    from wdsprep.loading.catalog import Stream
    from wdsprep.loading.loader import load
    from wdsprep.loading.streaming import stream


__all__ = ["Encode", "Stream", "encode", "load", "stream"]


_PLACES = {
    "Encode": "wdsprep.encoding.on_the_way",
    "Stream": "wdsprep.loading.catalog",
    "encode": "wdsprep.encoding.encode",
    "load": "wdsprep.loading.loader",
    "stream": "wdsprep.loading.streaming",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'wdsprep' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)
