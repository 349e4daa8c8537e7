"""Check all files of one unit of work, each in one pass.

The check is work for a runner: local processes or Ray.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from wdsprep.checks.dataset_check import DatasetSurvey, damage_text, smallest_unit
from wdsprep.checks.findings import Kind
from wdsprep.checks.shard_check import ArrayShardCheck, ImageShardCheck, array_problem
from wdsprep.dataset.file_names import (
    SELECTION,
    captions_name,
    empty_name,
    index_name,
    inputs_name,
    is_table,
    receipt_name,
    rejects_name,
    sample_key,
    table_name,
)
from wdsprep.dataset.image_positions import may_have_moved, plain_positions, positions_from_keys
from wdsprep.dataset.manifest import Receipt, Shard
from wdsprep.dataset.npy_arrays import empty_fields
from wdsprep.dataset.rejects import UNSETTLED, read_rejects
from wdsprep.dataset.removed_samples import UnitRemoval, removed_from
from wdsprep.dataset.sample_table import KEY, ROW, has_all_values, read_table, table_columns
from wdsprep.dataset.samples import key_order
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.settings import is_scored
from wdsprep.dataset.shapes import shape_ranges
from wdsprep.dataset.shard_reader import HashedTape
from wdsprep.dataset.unit_locks import Edition
from wdsprep.errors import (
    AccessError,
    DamageError,
    FormatError,
    NotFoundError,
    StoreError,
    without_secrets,
)
from wdsprep.store import shared_store
from wdsprep.store.base import Store
from wdsprep.text import plural

if TYPE_CHECKING:
    from wdsprep.dataset.image_positions import Positions

OTHER = "its BLAKE3 is not what its receipt says"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckUnit:
    """A finished unit of work to check, of the dataset at `url`.

    `known` are those of its files that have a finding already. `firsts` has the shards of which
    latents hold only the first samples, and how many. `begun` is the change of the unit that a
    removal has begun and not finished.
    """

    url: str
    receipt: Receipt
    known: frozenset[str] = frozenset()
    firsts: Mapping[str, int] = field(default_factory=dict)
    begun: UnitRemoval | None = None

    @property
    def name(self) -> str:
        return f"{self.url}/{self.receipt.unit}"

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.receipt.shards)


Faults = list[tuple[str, Kind, str]]
"""Findings about a unit: the name of each file, the kind, and what is wrong."""
Checked = tuple[Faults, dict[str, str]]
"""The findings about a unit, and digests of the keys of its shards."""


def check_unit(unit: CheckUnit) -> Generator[int, None, Checked]:
    """Check all files of a unit of work, and return the findings.

    Also return a digest of the keys of each shard, under the name by which a latent shard states
    that shard as its input (see `verify`). Yield now and then how many bytes of its shards have
    been read so far. If a removal has begun to change the unit, only check that the removal can
    finish.
    """
    store = shared_store(unit.url)
    if unit.begun:
        from wdsprep.changes.rewrite_units import UnitChange  # which needs numpy

        findings: Faults = []
        try:
            UnitChange(Edition.from_store(store), unit.begun, removed_from(store)).check_begun()
        except NotFoundError:
            pass  # it has just been finished, with nothing left
        except DamageError as error:
            name = error.place.removeprefix(f"{without_secrets(store.url)}/")
            findings = [(name, Kind.DAMAGED, damage_text(error))]
        yield unit.nbytes
        return findings, {}
    check = _UnitCheck(unit, store)
    before = 0
    for shard in unit.receipt.shards:
        if shard.name not in unit.known:
            for nbytes in check.read_shard(shard):
                yield before + nbytes
        before += shard.nbytes
        yield before
    check.check_small_files()
    return check.findings, check.digests()


def check_empty(survey: DatasetSurvey) -> None:
    """Add findings about the files for the empty caption, which belong to all units.

    Files that are missing are left out here.
    """
    if survey.dataset == "images" or not survey.receipts:
        return
    store, unit = survey.edition.store, smallest_unit(survey)
    for item in empty_fields(survey.settings):
        name = empty_name(item.name)
        if name not in survey.files:
            continue
        data = store.read(name)
        if hex_digest(data) not in {r.files.get(name) for r in survey.receipts}:
            what = "its BLAKE3 is not what the receipts say"
            survey.add_finding(name, Kind.DAMAGED, what, unit)
        elif problem := array_problem(item, memoryview(data), len(data)):
            survey.add_finding(name, Kind.WRONG, problem, unit)


class _UnitCheck:
    """The check of one unit: its findings, and the keys of its sound shards."""

    def __init__(self, unit: CheckUnit, store: Store) -> None:
        self._unit, self._receipt, self._store = unit, unit.receipt, store
        self._columns = table_columns(unit.receipt.dataset, unit.receipt.settings)
        self._keys: dict[str, list[str]] = {}
        self._tables: dict[str, bytes] = {}
        self._rejected: list[str] | None = None
        self.findings: Faults = []

    def _find(self, name: str, kind: Kind, what: str) -> None:
        self.findings.append((name, kind, what))

    def _note_unreadable(self, name: str, error: StoreError, missing: Kind) -> None:
        """Note that a file cannot be read, or raise the error.

        A file that was removed is damage, of the kind `missing`, and so is a file that a disk has
        lost. Any other error is trouble with the store, and is raised.
        """
        if isinstance(error, NotFoundError):
            self._find(name, missing, "it is missing")
        elif isinstance(error, AccessError) or self._store.root is None:
            raise error
        else:
            self._find(name, Kind.UNREADABLE, f"it cannot be read ({error})")

    def read_shard(self, shard: Shard) -> Iterator[int]:
        """Check a tar in one pass, then its index, and add findings about them.

        Yield now and then how many bytes have been read so far. Of a damaged tar the index is not
        checked. A shard that is a table alone is checked with the small files.
        """
        if is_table(shard.name):
            return
        check = (
            ImageShardCheck(self._receipt, self._columns, shard)
            if self._receipt.dataset == "images"
            else ArrayShardCheck(self._receipt, self._columns)
        )
        try:
            with HashedTape(self._store, shard) as tape:
                yield from check.read(tape)
                yield from tape.rest()
                digest = tape.digest()
        except StoreError as error:
            self._note_unreadable(shard.name, error, Kind.MISSING)
            return
        also = f" ({check.problem})" if check.problem else ""
        if digest != shard.digest:
            self._find(shard.name, Kind.DAMAGED, f"{OTHER}{also}")
        elif problem := check.problem or self._find_keys_problem(shard, check.keys):
            self._find(shard.name, Kind.WRONG, problem)
        else:
            self._keys[shard.name] = check.keys
            self._tables[shard.name] = check.table.finish()
            name = index_name(shard.name)
            index = None if name in self._unit.known else self._read(name, Kind.INDEX)
            if index not in (None, check.index):
                self._find(name, Kind.INDEX, "it is not the index of its tar")

    def _find_keys_problem(self, shard: Shard, keys: list[str]) -> str:
        """Return what is wrong with the keys of a sound shard, or "" if nothing is."""
        if len(keys) != shard.samples:
            return f"it has {plural(len(keys), 'sample')} where its receipt says {shard.samples:,}"
        if self._receipt.dataset == "images" and not _rise(keys):
            return "its keys are not in rising order"
        if self._runs(shard.samples)[-1].stop != shard.samples:
            return "its receipt does not state the shape of each of its samples"
        return "" if len(set(keys)) == len(keys) else "it has a key twice"

    def _read(self, name: str, missing: Kind = Kind.MISSING) -> bytes | None:
        try:
            return self._store.read(name)
        except StoreError as error:
            self._note_unreadable(name, error, missing)
        return None

    def check_small_files(self) -> None:
        """Add findings about the small files of the unit, such as its rejects and tables.

        If nothing is wrong with a unit of images, also check that each input is a sample or reject.
        """
        receipt = self._receipt
        if receipt.dataset == "images":
            self._read_checked(inputs_name(receipt.unit), receipt.input)
        name = rejects_name(receipt.unit)
        wanted = (receipt.files.get(name, ""), receipt.files.get(UNSETTLED, ""))
        data = self._read_checked(name, *wanted)
        is_settled = UNSETTLED not in receipt.files  # else nobody knows which rows have moved
        if data is not None and is_settled:
            try:
                rejects = read_rejects(data, name)
            except FormatError as error:
                self._find(name, Kind.WRONG, f"one of its lines is not a reject ({error})")
            else:
                self._rejected = [reject.key for reject in rejects]
                if Counter(reject.code.value for reject in rejects) != receipt.rejects:
                    self._find(name, Kind.WRONG, "its codes are not those that its receipt counts")
        if (captions := captions_name(receipt.unit)) in receipt.files:
            self._read_checked(captions, receipt.files[captions])
        for shard in receipt.shards:
            if is_table(shard.name) or shard.name in self._keys:
                self._check_table(shard)
        if is_settled and receipt.dataset == "images" and not (self.findings or self._unit.known):
            self._check_inputs()

    def _read_checked(self, name: str, *wanted: str, kind: Kind | None = None) -> bytes | None:
        """Return the bytes of a file whose digest is in `wanted`.

        Otherwise add a finding, of this kind if it is given, and return None. A file that had a
        finding before is not read, and gets no other.
        """
        if name in self._unit.known:
            return None
        data = self._read(name, kind or Kind.MISSING)
        if data is None or hex_digest(data) in wanted:
            return data
        self._find(name, kind or Kind.DAMAGED, OTHER)
        return None

    def _check_table(self, shard: Shard) -> None:
        """Add a finding if a table is not as its receipt says, or cannot be that of its shard.

        Of a table that can be made of its tar only the rows have to be the same: another pyarrow
        may write other bytes. Damage costs a unit only if nothing else tells the positions or the
        scores: otherwise the table is made again.
        """
        name, has_positions = table_name(shard.name), ROW in self._columns
        is_of_scores = is_scored(self._receipt.settings)
        positions = None if is_of_scores or not has_positions else self._find_positions(shard)
        is_alone = is_of_scores or (has_positions and positions is None)
        kind = Kind.DAMAGED if is_alone else Kind.INDEX
        data = self._read_checked(name, self._receipt.table_digest(shard), kind=kind)
        of_tar = self._tables.get(shard.name, b"")
        if data is None or (data == of_tar and not has_positions):
            return
        try:
            table = read_table(data, self._columns, what=name, rows=shard.samples)
        except DamageError as error:
            self._find(name, kind, error.cause)
            return
        problem = ""
        if is_of_scores:
            keys, has_all = table[KEY].to_pylist(), has_all_values(table)
            if problem := self._find_problem_of_scores(shard, keys, has_all=has_all):
                del self._keys[shard.name]
            else:
                positions = self._find_positions(shard)
        elif data != of_tar:
            expected = read_table(of_tar, self._columns, what=name)
            names = [column for column in self._columns if column != ROW]
            if not table.select(names).equals(expected.select(names)):
                problem = "its rows are not what the json in its tar says"
        if (
            not problem
            and has_positions
            and not self._are_positions(table[ROW].to_pylist(), positions)
        ):
            problem = "its positions are not those of its samples"
        if problem:
            self._find(name, kind, problem)

    def _find_problem_of_scores(self, shard: Shard, keys: list[str], *, has_all: bool) -> str:
        """Return why a table with these keys cannot be that of a shard, or "" if it can be.

        `has_all` is whether it lacks no values.
        """
        keys_of_tar = self._keys.setdefault(shard.name, keys)
        if problem := self._find_keys_problem(shard, keys):
            return problem
        if keys != keys_of_tar:
            return "its keys are not those of its tar"
        return "" if has_all else "it lacks values"

    def _find_positions(self, shard: Shard) -> "Positions | None":
        """Return the positions that the receipt or the keys tell, or None if they tell none."""
        if not may_have_moved(self._receipt):
            return plain_positions(shard.samples)
        if self._rejected is None:
            return None
        return positions_from_keys(self._receipt, self._keys[shard.name], self._rejected)

    def _are_positions(self, rows: list[int], expected: "Positions | None") -> bool:
        """Return whether these are the positions that are told, or if none are, possible ones."""
        if expected is not None:
            return bool(rows == expected.tolist())
        runs = (rows[run.start : run.stop] for run in self._runs(len(rows)))
        rise = all(a < b for run in runs for a, b in pairwise(run))
        are_inside = min(rows) >= 0 and max(rows) < self._receipt.inputs
        return rise and are_inside and len({*rows}) == len(rows)

    def _check_inputs(self) -> None:
        """Add a finding unless each input of a slice is exactly one sample or one reject.

        The keys of a slice are its number and 0, 1, 2, ... Some URLs may have moved to a slice that
        tries them again. A selection has the keys of other datasets.
        """
        unit, inputs = self._receipt.unit, self._receipt.inputs
        keys = [*(k for keys in self._keys.values() for k in keys), *(self._rejected or ())]
        source = self._receipt.settings.get("source")
        if source in ("urls", SELECTION):
            is_own = source == SELECTION or all(key.startswith(unit) for key in keys)
            is_whole = len(keys) == len(set(keys)) == inputs and is_own
        else:  # a receipt may claim any number of inputs
            is_whole = len(keys) == inputs and sorted(keys) == sorted(
                sample_key(unit, number) for number in range(inputs)
            )
        if not is_whole:
            what = f"its shards and rejects do not have each of its {plural(inputs, 'input')} once"
            self._find(receipt_name(unit), Kind.WRONG, what)

    def digests(self) -> dict[str, str]:
        """Return the digest of the keys of each shard, by the input that latent receipts state.

        Of latents the keys are those of samples and rejects together. Shards that are not sound are
        left out.
        """
        if self._receipt.dataset == "images":
            digests = {}
            for shard in self._receipt.shards:
                if keys := self._keys.get(shard.name):
                    digests[shard.digest] = _keys_digest(keys)
                    if first := self._unit.firsts.get(shard.name):
                        digests[f"{shard.digest}:{first}"] = _keys_digest(keys[:first])
            return digests
        if self._rejected is None or len(self._keys) < len(self._receipt.shards):
            return {}
        keys = [key for keys in self._keys.values() for key in keys]
        both = [*keys, *self._rejected]
        if all(_rise(keys[place.start : place.stop]) for place in self._runs(len(keys))):
            both.sort(key=key_order)
        return {self._receipt.input: _keys_digest(both)}

    def _runs(self, count: int) -> list[range]:
        """Return the ranges of samples in which keys rise: one for each shape, or one for all."""
        ranges = shape_ranges(self._receipt.settings, self._receipt.counts)
        return list(ranges.values()) or [range(count)]


def _rise(keys: Iterable[str]) -> bool:
    return all(a < b for a, b in pairwise(map(key_order, keys)))


def _keys_digest(keys: Iterable[str]) -> str:
    return hex_digest("\n".join(keys).encode("utf-8", "surrogateescape"))
