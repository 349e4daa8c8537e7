"""Latent datasets for tests: encoded in this process or by the real command, and read back."""

import contextlib
import gc
import io
import json
import subprocess
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from copy import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from pyarrow import parquet as pq
from torch import Tensor

from tests.kit.packs import SCRIPT, jpeg, manifest_of, once, pack, rejects_of, write_files
from wdsprep.cli import main
from wdsprep.dataset.file_names import table_name
from wdsprep.dataset.npy_arrays import Field
from wdsprep.encoding.encode import encode
from wdsprep.encoding.models.base import Encoded, Tokens
from wdsprep.encoding.models.device import Encoder
from wdsprep.encoding.models.encoder import load_encoder
from wdsprep.encoding.models.find_model import Model
from wdsprep.encoding.recipe_options import Encode
from wdsprep.runners.base import Event, Finished, HopelessError, Quarantined, Step, Unit, Work
from wdsprep.runners.run import Outcome

SIZES = ((64, 80), (100, 90), (200, 136))  # two of bucket 64, one of 128
LONG = "one two three four five six seven " * 15
CAPTIONS = ("a photo of a cat", "", LONG, "Ein Hund im Schnee 雪 🐕", "red, green; blue!")
COUNT = 24
SHARDS = 8  # of these pictures, packed in slices of 6
LOCAL = ("--device", "cpu", "--runner", "local")
TOY = ("--model", "tiny", *LOCAL)


def pictures(root: Path, numbers: Iterable[int] = range(COUNT)) -> Path:
    files: dict[str, bytes | str] = {}
    for number in numbers:
        stem = f"photo-{number:04d}"
        files[f"{stem}.jpg"] = jpeg(number, SIZES[number % 3])
        files[f"{stem}.txt"] = CAPTIONS[number % 5]
    return write_files(root, files)


def packed(source: Path | str, images: Path | str, *options: str) -> Path:
    """Shards from slices of 6 pictures, in the buckets 64 and 128."""
    return pack(source, images, "--buckets", "64,128", "--samples-per-shard", "6", *options)


# --- encoding


class Here:
    """A runner that does one unit after another in this process, each once."""

    def run(self, work: Work, units: Iterable[Unit]) -> Generator[Event, None, None]:
        with closing(work()) as call:  # type: ignore[type-var]
            for unit in units:
                yield from self._do(call, unit)

    def _do(self, call: Callable[[Any], Generator[Any, None, Any]], unit: Unit) -> Iterator[Event]:
        steps = call(unit)
        try:
            while True:
                yield Step(unit=unit, value=next(steps))
        except StopIteration as end:
            yield Finished(unit=unit, result=end.value)
        except HopelessError as error:
            yield Quarantined(unit=unit, attempts=1, reason=str(error), trace="")


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """No worker processes: torch and the toy model are loaded once for all tests."""
    with (
        patch("wdsprep.encoding.run_plan.make_runner", lambda *_args, **_options: Here()),
        patch("wdsprep.encoding.models.encoder.load_encoder", _loaded),
    ):
        yield


_TOYS: dict[str, Any] = {}


def _loaded(model: Model, recipe: Encode, device: str) -> Any:
    """Load an encoder. The toy's are kept, for it never changes; each caller has its own copy."""
    if model.name != "tiny":
        return load_encoder(model, recipe, device)
    known = repr((model, recipe, device))
    if known not in _TOYS:
        _TOYS[known] = load_encoder(model, recipe, device)
        gc.freeze()  # what is kept is no garbage: going through it would take longer than an encode
    return copy(_TOYS[known])


def encode_here(images: Path | str, out: Path | str, **options: Any) -> Outcome:
    wanted = {"resolution": 64, "model": "tiny", "device": "cpu", "runner": "local", **options}
    with in_this_process():
        return encode(str(images), str(out), **wanted)


def run_encode(
    images: Path | str, out: Path | str, *options: str
) -> "subprocess.CompletedProcess[str]":
    """The real command with real workers, ready within minutes on a busy machine."""
    words = [str(SCRIPT), "encode", str(images), str(out)]
    words += once("--resolution", "64", *TOY, *options)
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


def command(images: Path, out: Path, *more: str) -> int:
    return run(images, out, "--resolution", "64", *more)


def run(*words: str | Path) -> int:
    """`wdsprep encode` in this process, with the toy model where `words` name no other."""
    with in_this_process():
        places = [str(word) for word in words[:2] if not str(word).startswith("--")]
        options = map(str, words[len(places) :])
        return main(["encode", *places, *once(*TOY, *options)])


# --- looking at what came of it


def members(tar: Path) -> dict[str, dict[str, bytes]]:
    """The fields of each sample of a tar by key, all in order."""
    found: dict[str, dict[str, bytes]] = {}
    with tarfile.open(tar) as file:
        for info in file:
            folder, slash, base = info.name.rpartition("/")
            key, _, field = base.partition(".")
            data = file.extractfile(info)
            assert data is not None
            found.setdefault(f"{folder}{slash}{key}", {})[field] = data.read()
    return found


def samples_in(root: Path | str) -> dict[str, dict[str, bytes]]:
    """The fields of each sample of a dataset by key, as its tars have them."""
    tars = sorted(Path(root).glob("*/*.tar"))
    return {key: fields for tar in tars for key, fields in members(tar).items()}


def latents_of(root: Path) -> dict[str, dict[str, Any]]:
    """All samples of a latent dataset by key: arrays, facts and caption."""
    found: dict[str, dict[str, Any]] = {}
    for shard in manifest_of(root).shards:
        for key, fields in members(root / shard.name).items():
            assert key not in found
            found[key] = {name: _decoded(name, data) for name, data in fields.items()}
    return found


def _decoded(name: str, data: bytes) -> Any:
    if name.endswith("npy"):
        return np.load(io.BytesIO(data), allow_pickle=False)
    return json.loads(data) if name == "json" else data.decode()


def stacked(root: Path, name: str) -> Tensor:
    """One array of all samples, in the order of their keys."""
    samples = sorted(latents_of(root).items())
    return torch.from_numpy(np.stack([sample[name] for _, sample in samples]))


def rejected(root: Path) -> dict[str, str]:
    """The code of each reject by its key."""
    rejects = rejects_of(root)
    assert len({reject["key"] for reject in rejects}) == len(rejects)
    return {reject["key"]: reject["code"] for reject in rejects}


def positions_in(root: Path, tar: str) -> list[int]:
    """The position in its image shard of each sample of a tar, as its table says."""
    found: list[int] = pq.read_table(root / table_name(tar))["row"].to_pylist()
    return found


# --- a stand-in for the models


class Means(Encoder):
    """An encoder that makes of an image the mean of its pixels, and of a caption its length."""

    fields = (
        Field(name="latent.npy", dtype="<f2", shape=(1, 1, 1)),
        Field(name="emb.npy", dtype="<f2", shape=(1, 1)),
    )
    resolution = 16
    device = torch.device("cpu")
    has_text = True

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """of the batches of images that it was given"""

    def tokens(self, captions: Iterable[str], _images: object = ()) -> list[Tokens]:
        return [Tokens(text, count=1) for text in captions]

    def encode_images(self, pixels: Tensor, noise: Tensor, *, exact: bool = False) -> Encoded:
        del noise, exact
        self.sizes.append(len(pixels))
        made = {"latent.npy": pixels.float().mean((1, 2, 3)).reshape(-1, 1, 1, 1).half()}
        return Encoded(arrays=made, ok=torch.ones(len(pixels), dtype=torch.bool))

    def encode_texts(self, texts: Sequence[Tokens], *, exact: bool = False) -> Encoded:
        del exact
        made = torch.tensor([len(text.caption) for text in texts]).half().reshape(-1, 1, 1)
        return Encoded(arrays={"emb.npy": made}, ok=torch.ones(len(texts), dtype=torch.bool))

    def empty(self) -> dict[str, Tensor]:
        return {"emb.npy": torch.zeros(1, 1, dtype=torch.float16)}


class Broken(Means):
    """Fails at its third batch."""

    def encode_images(self, *arguments: Any, **options: Any) -> Encoded:
        found = super().encode_images(*arguments, **options)
        if len(self.sizes) > 2:
            raise ValueError("a kernel of 3 is wanted")
        return found
