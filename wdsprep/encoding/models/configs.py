"""The JSON files of a model: read, and checked before any library sees them.

A stranger may have written them. What they say is asked for by type and range, so that one line
names the file and what stands there. Refused are code that comes with a model, files outside of its
folder, and numbers that no network has: a library would run, open or allocate them.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wdsprep.errors import UsageError, WorkError
from wdsprep.text import brief

LARGEST_NBYTES = 1 << 24
"""The largest JSON that is read here: an index of the weights of a large network has 1 MB. Read, it
takes up to twenty times as much."""
MOST = 1 << 24
"""The largest number that a network's config may name: rows of a table, places in a text."""
MOST_LAYERS = 1 << 12
MOST_WIDTH = 1 << 16
MOST_STATES = 1 << 21
"""The widths of all layers of a text encoder together: Llama 3.1 of 405B has 2,064,384."""
MOST_BLOCKS = 8
"""Each of a VAE's but the last halves the sides."""
LAYERS = re.compile(r"layers?$|^depths?$|blocks?$")
BEYOND = re.compile(r"theta|window|base")
"""Matches the names of numbers that may be larger than that: nothing is allocated by them."""
NO_CODE = "which wdsprep never does: choose another --model, or add --text none"


@dataclass(frozen=True, slots=True)
class Config:
    """A JSON object of a stranger, whose values are checked by type and range."""

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Config":
        return cls(path, read_json(path))

    def get(self, name: str, default: Any = None) -> Any:
        """Return any value; null is as good as none."""
        value = self.values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None, *, most: int = MOST) -> int:
        value = self._named(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise self._wrong(name, value, f"a whole number from 1 to {most:,}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        return self._finite(name, self._named(name, default))

    def above_zero(self, name: str, default: float | None = None) -> float:
        if (value := self.real(name, default)) <= 0:
            raise self._wrong(name, value, "a number above 0")
        return value

    def reals(self, name: str) -> tuple[float, ...]:
        return tuple(self._finite(name, value) for value in self.list(name, MOST))

    def list(self, name: str, most: int) -> list[Any]:
        value = self._named(name, None)
        if not isinstance(value, list) or not 0 < len(value) <= most:
            raise self._wrong(name, value, f"a list of 1 to {most:,} values")
        return value

    def _named(self, name: str, default: Any) -> Any:
        if (value := self.get(name, default)) is None:
            raise UsageError(f"{self.path} names no {name}: choose another --model")
        return value

    def _finite(self, name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or abs(value) > MOST:
            raise self._wrong(name, value, "a finite number")
        return value  # type: ignore[no-any-return]  # as it stands there: settings hold it

    def _wrong(self, name: str, value: object, wanted: str) -> UsageError:
        return UsageError(f"{self.path} says {name} {brief(value)}, which has to be {wanted}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST_NBYTES:
            raise UsageError(f"{path} is larger than any config: choose another --model")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise WorkError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UsageError(f"{path} is no JSON ({error})") from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply: choose another --model") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is no JSON object")
    return value


def check_part(config: Config, *, is_ported: bool = False, remedy: str = NO_CODE) -> None:
    """Check the config of a network or a tokenizer that a library will load.

    It must not bring code that would be run. Where diffusers `is_ported` to have that code, it
    is not run, and may be named. `remedy` ends what is said of code.
    """
    for name, value in _each_value(config.values):
        if name == "auto_map" and value and not is_ported:
            raise UsageError(
                f"{config.path} wants to run code that comes with the model (auto_map, "
                f"trust_remote_code), {remedy}"
            )
        if "_implementation" in name and "/" in str(value):  # of the network, or of its parts
            raise UsageError(
                f"{config.path} wants to run code of another repository ({name} {brief(value)}), "
                f"{remedy}"
            )
        if name.endswith("_file") and _is_elsewhere(config.path.parent, value):
            raise UsageError(
                f"{config.path} names a file outside of the model ({name} {brief(value)}): take "
                "it out there, or choose another --model"
            )


def check_sizes(config: Config) -> None:
    """Check the numbers of a network's config; its weights must bear them out when it is loaded."""
    for name, value in _each_value(config.values):
        if isinstance(value, int | float):
            most = MOST_LAYERS if LAYERS.search(name) else MOST
            if value > most and not BEYOND.search(name):
                raise UsageError(
                    f"{config.path} says {name} {brief(value)}, and no network has over {most:,}: "
                    "choose another --model"
                )


def check_weight_index(config: Config, folder: str, files: frozenset[str]) -> None:
    """Check that an index of weights names no other files than those beside it."""
    listed = config.get("weight_map", {})
    for name in listed.values() if isinstance(listed, dict) else [listed]:
        if f"{folder}/{name}".lstrip("/") not in files:
            raise UsageError(
                f"{config.path} names {brief(name)}, which is not among the weights beside it: "
                "choose another --model"
            )


def _is_elsewhere(folder: Path, value: object) -> bool:
    """Return whether a value is the path of an existing file that is not in the folder.

    Authors leave paths of their own machines, which name nothing here.
    """
    if not isinstance(value, str) or "\0" in value or not value:
        return False
    try:
        path = (folder / value).absolute()
        return path.parent != folder.absolute() and path.exists()
    except OSError:
        return False


def _each_value(config: object) -> Iterator[tuple[str, Any]]:
    """Yield each value with the name that it stands under, at any depth."""
    left = [("", config)]
    while left:
        name, value = left.pop()
        if name:
            yield name, value
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(name, one) for one in value]
