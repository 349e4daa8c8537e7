"""wdsprep turns image-caption downloads into tar shards that diffusion trainers stream.

The public names are loaded when they are first used: `import wdsprep` costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wdsprep.encoding import encode
    from wdsprep.loader import load
    from wdsprep.loader.catalog import Stream
    from wdsprep.online import Encode
    from wdsprep.streaming import stream

__all__ = ["Encode", "Stream", "encode", "load", "stream"]
__version__ = "0.1.0"

_PLACES = {
    "Encode": "wdsprep.online",
    "Stream": "wdsprep.loader.catalog",
    "encode": "wdsprep.encoding",
    "load": "wdsprep.loader",
    "stream": "wdsprep.streaming",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'wdsprep' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_PLACES[name]), name)
