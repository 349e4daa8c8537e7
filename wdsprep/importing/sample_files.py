"""Read caches that have files of their own for each sample, as trainers of edits write them.

musubi-tuner writes two files of safetensors: the latents of the target and of its references, and
the text. NeMo Automodel writes one of torch.save, and lists all of them. Written after the code of
musubi-tuner of June 2026 (commit 30c658c) and of NeMo Automodel of August 2026 (commit 36044ad).
"""

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from io import BytesIO
from itertools import chain, groupby, islice
from typing import Any

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.samples import MAPPING, image_name, parse_json, parse_object
from wdsprep.dataset.thread_map import map_ahead
from wdsprep.encoding.models.model_files import read_tensor_header
from wdsprep.errors import SourceError, UsageError
from wdsprep.importing.column_arrays import (
    MOST_EXPANDED,
    Array,
    array_in_bytes,
    load_saved,
    tensor_array,
)
from wdsprep.importing.column_names import CONTROL, FAMILIES, REFERENCES, SAFETENSORS
from wdsprep.importing.import_plan import LOOKED_AT
from wdsprep.importing.latent_caches import LatentCache, Row, make_row
from wdsprep.limits import MAX_NBYTES
from wdsprep.sources.base import MOST_IMAGES, Item, check_names, make_or_refuse
from wdsprep.sources.folder import check_nbytes
from wdsprep.sources.parsing import parsing_file, parsing_sample
from wdsprep.sources.patterns import Pattern, is_glob, is_tar, table_kind
from wdsprep.sources.recognise import is_folder, split_pattern
from wdsprep.sources.tables import RawArray
from wdsprep.store import shared_store
from wdsprep.store.base import is_web
from wdsprep.text import shown

LISTED_FILES = 2_000
"""The number of files of a folder that tell whose cache it is."""
MOST_READERS = 8
UNIT_SAMPLES = 1_000
"""The most samples of a folder that become one shard."""
ENDING = ".safetensors"
MOST_NUMBER = 1 << 63
Part = tuple[str, int, str]
"""A file, as items have them: its name, its bytes, and its stamp."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFiles(LatentCache):
    """A cache that has files of its own for each sample. An item is a run of samples."""

    def columns(self, items: Sequence[Item]) -> list[str]:
        """Return the names of what some samples have, which are those with most files."""
        names: dict[str, None] = {}
        why = "it lists none"
        samples = chain.from_iterable(map(self._samples, items))
        for _, files in nlargest(LOOKED_AT, samples, key=lambda sample: len(sample[1])):
            values = make_or_refuse(shown(files[0][0]), partial(self._read, files))
            if isinstance(values, Reject):
                why = values.detail
            else:
                names |= dict.fromkeys(values)
        if not names:
            raise SourceError(f"none of the first samples of {self.url} is sound ({why})")
        return [*names]

    def count(self, item: Item) -> int:
        return item.samples

    def rows(self, item: Item, wanted: Sequence[str]) -> Iterator[Row]:
        def values_of(files: Sequence[Part]) -> dict[str, Any]:
            """Return the facts of a sample, and its arrays of the wanted names."""
            values = self._read(files)
            most = max(MOST_EXPANDED, sum(nbytes for _, nbytes, _ in files))
            arrays = {name: _arrays(name, values[name], most) for name in wanted if name in values}
            return {n: value for n, value in values.items() if _is_fact(value)} | arrays

        def read(sample: tuple[str, Sequence[Part]]) -> Row:
            key, files = sample
            return make_row(key, shown(files[0][0]), partial(values_of, files))

        threads = min(shared_store(self.url).readers, MOST_READERS)
        return map_ahead(read, self._samples(item), threads)

    def _samples(self, item: Item) -> Iterator[tuple[str, Sequence[Part]]]:
        """Yield the key of each sample, and its files."""
        raise NotImplementedError

    def _read(self, files: Sequence[Part]) -> dict[str, Any]:
        """Return what the files of a sample hold: arrays or tensors, lists of these, and facts.

        Raise RejectedError if a file cannot be read.
        """
        raise NotImplementedError

    def _bytes(self, part: Part) -> bytes:
        name, nbytes, _ = part
        if not nbytes:
            raise RejectedError(Code.UNREADABLE, f"{shown(name)} is empty, or not there")
        check_nbytes(name, nbytes, MAX_NBYTES)
        return shared_store(self.url).read(name)


def _arrays(name: str, value: Any, most: int) -> Array | list[Array]:
    """Return the array of a tensor, or those of a list of tensors, of at most `most` bytes."""

    def array_in(entry: Any) -> Array:
        if isinstance(entry, RawArray):
            return array_in_bytes(entry.dtype, entry.shape, entry.data)
        return tensor_array(entry, most)

    with parsing_sample(f"{name} holds no array: it"):
        if not isinstance(value, list):
            return array_in(value)
        arrays: list[Array] = []
        for entry in islice(value, MOST_IMAGES + 1):
            arrays.append(array_in(entry))
            most -= arrays[-1].nbytes
        return arrays


def _is_fact(value: Any) -> bool:
    is_number = isinstance(value, int) and -MOST_NUMBER <= value < MOST_NUMBER
    return is_number or isinstance(value, str | float)


def _key(name: str) -> str:
    return posixpath.basename(name).replace(".", "_")


# --- musubi-tuner
ARCHITECTURE = r"[a-z][a-z0-9]*"
LATENTS_FILE = re.compile(rf"(.+)_(\d{{4,}}x\d{{4,}})_(?!te\.)({ARCHITECTURE})\.safetensors", re.S)
TEXT_FILE = re.compile(rf"(.+)()_({ARCHITECTURE})_te\.safetensors", re.S)
COLUMN = re.compile(r"(.+?)(_(\d+x){1,2}\d+)?(_(bfloat|float|int|uint)\d+\w*)?", re.S)
"""The name of an array: the shape and the type that stand behind it are those of its tensor."""
SIDES, SIDE = ("width", "height"), re.compile(r"[0-9]{1,9}")
"""The facts that are numbers, and what these are like."""
BY_SHORT = {family.short: family for family in FAMILIES}
TYPES = {name: dtype for dtype, name in SAFETENSORS.items()}


def _split(name: str) -> tuple[str, str, str] | None:
    """Return what a file is of: the path of a sample, a size, and an architecture.

    The size is empty for a file of text. Return None for any other file.
    """
    match = TEXT_FILE.fullmatch(name) or LATENTS_FILE.fullmatch(name)
    return (match[1], match[2], match[3]) if match else None


@dataclass(frozen=True, kw_only=True, slots=True)
class MusubiCache(SampleFiles):
    """The cache of musubi-tuner for one architecture. An item has samples of one folder."""

    architecture: str

    @property
    def settings(self) -> Mapping[str, Any]:
        family = BY_SHORT.get(self.architecture)
        return {"pipeline": family.pipelines[-1]} if family else {}

    def items(self) -> Iterator[Item]:
        wanted = Pattern(self.pattern)
        folders: dict[str, dict[str, list[Part]]] = {}
        for entry in shared_store(self.url).list(wanted.start):
            if not wanted.takes(entry.name) or (split := _split(entry.name)) is None:
                continue
            sample, _, architecture = split
            if architecture != self.architecture:
                raise UsageError(
                    f"{self.url} has caches of {self.architecture} and of {architecture}: give "
                    f"one, as '{self.url}/*_{self.architecture}*{ENDING}'"
                )
            samples = folders.setdefault(posixpath.dirname(sample), {})
            samples.setdefault(sample, []).append((entry.name, entry.nbytes, entry.stamp))
        for folder, samples in sorted(folders.items()):
            names = sorted(samples)
            for number, start in enumerate(range(0, len(names), UNIT_SAMPLES)):
                parts = chain.from_iterable(samples[n] for n in names[start : start + UNIT_SAMPLES])
                item = Item(name=posixpath.join(folder, f"{number:06d}"), parts=tuple(parts))
                yield item._replace(samples=sum(1 for _ in self._samples(item)))

    def _samples(self, item: Item) -> Iterator[tuple[str, Sequence[Part]]]:
        """Yield the key of each sample, and its files: its latents, its text, or both.

        An image that was cached in several sizes gives a sample for each size.
        """
        named = [(split, part) for part in item.parts if (split := _split(part[0]))]
        for sample, group in groupby(named, lambda pair: pair[0][0]):
            files = [*group]
            texts = [part for (_, size, _), part in files if not size]
            sizes = {size: part for (_, size, _), part in files if size}
            for size, part in sizes.items():
                name = f"{sample}_{size}" if len(sizes) > 1 else sample
                yield _key(name), (part, *texts)
            if not sizes:
                yield _key(sample), texts

    def _read(self, files: Sequence[Part]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        references: list[tuple[int, RawArray]] = []
        for part in files:
            data = self._bytes(part)
            with parsing_sample(shown(part[0])):
                tensors, start, facts = read_tensor_header(BytesIO(data))
            values |= facts
            values |= {n: int(v) for n, v in facts.items() if n in SIDES and SIDE.fullmatch(v)}
            for full_name, entry in tensors.items():
                match = COLUMN.fullmatch(full_name)
                name = match[1] if match else full_name
                array = RawArray(
                    dtype=TYPES.get(entry.dtype, entry.dtype),
                    shape=entry.shape,
                    data=data[start + entry.begin : start + entry.end],
                )
                if match := re.fullmatch(rf"{CONTROL}(?:_(\d{{1,4}}))?", name):
                    references.append((int(match[1] or 0), array))
                elif isinstance(values.get(name), RawArray):
                    raise RejectedError(Code.UNREADABLE, f"{shown(part[0])} has {name} twice")
                else:
                    values[name] = array
        if "caption1" in values:
            values["caption"] = values.pop("caption1")
        references.sort(key=lambda reference: reference[0])
        check_names(image_name(REFERENCES, number) for number, _ in references)
        family = BY_SHORT.get(self.architecture)
        if references or (family and family.reference and "latents" in values):
            values[CONTROL] = [array for _, array in references]
        return values


# --- NeMo Automodel
INDEX = "metadata.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class AutomodelCache(SampleFiles):
    """The cache of NeMo Automodel, whose samples are listed in the JSON files `lists`.

    An item is one such list: its first part is the list, the others are the files of its samples.
    """

    lists: tuple[str, ...]

    def items(self) -> Iterator[Item]:
        store = shared_store(self.url)
        there = {entry.name: (entry.name, entry.nbytes, entry.stamp) for entry in store.list()}
        known: set[str] = set()
        for name in self.lists:
            place = f"{self.url}/{shown(name)}"
            if name not in there:
                raise SourceError(f"{place} is not there, as {INDEX} says: bring it back")
            with parsing_file(place, "is no list of samples", "make the cache again"):
                named = [row["cache_file"] for row in parse_json(store.read(name))]
                files = [posixpath.normpath(n.removeprefix(f"{self.url}/")) for n in named]
            if len(known | {*files}) < len(known) + len(files):
                raise SourceError(f"{place} lists a file twice, or one of another list: remove it")
            known |= {*files}
            parts = (there[name], *(there.get(file, (file, 0, "")) for file in files))
            if files:
                yield Item(name=name, parts=parts, samples=len(files))

    def _samples(self, item: Item) -> Iterator[tuple[str, Sequence[Part]]]:
        for part in item.parts[1:]:
            yield _key(posixpath.splitext(part[0])[0]), (part,)

    def _read(self, files: Sequence[Part]) -> dict[str, Any]:
        (part,) = files
        data = self._bytes(part)
        with parsing_sample(shown(part[0])):
            saved = load_saved(data)
            if not isinstance(saved, MAPPING):
                raise ValueError(f"it is {type(saved).__name__}, not a dict of tensors")
        facts = _dict_in(saved, "metadata")
        inner = [_dict_in(facts, name) for name in ("manifest_metadata", "original_ids")]
        values: dict[str, Any] = {}
        for level in (*inner, facts):
            values |= {n: value for n, value in level.items() if _is_fact(value)}
        values |= {n: value for n, value in saved.items() if not isinstance(value, MAPPING)}
        return {name: value for name, value in values.items() if isinstance(name, str)}


def _dict_in(values: Mapping[Any, Any], name: str) -> Mapping[Any, Any]:
    value = values.get(name)
    return value if isinstance(value, MAPPING) else {}


def find_sample_files(url: str) -> LatentCache | None:
    """Return the cache at `url` if it has files of its own for each sample, otherwise None."""
    names_files = not is_folder(url) and (is_glob(url) or is_tar(url) or table_kind(url))
    pattern = "*"
    if names_files and url.endswith(ENDING):
        url, pattern = split_pattern(url)
    elif names_files or is_web(url):
        return None
    store = shared_store(url)
    if any(entry.name == INDEX for entry in islice(store.list(INDEX), 1)):
        index = parse_object(store.read(INDEX)) or {}
        lists = index.get("shards")
        if isinstance(lists, list) and all(isinstance(name, str) for name in lists):
            return AutomodelCache(url=store.url, kind="automodel", lists=tuple(lists))
    names = (entry.name for entry in islice(store.list(), LISTED_FILES))
    wanted = Pattern(pattern)
    splits = (_split(name) for name in names if wanted.takes(name))
    if (first := next(filter(None, splits), None)) is None:
        return None
    return MusubiCache(url=store.url, kind="musubi", pattern=pattern, architecture=first[2])
