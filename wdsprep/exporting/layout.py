"""The interface of layouts: what they receive of datasets, and what they write for an export.

A layout writes through `Output`, which hashes what is written. The mark of a shard, below
`.wdsprep/`, lists its files with their digests, and is written last. So a later run can tell the
files that are as they were written from those that are damaged, cut or gone.

What several layouts need is here too: JSON and files of torch.
"""

import io
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, TypeVar

from blake3 import blake3
from numpy.typing import NDArray

from wdsprep.dataset.file_names import latent_unit
from wdsprep.dataset.image_positions import may_have_moved
from wdsprep.dataset.manifest import Receipt
from wdsprep.dataset.npy_arrays import (
    BFLOAT16,
    GIVEN,
    LATENT,
    field_of,
    fields_of,
    from_bfloat16,
    is_of_text,
    stored_array,
    text_fields,
    to_bfloat16,
)
from wdsprep.dataset.samples import names_in_roles, roles_of
from wdsprep.dataset.sealed_json import (
    Hex,
    Name,
    Nbytes,
    Text,
    canonical_json,
    make_record,
    read_record,
)
from wdsprep.dataset.settings import SCORES, columns_of, is_scored
from wdsprep.dataset.shapes import Size, cut_size, shapes_of
from wdsprep.dataset.shard_reader import HashedTape
from wdsprep.dataset.stored_dataset import check_kind, open_dataset
from wdsprep.dataset.tar.write import Buffer
from wdsprep.errors import FormatError, NotFoundError, UsageError
from wdsprep.exporting.options import ExportOptions
from wdsprep.options import Place
from wdsprep.store import open_store, shared_store
from wdsprep.store.base import Sink, SinkFile, Store, absolute

Family = TypeVar("Family")
MARKS = ".wdsprep/"
CLAIM = f"{MARKS}export.json"


class SourceDataset:
    """A dataset that samples are taken from; `names` are those of its arrays that are exported."""

    def __init__(self, place: Place) -> None:
        self.url = absolute(place)
        self.manifest = open_dataset(self.url)[1]
        self.settings, self.is_scored = self.manifest.settings, self.manifest.is_scored
        self.has_images = self.manifest.dataset == "images"
        self.fields = () if self.has_images else fields_of(self.settings["layout"])
        self.names = {field.name for field in self.fields}
        self.roles = roles_of(self.settings)
        self._texts = {field.name for field in text_fields(self.fields)}
        self.shards = {latent_unit(shard.name): shard for shard in self.manifest.shards}

    @property
    def texts(self) -> set[str]:
        """Return the names of the arrays of text that are exported."""
        return self._texts & self.names

    @cached_property
    def inputs(self) -> Mapping[str, str]:
        """Return what each unit was made of.

        It is the digest of its image shard, followed after `encode --limit` by the number of
        samples.
        """
        if self.has_images:
            return {unit: shard.digest for unit, shard in self.shards.items()}
        return {receipt.unit: receipt.input for receipt in self.manifest.receipts}

    @cached_property
    def moved(self) -> Mapping[str, Receipt]:
        """Return the receipts of units whose samples may lie elsewhere than in the image shards."""
        return {r.unit: r for r in self.manifest.receipts if may_have_moved(r)}

    def give_way(self, later: "SourceDataset") -> None:
        """Leave out what a later dataset brings.

        That is arrays of the same names, all of text if it has text, and its images in roles.
        """
        self.names -= later.names | (self._texts if later.texts else set())
        if not later.has_images:
            self.roles = tuple(role for role in self.roles if role not in later.roles)


class Exportable:
    """A dataset to export, with what is joined to it.

    `fields` are the arrays of a sample; those of latents of several shapes are given for the
    square. `settings` are those that the latents were made with.
    """

    def __init__(self, options: ExportOptions, *, takes_images: bool) -> None:
        """Raise UsageError if the datasets cannot be joined.

        With `takes_images`, images may be joined to latents that were made of them.
        """
        self.to, self.tower = options.to, options.tower
        self.datasets = datasets = [*map(SourceDataset, (options.dataset, *options.joined))]
        for number, later in enumerate(datasets):  # each array comes from the last that has it
            for earlier in datasets[:number]:
                earlier.give_way(later)
        first, *joined = datasets
        self.url, self.kind = first.url, first.manifest.dataset
        self.has_images = takes_images and [other.has_images for other in joined].count(True) == 1
        for other in joined:
            if not (self.has_images and other.has_images):
                check_kind(open_store(other.url), other.manifest.dataset, "latents")
            if other.is_scored and not other.manifest.complete:
                raise UsageError(
                    f'{other.url} is not complete: run the same "wdsprep score" again, to its '
                    "end, and then export"
                )
        if first.has_images and not all(other.is_scored for other in joined):
            raise UsageError(
                f"{first.url} is a dataset of images, to which scores alone can be joined: export "
                "latents or text with --join"
            )
        fields = [f for d in datasets for f in d.fields if f.name in d.names]
        self.fields = {f.name: f for f in fields if not (f.is_of_role or first.has_images)}
        self.references = tuple(dict.fromkeys(f.role for f in fields if f.role and f.holds_latents))
        """The roles whose arrays are latents, neither masks nor pixels."""
        with_roles = (d for d in datasets if first.has_images or not d.has_images)
        self.roles = tuple(chain.from_iterable(dataset.roles for dataset in with_roles))
        """The roles in which samples have further images, or arrays of these, in their order."""
        with_latents = [dataset for dataset in datasets if LATENT in dataset.names]
        self.settings = (with_latents or [first])[-1].settings
        with_texts = [dataset for dataset in datasets if dataset.texts]
        self.model = str((with_texts or [first])[-1].manifest.extra.get("model", ""))
        self.shards = {shard.name: shard.samples for shard in first.manifest.shards}
        """The number of samples of each shard."""
        self.columns = dict(chain.from_iterable(columns_of(d.settings).items() for d in datasets))
        """The columns of scores, with the kind of value that each holds."""

    @property
    def has_shapes(self) -> bool:
        return bool(shapes_of(self.settings))

    @property
    def has_moments(self) -> bool:
        return self.settings.get("latents") == "moments"

    @property
    def what(self) -> str:
        """Return what the samples are: images, latents, text or scores."""
        if is_scored(self.settings):
            return SCORES
        of_text = self.kind == "latents" and is_of_text(self.fields.values())
        return "text" if of_text else self.kind

    def check_arrays(self, names: Iterable[str]) -> None:
        if missing := [name for name in names if name not in self.fields]:
            raise UsageError(
                f"{self.url} has no {missing[0]}, which --to {self.to} needs: encode with a model "
                "that makes it, or --join the text that has it"
            )

    def check_latents(self, reader: str, families: Mapping[str, Family]) -> Family:
        """Return which of the families, by the names of their pipelines, the latents are of.

        Raise UsageError if they are of another, or are not one latent of known scale a sample.
        """
        is_given = self.settings.get("latents") == GIVEN
        pipeline = self.settings.get("pipeline", "" if is_given else "StableDiffusionPipeline")
        if pipeline and pipeline not in families:
            names = ", ".join(name.removesuffix("Pipeline") for name in families)
            raise UsageError(
                f"{self.url} was encoded with a {pipeline}, and --to {self.to} takes latents of "
                f"{names}: give another --to"
            )
        if self.has_moments or not pipeline:
            raise UsageError(
                f"{self.url} has moments, or latents of an unknown model, and {reader} takes one "
                "latent of known scale for each image: encode images with --latents sample or mean"
            )
        return families[pipeline]


@dataclass(frozen=True, kw_only=True)
class ExportSample:
    """A sample to export.

    `members` are its files by their names in the dataset: arrays and images. `caption` is the
    caption that was encoded.
    """

    key: str
    members: Mapping[str, Buffer]
    facts: Mapping[str, Any]
    caption: str
    places: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The place of each member in its tar: its first byte and its number of bytes."""

    def stored(self, name: str) -> NDArray[Any]:
        """Return an array as it is stored: of bfloat16 its bits, as unsigned integers."""
        array: NDArray[Any] = stored_array(field_of(name, self.members[name]), self.members[name])
        return array

    def values(self, name: str) -> NDArray[Any]:
        """Return an array, with float32 in place of bfloat16."""
        array = self.stored(name)
        return from_bfloat16(array) if dtype_name(array) == BFLOAT16 else array

    def bits(self, name: str) -> NDArray[Any]:
        """Return an array as bfloat16, whose bits are in unsigned integers."""
        array = self.stored(name)
        return array if dtype_name(array) == BFLOAT16 else to_bfloat16(array)

    @property
    def cut_size(self) -> Size:
        """Return the size of what was cut of the image. Raise FormatError if nobody knows it."""
        width, height = cut_size(self.facts)
        if not width:
            raise FormatError(f"the json of {self.key} has no crop")
        return width, height

    @property
    def image(self) -> tuple[str, Buffer]:
        """Return the image to train on, after its extension.

        Names of arrays, and of further images in roles, have a dot.
        """
        return next((name, data) for name, data in self.members.items() if "." not in name)

    @property
    def in_roles(self) -> Iterator[tuple[str, str, Buffer]]:
        """Yield the further images of a sample, each after its name and its extension."""
        for member, data in self.members.items():
            name, _, kind = member.partition(".")
            if kind not in ("", "npy"):
                yield name, kind, data

    def arrays_in(self, roles: Sequence[str]) -> list[str]:
        """Return the members that are the arrays of the images in these roles, in order."""
        return [f"{name}.npy" for name in names_in_roles(self.members, roles)]

    def number(self, name: str) -> int:
        """Return a whole number from the json. Raise FormatError if it has no such number."""
        value = self.facts.get(name)
        if not isinstance(value, int):
            raise FormatError(f"the json of {self.key} has no {name}")
        return value


# --- what it writes
@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedFile:
    """A file of an export, with its BLAKE3.

    `digests` has other digests by algorithm, if the reader of the layout checks any. The index of a
    tar counts no samples.
    """

    name: Name
    nbytes: Nbytes
    samples: Nbytes
    blake3: Hex
    digests: Mapping[Text, Text]


class OutputFile(SinkFile):
    """A file that is being written; its bytes are counted and hashed.

    The layout sets `samples` and `digests` before it ends the file.
    """

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.samples, self.hash = 0, blake3()
        self.digests: Mapping[str, str] = {}

    def writelines(self, pieces: Sequence[bytes | memoryview], /) -> None:
        for piece in pieces:
            self.hash.update(piece)
        super().writelines(pieces)


class Output:
    """The place where a layout writes the files that one shard becomes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.files: list[ExportedFile] = []

    @contextmanager
    def open(self, name: str) -> Iterator[OutputFile]:
        """Write a file that appears when the block ends well."""
        with self.store.write(name) as sink:
            yield (file := OutputFile(sink))
        self.files.append(
            ExportedFile(
                name=name,
                nbytes=file.nbytes,
                samples=file.samples,
                blake3=file.hash.hexdigest(),
                digests=file.digests,
            )
        )

    def write(self, name: str, data: Buffer, *, samples: int = 0) -> None:
        """Write a whole file."""
        with self.open(name) as file:
            file.write(data)
            file.samples = samples


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportMark:
    """The mark of an exported shard: what it was made from, and the files that were made."""

    name: Name
    inputs: tuple[Text, ...]
    files: tuple[ExportedFile, ...]
    left_out: Nbytes

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def file_name(self) -> str:
        return f"{MARKS}{self.name}.json"

    def to_bytes(self) -> bytes:
        return json_line(asdict(self))

    @classmethod
    def read(cls, store: Store, file_name: str) -> "ExportMark | None":
        """Read the mark of a shard, or None if there is none, or none that can be read."""
        with suppress(NotFoundError, FormatError):
            body = read_record(cls, store.read(file_name), file_name)
            body["files"] = [make_record(ExportedFile, file) for file in body["files"]]
            return make_record(cls, body)
        return None


def check_files(out: str, mark: ExportMark) -> Generator[int, None, bool]:
    """Return whether all files of a mark are as they were written.

    Yield how many of their bytes have been read so far.
    """
    store, before = shared_store(out), 0
    for file in mark.files:
        try:
            with HashedTape(store, file) as tape:
                for nbytes in tape.rest():
                    yield before + nbytes
                before += tape.nbytes
                if tape.digest() != file.blake3:
                    return False
        except NotFoundError:
            return False
    return True


Writing = Generator[None, None, None]


class Layout:
    """The layout of an export: it checks the dataset, writes each shard, and writes the index.

    It can be pickled, as workers get it. Its attributes decide the bytes of files.
    """

    heads: ClassVar[bool] = False
    """True if tar headers are enough, so that no image and no array is read."""
    takes_images: ClassVar[bool] = False
    """True for a layout of latents to which images may be joined."""
    takes: ClassVar[tuple[str, ...]] = ()
    """What the samples may be, such as images; anything if it is empty."""
    needs: ClassVar[tuple[str, ...]] = ()
    """The arrays without which it cannot be written."""
    takes_moments: ClassVar[bool] = True
    """False if its reader takes one latent of each sample."""

    def __init__(self, dataset: Exportable) -> None:
        """Choose what is written of the dataset. Raise UsageError if the dataset does not fit."""
        if self.takes and dataset.what not in self.takes:
            raise UsageError(
                f"{dataset.url} is a dataset of {dataset.what}, and --to {dataset.to} takes "
                f"{' or '.join(self.takes)}: give another dataset or another --to"
            )
        dataset.check_arrays(self.needs)
        if dataset.has_moments and not self.takes_moments:
            raise UsageError(
                f"{dataset.url} has moments, and --to {dataset.to} takes one latent of each "
                "sample: encode with --latents sample or mean"
            )
        self.arrays = self.needs
        """The names of the arrays that the layout writes."""
        self.roles: tuple[str, ...] = ()
        """The roles whose images or arrays the layout writes."""

    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        """Write the files that a shard with samples becomes. Yield after each sample."""
        raise NotImplementedError

    def index(self, files: Sequence[ExportedFile]) -> Mapping[str, bytes]:
        """Return, by name, the bytes of the files that are written after those of all shards.

        There are none unless a layout says so. `files` are those that the shards became.
        """
        del files
        return {}


def dtype_name(array: NDArray[Any]) -> str:
    """Return what torch calls the type of a stored array."""
    return BFLOAT16 if array.dtype.str == "<u2" else array.dtype.name


def to_tensor(array: NDArray[Any]) -> Any:
    """Return a stored array as a tensor of torch."""
    import torch

    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if dtype_name(array) == BFLOAT16 else tensor


def json_line(body: object) -> bytes:
    return canonical_json(body) + b"\n"


def save_by_torch(value: object) -> bytes:
    """Return the file that torch.save writes of tensors, or of plain values that hold them."""
    import torch

    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()
