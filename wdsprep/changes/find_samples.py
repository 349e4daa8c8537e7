"""Find the samples that a user lists, in each unit of work of a dataset.

Keys, sources, URLs and digests are columns of the tables beside the shards. Somebody has asked for
his picture to go, so none may be missed: a table is asked only if it is the one that the receipt of
its unit states, which is decided by its tar; otherwise the tar itself is. A key begins with its
slice, so only the tables of that slice are read for it. Selections, and latents of tars that
another program packed, have keys that do not.

No table has the digests of the stored images. These are hashed, unless all images of a shard were
kept as they came and the table has the digests of what came (`pack --compute-hash sha256`). Images
in roles are found by their URLs and digests as targets are, and the whole sample goes. But they
keep no other sample away: many samples may have one reference.

There may be any number of keys, URLs, digests and sources.

Whoever removes samples from images has to name the latents made of them, and may forget some. So
`find_neighbours` looks for these beside the images, in the same parent folder or prefix. Those that
were forgotten follow later (`find_lost`): the images keep what became of each shard
(`Removed.successors`), and the keys of removed samples among their rejects.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from wdsprep.changes.options import NameList, RemoveOptions, is_file, read_lines
from wdsprep.dataset.damage import UNLIKE_RECEIPT, naming_place
from wdsprep.dataset.file_names import MANIFEST, latent_shard, latent_unit, unit_of_file
from wdsprep.dataset.manifest import Manifest, Receipt, Shard, image_shard_digest
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import rejects_in
from wdsprep.dataset.removed_samples import (
    ShardRemoval,
    ShardSuccessor,
    UnitRemoval,
    mark_of,
    removed_from,
)
from wdsprep.dataset.sample_table import KEY, REST
from wdsprep.dataset.samples import META, roles_of
from wdsprep.dataset.shard_reader import ShardReader
from wdsprep.dataset.stored_dataset import read_manifest
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import open_tape, scan
from wdsprep.errors import DamageError, NotFoundError, UsageError, WdsprepError
from wdsprep.images.headers import IMAGES, OTHER_IMAGES
from wdsprep.store import open_store
from wdsprep.store.base import Store, local_path
from wdsprep.tables.query import WantedTexts, texts_in
from wdsprep.tables.stored_tables import read_sound_columns
from wdsprep.text import EXAMPLES

NAMES = (KEY, "source", "url")
"""The columns by which rejects are found, too."""
JSON = (META, REST)
IN_JSON = frozenset({"url", "sha256"})
"""What JSON of these columns may say of a sample whose own column for it is empty."""
MOST_LISTED = 20_000
"""The most names that are listed of a prefix in a bucket, which lists all files below it."""
Rows = dict[int, dict[str, Any]]
"""Rows of the table of a shard, by their numbers, which rise."""
FoundInUnit = tuple[UnitRemoval | None, set[bytes]]
"""What a unit loses, and the marks of inputs that must stay away."""
OWN_KEY = re.compile(r"\d{12,}")
DIGITS = 6  # the fewest of a slice, and of a number in it
SHA256 = re.compile(r"[0-9a-f]{64}")
IN_ROLE = re.compile(r'"([a-z0-9]+(?:_[0-9]+)?_(?:url|sha256))":')


class SampleFinder:
    """A search for the samples that a user lists by keys, URLs, digests or sources.

    `texts` has what to look for in the columns of tables, by their names. All datasets have keys.
    URLs, digests and sources are in tables of images alone.
    """

    def __init__(self, options: RemoveOptions) -> None:
        self._options = options
        self._starts: set[str] = set()  # first digits of the slices of keys, and "" for none
        lists = {"source": options.sources, "url": options.urls, "sha256": options.sha256}
        self.texts = {
            kind: WantedTexts(kind, _read_values(kind, values))
            for kind, values in lists.items()
            if values
        }
        if len(wanted_keys := WantedTexts(KEY, self._note_starts(_read_keys(options.keys)))):
            self.texts[KEY] = wanted_keys

    def _note_starts(self, keys: Iterable[str]) -> Iterator[str]:
        for key in keys:
            self._starts.add(key[:DIGITS] if OWN_KEY.fullmatch(key) else "")
            yield key

    @property
    def kinds(self) -> frozenset[str]:
        """Return the names of the columns that images alone have."""
        return frozenset(self.texts) - {KEY}

    @property
    def are_own(self) -> bool:
        """Return whether all keys are such as `pack` gives."""
        return "" not in self._starts

    def may_be_in(self, unit: str) -> bool:
        """Return whether a wanted key may be one of the slice that a unit was made of."""
        return unit.rpartition("/")[2][:DIGITS] in self._starts

    @property
    def marks(self) -> Iterator[bytes]:
        """Yield the marks of the URLs, digests and sources."""
        return chain.from_iterable(self.texts[kind].marks for kind in self.kinds)

    @property
    def unmatched(self) -> int:
        """Return how many URLs, digests and sources were not seen."""
        return sum(int((~self.texts[kind].seen).sum()) for kind in self.kinds)

    def unseen_keys(self) -> tuple[int, tuple[str, ...]]:
        """Return how many keys were not seen, and some of them."""
        if KEY not in self.texts or (wanted := self.texts[KEY]).seen.all():
            return 0, ()
        unseen = wanted.unseen(_read_keys(self._options.keys))
        return int((~wanted.seen).sum()), tuple(dict.fromkeys(islice(unseen, EXAMPLES + 1)))

    def find_in_unit(
        self, store: Store, receipt: Receipt, kinds: set[str], lost: ShardRemoval | None
    ) -> FoundInUnit:
        """Return the samples and rejects of a unit that are wanted, or that its images lost.

        `kinds` are the columns to search. With `--keep-copies`, samples are marked by their sources
        alone, and not by their URLs and digests, so that their copies may be packed.
        """
        lost_keys = frozenset(lost.keys if lost else ())
        if not (kinds or lost_keys):
            return None, set()
        shards: dict[ShardRemoval, Rows] = {}
        for shard in receipt.shards:
            with naming_place(f"{store.url}/{shard.name}"):
                rows = self._find_in_shard(store, receipt, shard, kinds, lost_keys)
            if rows:
                removal = ShardRemoval(
                    name=shard.name,
                    samples=shard.samples,
                    nbytes=shard.nbytes,
                    digest=shard.digest,
                    rows=tuple(rows),
                    keys=tuple(row[KEY] for row in rows.values()),
                )
                shards[removal] = rows
        rejects = rejects_in(store, receipt.unit) if receipt.rejects else []
        texts = {name: [getattr(reject, name) for reject in rejects] for name in NAMES}
        numbers = self._find_numbers(texts, kinds - {"sha256"}, lost_keys)
        rejects = [rejects[number] for number in numbers]
        known = {reject.key for reject in rejects if reject.code is Code.REMOVED}
        gone = {key for shard in shards for key in shard.keys}
        gone |= {reject.key for reject in rejects} - known
        if lost and (image_shard_digest(receipt.input) != lost.digest or not gone <= lost_keys):
            lost = None  # they are of other images, or samples are removed from them alone
        known -= lost_keys if lost else set()
        rejects = [reject for reject in rejects if reject.key not in known]
        unit = UnitRemoval(
            unit=receipt.unit,
            shards=tuple(shards),
            rejects=tuple(reject.key for reject in rejects),
            made_of=lost.digest if lost else "",
            lost_rows=lost.rows if lost else (),
        )
        facts = [] if lost else [row for rows in shards.values() for row in rows.values()]
        if receipt.dataset == "images":
            facts += [{"source": reject.source, "url": reject.url} for reject in rejects]
            marks = self._image_marks(store, shards, facts)
        else:
            marks = {mark_of("source", row["source"]) for row in facts if row["source"]}
        return unit if shards or rejects or lost else None, marks

    def _image_marks(
        self, store: Store, shards: Iterable[ShardRemoval], facts: Iterable[Mapping[str, Any]]
    ) -> set[bytes]:
        """Return the marks by which `pack` recognises what is removed from a unit of images."""
        kinds = ("source",) if self._options.keep_copies else ("source", "url", "sha256")
        marks = {mark_of(kind, row[kind]) for row in facts for kind in kinds if row.get(kind)}
        for removal in () if self._options.keep_copies else shards:
            with ShardReader(store, removal) as reader, naming_place(reader.place):
                for key, sample in zip(removal.keys, reader.samples(removal.rows), strict=True):
                    if sample.key != key:
                        raise DamageError(
                            reader.place, "its table or its index leads to others", key
                        )
                    marks |= {mark_of("sha256", n) for n in image_digests(sample.fields, {})}
        return marks

    def _find_in_shard(
        self,
        store: Store,
        receipt: Receipt,
        shard: Shard,
        kinds: set[str],
        lost_keys: Collection[str],
    ) -> Rows:
        """Return the rows of those samples of a shard that are wanted, or have a lost key.

        Each stands under the sample's number in the shard.
        """
        names = {*NAMES, "sha256", "changes"} if "sha256" in kinds else {*NAMES, "sha256"}
        roles = roles_of(receipt.settings)
        if in_json := IN_JSON & kinds:
            names |= {*JSON, *(f"{role}_{kind}" for role in roles for kind in in_json)}
        table = read_sound_columns(store, receipt, shard, names)
        columns = {name: texts_in(table, name) for name in {KEY, *kinds}}
        if "sha256" in kinds:
            columns["sha256"] = pc.utf8_lower(columns["sha256"])
        texts = {name: column.to_pylist() for name, column in columns.items()}
        numbers = {*self._find_numbers(texts, kinds, lost_keys)}
        in_roles = set[str]()  # the URLs and digests of images in roles
        if roles and in_json:  # those of the first in each have columns, those of others are there
            in_roles.update(name for name in table.column_names if IN_ROLE.fullmatch(f'"{name}":'))
            for text in table.column(REST).drop_null().to_pylist():
                in_roles.update(match[1] for match in IN_ROLE.finditer(text))
        for name in in_roles:
            if (wanted := self.texts.get(name.rpartition("_")[2])) is not None:
                numbers.update(wanted.find(texts_in(table, name).to_pylist()).tolist())
        has_digests = True  # of all stored images, which were then kept as they came
        if "sha256" in kinds:
            is_kept = pc.equal(pc.list_value_length(table.column("changes")), 0).fill_null(False)
            has_digest = pc.and_(is_kept, table.column("sha256").is_valid())
            has_digests = not roles and pc.all(has_digest).as_py()
        if not has_digests:
            digests = [*_digests_of_images(store, shard)]
            stored = self.texts["sha256"].find([digest for _, digest in digests])
            numbers.update(digests[place][0] for place in stored.tolist())
        rising = sorted(numbers)
        known_columns = table.select([n for n in (*NAMES, "sha256") if n in table.column_names])
        rows = known_columns.take(np.array(rising, np.int64)).to_pylist()
        return dict(zip(rising, rows, strict=True))

    def _find_numbers(
        self, texts: Mapping[str, Sequence[str]], kinds: set[str], lost_keys: Collection[str]
    ) -> list[int]:
        """Return which rows are wanted or lost, given the texts in their columns."""
        keys = enumerate(texts[KEY] if lost_keys else ())
        numbers = {number for number, key in keys if key in lost_keys}
        return sorted(
            numbers.union(*(self.texts[kind].find(texts[kind]).tolist() for kind in kinds))
        )


def _read_keys(keys: NameList) -> Iterable[str]:
    """Return the keys in a file or a list, or split a text of keys at its commas.

    A text is the path of a file if there is such a file, if the text is a URL, or if its last part
    has a dot.
    """
    if not isinstance(keys, str):
        return read_lines("keys", keys)
    is_there = "://" in keys or is_file(local_path(keys) or keys)
    if not is_there and keys.rpartition(".")[2].lower() in {*IMAGES, *OTHER_IMAGES}:
        raise UsageError(
            f"{keys} is no key, but the name of an image: --sources takes a file of these"
        )
    if keys and (is_there or "." in keys.rpartition("/")[2]):
        return read_lines("keys", keys)
    return [key for word in keys.split(",") if (key := word.strip())]


def _read_values(kind: str, values: NameList) -> Iterator[str]:
    """Yield the lines of the list of a kind. Raise UsageError for a wrong digest."""
    for line in read_lines(kind, values):
        value = line.lower() if kind == "sha256" else line
        if kind == "sha256" and not SHA256.fullmatch(value):
            raise UsageError(
                f"{line[:80]!r} is not a SHA-256 digest: give 64 hexadecimal digits on each line"
            )
        yield value


def _digests_of_images(store: Store, shard: Shard) -> Iterator[tuple[int, str]]:
    """Yield the SHA-256 of each image of a shard as it is stored, after its sample's number."""
    count = 0
    with open_tape(store, shard.name, expected=shard.nbytes) as tape:
        for sample in scan(tape, wants=lambda name, *_: name.rpartition(".")[2] in IMAGES):
            if isinstance(sample, BadSampleError):
                raise sample
            for image in sample.fields.values():
                yield count, hashlib.sha256(image).hexdigest()
            count += 1
    if count != shard.samples:
        raise DamageError(f"{store.url}/{shard.name}", UNLIKE_RECEIPT)


def image_digests(fields: Mapping[str, bytes], facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the SHA-256 digests by which an image may be known.

    One is of the bytes that came, if the json states it. The other is of the stored bytes, which
    may be the same.
    """
    if digest := facts.get("sha256"):
        yield str(digest).lower()
    for name in IMAGES:
        if name in fields:
            yield hashlib.sha256(fields[name]).hexdigest()


def by_latent_unit(units: Iterable[UnitRemoval]) -> dict[str, ShardRemoval]:
    """Return the image shards that lose samples, by the units of the latents made of them."""
    return {latent_unit(shard.name): shard for unit in units for shard in unit.shards}


# --- latents that were forgotten
def find_neighbours(
    urls: Sequence[str],
) -> tuple[dict[str, frozenset[str]], dict[str, Mapping[str, ShardSuccessor]]]:
    """Look at the datasets in the parent folders of `urls`, and return two mappings by URL.

    The first has the latents that were made of images among `urls`, with the digests of the image
    shards that they were made of. The second has the images there that have lost samples, with what
    became of their shards. A dataset that cannot be read is passed over.
    """
    wanted: set[str] = set()
    for url in urls:
        if (manifest := _read_manifest(url)) and manifest.dataset == "images":
            wanted |= manifest.image_digests() | _successors(url).keys()
    latents: dict[str, frozenset[str]] = {}
    successors: dict[str, Mapping[str, ShardSuccessor]] = {}
    parents = dict.fromkeys(url.rstrip("/").rpartition("/")[0] for url in urls)
    for url in (place for parent in parents for place in _list_datasets(parent)):
        manifest = None if url in urls else _read_manifest(url)
        if manifest is None:
            continue
        if manifest.dataset == "images" and (lost := _successors(url)):
            successors[url] = lost
        digests = frozenset(manifest.image_digests())
        if manifest.dataset == "latents" and not wanted.isdisjoint(digests):
            latents[url] = digests
    return dict(sorted(latents.items())), successors


def _list_datasets(parent: str) -> Iterator[str]:
    """Yield the datasets in a folder or below a prefix; in a bucket only some names are listed."""
    if (path := local_path(parent)) is not None:
        with suppress(OSError):
            for place in sorted(Path(path or "/").iterdir()):
                if (place / MANIFEST).is_file():
                    yield str(place)
        return
    with suppress(WdsprepError):
        for entry in islice(open_store(parent).list(), MOST_LISTED):
            folder, _, name = entry.name.rpartition("/")
            if name == MANIFEST and folder and "/" not in folder:
                yield f"{parent}/{folder}"


def _read_manifest(url: str) -> Manifest | None:
    with suppress(WdsprepError):
        return read_manifest(open_store(url))
    return None


def _successors(url: str) -> Mapping[str, ShardSuccessor]:
    with suppress(WdsprepError):
        return removed_from(open_store(url)).successors
    return {}


def find_lost(
    images: str, receipts: Sequence[Receipt], now: Mapping[str, ShardRemoval]
) -> dict[str, ShardRemoval]:
    """Return by units of latents what the image shards that they were made of lose or have lost.

    They have lost it if these latents were forgotten when samples were removed from the images.
    `now` has what the shards lose, by units of latents.
    """
    store, lost_by_unit = open_store(images), dict(now)
    removed = removed_from(store)
    losing = {lost.digest: ShardSuccessor(digest="", rows=lost.rows) for lost in now.values()}
    all_removed = replace(removed, successors={**removed.successors, **losing})
    for receipt in receipts:
        digest = image_shard_digest(receipt.input)
        successor = all_removed.follow(digest)
        if successor is None or digest in losing:
            continue
        name = latent_shard(receipt.unit)
        keys = {*now[receipt.unit].keys} if receipt.unit in now else set[str]()
        with suppress(NotFoundError):
            rejects = rejects_in(store, unit_of_file(name, "images"))
            keys |= {reject.key for reject in rejects if reject.code is Code.REMOVED}
        lost_by_unit[receipt.unit] = ShardRemoval(
            name=name,
            samples=0,  # of the shard there was, nothing else is known
            nbytes=0,
            digest=digest,
            rows=successor.rows,
            keys=tuple(sorted(keys)),
        )
    return lost_by_unit
