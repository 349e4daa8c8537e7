"""The files that a shard becomes, and the mark that lists them with their digests.

A layout writes through `Output`, which hashes what is written. The mark of a shard, below
`.wdsprep/`, is written last. So a later run can tell the files that are as they were written from
those that are damaged, cut or gone.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import ClassVar

from blake3 import blake3

from wdsprep.dataset.sealed_json import (
    Fields,
    Hex,
    Name,
    Nbytes,
    Text,
    canonical_json,
    make_record,
    read_record,
)
from wdsprep.dataset.tar.write import Buffer
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.store import shared_store
from wdsprep.store.base import CHUNK_NBYTES, Chunks, Sink, Store

MARKS = ".wdsprep/"
CLAIM = f"{MARKS}export.json"


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


@dataclass(kw_only=True)
class OutputFile:
    """A file that is being written; its bytes are counted and hashed.

    The layout sets `samples` and `digests` before it ends the file. It has the interface of a file,
    as pyarrow wants it.
    """

    sink: Sink
    samples: int = 0
    digests: Mapping[str, str] = field(default_factory=dict)
    nbytes: int = 0
    closed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.hash = blake3()

    def write(self, data: Buffer, /) -> None:
        self.writelines([data if isinstance(data, memoryview) else bytes(data)])

    def tell(self) -> int:
        return self.nbytes

    def flush(self) -> None:
        """Do nothing, since the store has the bytes already."""

    def close(self) -> None:
        """Do nothing, since the store closes its own file."""

    def writelines(self, pieces: Sequence[bytes | memoryview], /) -> None:
        for piece in pieces:
            self.hash.update(piece)
            self.nbytes += len(piece)
        self.sink.writelines(pieces)


class Output:
    """The place where a layout writes the files that one shard becomes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.files: list[ExportedFile] = []

    @contextmanager
    def open(self, name: str) -> Iterator[OutputFile]:
        """Write a file that appears when the block ends well."""
        with self.store.write(name) as sink:
            file = OutputFile(sink=sink)
            yield file
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

    name: str
    inputs: tuple[str, ...]
    files: tuple[ExportedFile, ...]
    left_out: int

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def file_name(self) -> str:
        return mark_name(self.name)

    def to_bytes(self) -> bytes:
        files = [asdict(file) for file in self.files]
        body = {"files": files, "inputs": list(self.inputs), "left_out": self.left_out}
        return canonical_json(body) + b"\n"

    @classmethod
    def read(cls, store: Store, unit: str) -> "ExportMark | None":
        """Read the mark of a shard, or None if there is none, or none that can be read."""
        with suppress(NotFoundError, FormatError):
            body = read_record(_MARK, store.read(mark_name(unit)), mark_name(unit))
            files = tuple(make_record(ExportedFile, fields) for fields in body["files"])
            inputs = tuple(body["inputs"])
            return cls(name=unit, inputs=inputs, files=files, left_out=body["left_out"])
        return None


_MARK = Fields({"files": list[ExportedFile], "inputs": list[Text], "left_out": Nbytes})


def mark_name(unit: str) -> str:
    return f"{MARKS}{unit}.json"


def unit_of_mark(name: str) -> str:
    is_one = name != CLAIM and name.startswith(MARKS) and name.endswith(".json")
    return name[len(MARKS) : -len(".json")] if is_one else ""


def check_files(out: str, mark: ExportMark) -> Generator[int, None, bool]:
    """Return whether all files of a mark are as they were written.

    Yield how many of their bytes have been read so far.
    """
    store, nbytes = shared_store(out), 0
    for file in mark.files:
        digest = blake3()
        try:
            chunks = Chunks(store, file.name, watch=digest.update, expected=file.nbytes)
            with chunks.as_stream() as reader:
                while data := reader.read(CHUNK_NBYTES):
                    nbytes += len(data)
                    yield nbytes
        except NotFoundError:
            return False
        if digest.hexdigest() != file.blake3:
            return False
    return True
