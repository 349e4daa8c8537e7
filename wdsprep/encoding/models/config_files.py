"""The JSON files of a model: read, and checked before any library sees them.

Anyone may have written them. Values are read with a type and a range, so that an error is one line
that names the file and the value. Refused are code that comes with a model, files outside of its
folder, and numbers that no network has: a library would run, open or allocate them.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wdsprep.errors import UsageError, WorkError
from wdsprep.text import brief

if TYPE_CHECKING:
    from wdsprep.encoding.models.model_files import ModelFiles

LARGEST_NBYTES = 1 << 24
"""The largest JSON that is read here: an index of the weights of a large network has 1 MB. In
memory it takes up to twenty times as much."""
MOST = 1 << 24
"""The largest number that a network's config may have: rows of a table, positions in a text."""
MOST_LAYERS = 1 << 12
MOST_WIDTH = 1 << 16
MOST_STATES = 1 << 21
"""The widths of all layers of a text encoder together: Llama 3.1 of 405B has 2,064,384."""
MOST_SIDE = 1 << 11
"""The most pixels of a side of what an image processor makes: 2,048 x 2,048 take 50 MB an image."""
MOST_BLOCKS = 8
"""The most blocks of a VAE, of which each but the last halves the sides."""
LAYERS = re.compile(r"layers?$|^depths?$|blocks?$")
SIDES = re.compile(r"size|edge|height|width|crop|patch")
"""Matches the names of numbers by which an image processor decides the size of what it makes."""
BEYOND = re.compile(r"theta|window|base")
"""Matches the names of numbers that may be larger than `MOST`: nothing is allocated by them."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""The files that say what a processor makes of images."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
ADAPTER = "adapter_config.json"
"""A file that names a base model, which transformers would load instead of the weights here."""
NO_CODE = "which wdsprep never does: choose another --model, or add --text none"


def unsuitable(why: str) -> UsageError:
    """Return the error of a model that cannot be used."""
    return UsageError(f"{why}: choose another --model")


@dataclass(frozen=True, slots=True)
class Config:
    """A JSON object in a file of a model, whose values are read with a type and a range."""

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Config":
        return cls(path, read_json(path))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value of any type, or the default if it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None, *, most: int = MOST) -> int:
        value = self._require(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise self._value_error(name, value, f"a whole number from 1 to {most:,}")
        return value

    def real(self, name: str, default: float | None = None, *, above: float = -MOST) -> float:
        return self._number(name, self._require(name, default), above)

    def reals(self, name: str, *, above: float = -MOST) -> tuple[float, ...]:
        return tuple(self._number(name, value, above) for value in self.list(name, MOST))

    def list(self, name: str, most: int) -> list[Any]:
        value = self._require(name, None)
        if not isinstance(value, list) or not 0 < len(value) <= most:
            raise self._value_error(name, value, f"a list of 1 to {most:,} values")
        return value

    def _require(self, name: str, default: Any) -> Any:
        if (value := self.get(name, default)) is None:
            raise unsuitable(f"{self.path} lacks {name}")
        return value

    def _number(self, name: str, value: Any, above: float) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not above < value <= MOST:
            raise self._value_error(name, value, f"a number above {above:,}, up to {MOST:,}")
        return value  # type: ignore[no-any-return]  # as it stands there: settings hold it

    def _value_error(self, name: str, value: object, wanted: str) -> UsageError:
        return unsuitable(f"{self.path} says {name} {brief(value)}, which has to be {wanted}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST_NBYTES:
            raise unsuitable(f"{path} is larger than any config")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise WorkError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise unsuitable(f"{path} is not JSON ({error})") from None
    except RecursionError:
        raise unsuitable(f"{path} is nested too deeply") from None
    if not isinstance(value, dict):
        raise unsuitable(f"{path} is not a JSON object")
    return value


def fetch_configs(
    place: "ModelFiles",
    files: Sequence[str],
    *,
    ported: Collection[str] = (),
    remedy: str = NO_CODE,
) -> Path:
    """Fetch the JSON among the files that a model needs, check it, and return its folder.

    Raise UsageError if a file is not there, if a config would run code, open other files or make
    too large a network, or if a part has an adapter, as its weights lie elsewhere. Of the parts
    that are `ported` to diffusers the `auto_map` is not run, and is allowed. `remedy` is the end of
    a message about code.
    """
    _check_there(place, files)
    names, jsons = place.names(), sorted(name for name in files if name.endswith(".json"))
    folder = place.fetch(jsons)
    for file in jsons:
        part, _, name = file.rpartition("/")
        if name.endswith("config.json"):
            config = Config.read(folder / file)
            check_part(config, is_ported=part in ported, remedy=remedy)
            if name in ("config.json", *PROCESSORS):
                check_sizes(of_images(config))
        elif ".safetensors.index" in name:
            _check_weight_index(Config.read(folder / file), part, files)
        adapter = f"{part}/{ADAPTER}".lstrip("/")
        if (part or name == "config.json") and adapter in names:  # none of a whole pipeline
            raise UsageError(
                f"{place.what} has {adapter}, so its weights lie elsewhere: merge them, or choose "
                "another --model"
            )
    return folder


def _check_there(place: "ModelFiles", files: Sequence[str]) -> None:
    """Raise UsageError if a model lacks files, or has only pickled weights in place of them."""
    names = place.names()
    missing = [name for name in files if name not in names]
    folders = {name.rpartition("/")[0] for name in missing if name.endswith(".safetensors")}
    pickled = [n for n in names if n.endswith(PICKLES) and n.rpartition("/")[0] in folders]
    if pickled:
        raise UsageError(
            f"{place.what} has only pickled weights ({min(pickled)}), which can run code when they "
            "are opened: convert it to safetensors, or pass another --model"
        )
    if missing:
        raise unsuitable(f"{place.what} lacks {', '.join(missing)}")


def of_images(config: Config) -> Config:
    """Return the section on images of a processor's config, or the config if it has none."""
    if config.path.name != PROCESSORS[1]:
        return config  # a video's sizes are larger, and there is none
    return Config(config.path, config.get("image_processor", {}))


def check_part(config: Config, *, is_ported: bool, remedy: str) -> None:
    """Raise UsageError if a config of a model's part names code, or a file outside of the model."""
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
                f"{config.path} names a file outside of the model ({name} {brief(value)}): remove "
                "that entry, or choose another --model"
            )


def check_sizes(config: Config) -> None:
    """Raise UsageError if a network's config has a number that is larger than any network has.

    Whether the numbers match the weights is checked when these are loaded.
    """
    for name, value in _each_value(config.values):
        most = MOST_LAYERS if LAYERS.search(name) else MOST
        if isinstance(value, int | float) and value > most and not BEYOND.search(name):
            what = f"{name} {brief(value)}, and no network has over {most:,}"
            raise unsuitable(f"{config.path} says {what}")


def check_sides(config: Config) -> None:
    """Raise UsageError if an image processor's config has sides that no network of images takes."""
    for name, value in _each_value(config.values):
        is_side = isinstance(value, int | float) and SIDES.search(name)
        if is_side and not 0 <= value <= MOST_SIDE:
            limits = f"no network takes images of under 0 or over {MOST_SIDE:,} pixels a side"
            raise unsuitable(f"{config.path} says {name} {brief(value)}, and {limits}")


def _check_weight_index(config: Config, folder: str, files: Sequence[str]) -> None:
    """Raise UsageError if an index of weights lists a file that is not beside it."""
    listed = config.get("weight_map", {})
    for name in listed.values() if isinstance(listed, dict) else [listed]:
        if f"{folder}/{name}".lstrip("/") not in files:
            what = f"{brief(name)}, which is not among the weights beside it"
            raise unsuitable(f"{config.path} names {what}")


def _is_elsewhere(folder: Path, value: object) -> bool:
    """Return whether a value is the path of an existing file that is not directly in the folder.

    Authors leave paths of their own machines, which do not exist here.
    """
    if not isinstance(value, str) or "\0" in value or not value:
        return False
    try:
        path = (folder / value).absolute()
        return path.parent != folder.absolute() and path.exists()
    except OSError:
        return False


def _each_value(config: object) -> Iterator[tuple[str, Any]]:
    """Yield each named value of a config, at any depth; values in a list have the list's name."""
    left = [("", config)]
    while left:
        name, value = left.pop()
        if name:
            yield name, value
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(name, item) for item in value]
