"""The reader of samples: what each level brings, what it costs, and what it says of damage."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.kit.packs import write_files, write_tar
from tests.kit.stores import Far
from wdsprep.dataset.file_names import index_name
from wdsprep.dataset.manifest import Shard
from wdsprep.dataset.shard_reader import HashedTape, ShardReader
from wdsprep.dataset.tar import BLOCK
from wdsprep.dataset.tar.read import TarSample, file_tape, read_samples, scan
from wdsprep.errors import DamageError, NotFoundError
from wdsprep.store import open_store

COUNT = 60


class Made(NamedTuple):
    root: Path
    shard: Shard
    samples: list[TarSample]

    @property
    def tar(self) -> Path:
        return self.root / self.shard.name

    def stores(self) -> list[Any]:
        return [open_store(str(self.root)), Far(self.root)]

    def copied(self, to: Path) -> "Made":
        return self._replace(root=Path(shutil.copytree(self.root, to)))


def readers(of: Made, **options: bool) -> Iterator[ShardReader]:
    """A reader from the disk, and one over a network."""
    for store in of.stores():
        with ShardReader(store, of.shard, **options) as shard:
            yield shard


def key(number: int) -> str:
    return f"{number * 3:012d}"


def fields(number: int, image_nbytes: int) -> list[tuple[str, bytes]]:
    long = 9_000 if number == 7 else 10 + number
    return [
        ("jpg", bytes([number]) * (image_nbytes + number)),
        ("json", b'{"number":%d,"text":"%s"}' % (number, b"x" * long)),
        ("txt", b"caption %d" % number),
    ]


def make(root: Path, name: str = "64/000000.tar", image_nbytes: int = 20_000) -> Made:
    data, writer = write_tar((key(n), fields(n, image_nbytes)) for n in range(COUNT))
    write_files(root, {name: data, index_name(name): writer.index})
    shard = Shard(name=name, samples=COUNT, nbytes=len(data), digest=writer.digest)
    with file_tape(root / name) as tape:
        return Made(root, shard, list(read_samples(tape, name)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("data"))


def asked(store: Any, shard: Shard) -> list[int]:
    """How many bytes of the tar each request brought."""
    return [nbytes for name, _, nbytes in store.asked if name == shard.name]


# --- what each level brings


def test_each_level_brings_the_same_from_a_disk_and_over_a_network(made: Made) -> None:
    keys = [sample.key for sample in made.samples]
    json = [sample.fields["json"] for sample in made.samples]
    for shard in readers(made):
        assert shard.offsets[:-1] == tuple(sample.start for sample in made.samples)
        assert list(shard.keys()) == keys
        assert list(shard.keys([5, 3])) == [keys[5], keys[3]]
        assert list(shard.json()) == list(zip(keys, json, strict=True))
        picked = [made.samples[number].fields for number in (9, 0)]
        assert [sample.fields for sample in shard.samples([9, 0])] == picked
        walked = [(s.start, s.fields) for s in shard.walk(lambda name, *_: name != "jpg")]
        assert walked == [
            (s.start, {name: s.fields[name] for name in ("json", "txt")}) for s in made.samples
        ]


def test_a_json_before_others_is_found_from_header_to_header(tmp_path: Path) -> None:
    """As in tars of other programs, with members in any order."""
    json = [{} if n == 3 else {"json": b'{"number":%d}' % n} for n in range(5)]
    rest = {"jpg": bytes(20_000), "zip": b"z"}
    data, writer = write_tar((key(n), {**json[n], **rest}) for n in range(5))
    write_files(tmp_path, {"a.tar": data, index_name("a.tar"): writer.index})
    for is_foreign in (False, True):
        for shard in readers(Made(tmp_path, Shard("a.tar", 5), []), is_foreign=is_foreign):
            found = list(shard.json())
            assert found == [(key(n), b"" if n == 3 else b'{"number":%d}' % n) for n in range(5)]


# --- what each level costs


def test_offsets_take_one_request_and_of_one_sample_16_bytes(made: Made) -> None:
    store: Any = Far(made.root)
    with ShardReader(store, made.shard) as shard:
        assert shard.span(4)[0] == made.samples[4].start
        assert shard.offsets is shard.offsets
        assert shard.span(5)[0] == made.samples[5].start
    assert [nbytes for *_, nbytes in store.asked] == [16, 8 * (COUNT + 1)]


def test_some_members_take_no_others_bytes(made: Made) -> None:
    for shard in readers(made):
        for wanted, only in (("json", ("json",)), ("txt", ("txt", "no"))):
            fields = shard.sample(30, only=only).fields
            assert fields == {wanted: made.samples[30].fields[wanted]}
    assert sum(asked(shard.store, made.shard)) < 20_000


def test_small_samples_come_whole_and_of_large_ones_the_ends(tmp_path: Path) -> None:
    for image_nbytes in (100, 400_000):
        made = make(tmp_path / f"{image_nbytes}", image_nbytes=image_nbytes)
        store: Any = Far(made.root)
        with ShardReader(store, made.shard) as shard:
            assert len([*shard.json()]) == COUNT
        if image_nbytes == 100:
            assert len(asked(store, made.shard)) == 1
        else:
            assert len(asked(store, made.shard)) < COUNT + 10
            assert max(asked(store, made.shard)) < 20_000
            store.asked.clear()
            with ShardReader(store, made.shard) as shard:
                assert len([*shard.walk(lambda name, *_: name == "json")]) == COUNT
            assert len(asked(store, made.shard)) < COUNT + 10
            assert sum(asked(store, made.shard)) < COUNT * 10_000


# --- damage


def test_an_index_that_cannot_be_that_of_the_shard_is_refused(made: Made, tmp_path: Path) -> None:
    own = made.copied(tmp_path / "own")
    index = own.root / index_name(own.shard.name)
    whole = index.read_bytes()
    moved = bytearray(whole)
    moved[9] ^= 1
    for bad in (whole[:-8], whole[:-1], bytes(moved), b"", None):
        if bad is None:
            index.unlink()
        else:
            index.write_bytes(bad)
        for shard in readers(own):
            with pytest.raises(DamageError, match=r"000000\.tar is damaged: .* is not its index"):
                _ = shard.offsets
    index.write_bytes(whole)
    shorter = own.shard._replace(nbytes=512)
    with pytest.raises(DamageError, match="is not its index"):
        _ = ShardReader(own.stores()[0], shorter).offsets
    with pytest.raises(DamageError, match="it has no sample 99"):
        ShardReader(own.stores()[0], own.shard).span(99)


def test_what_is_damaged_is_told_with_its_place(made: Made, tmp_path: Path) -> None:
    own = made.copied(tmp_path / "own")
    whole = bytearray(own.tar.read_bytes())
    whole[own.samples[4].start : own.samples[4].start + 100] = bytes(100)
    own.tar.write_bytes(whole)
    looks: dict[str, Callable[[ShardReader], object]] = {
        r"no sample begins at byte [\d,]+": lambda shard: list(shard.keys()),
        "at byte 0 stands no tar header": lambda shard: shard.sample(4),
        r"at byte [\d,]+ stands": lambda shard: list(shard.walk(lambda *_: False)),
    }
    for wrong, look in looks.items():
        for shard in readers(own):
            with pytest.raises(DamageError, match=rf"/000000\.tar is damaged.*: {wrong}"):
                look(shard)


def test_a_walk_finds_an_index_of_other_samples(made: Made, tmp_path: Path) -> None:
    own = made.copied(tmp_path / "own")
    offsets = np.fromfile(own.root / index_name(own.shard.name), "<u8")
    offsets[3] += BLOCK
    offsets.tofile(own.root / index_name(own.shard.name))
    for shard in readers(own):
        with pytest.raises(DamageError, match=f"its index has {key(3)} at another place"):
            list(shard.walk(lambda *_: False))
    np.delete(offsets, 3).tofile(own.root / index_name(own.shard.name))
    with (
        ShardReader(own.stores()[0], own.shard._replace(samples=COUNT - 1)) as shard,
        pytest.raises(DamageError, match="its index has"),
    ):
        list(shard.walk(lambda *_: False))


def test_a_cut_tar_and_one_that_is_gone_are_errors(made: Made, tmp_path: Path) -> None:
    own = made.copied(tmp_path / "own")
    own.tar.write_bytes(own.tar.read_bytes()[: own.samples[-2].start + 5])
    for shard in readers(own):
        with pytest.raises(DamageError, match="it is truncated"):
            list(shard.json())
    own.tar.unlink()
    for look in (ShardReader.json, ShardReader.keys, lambda shard: shard.walk(lambda *_: True)):
        for shard in readers(own):
            with pytest.raises(NotFoundError):
                list(look(shard))


# --- many, and every byte


def test_every_byte_is_hashed(made: Made, tmp_path: Path) -> None:
    for store in made.stores():
        with HashedTape(store, made.shard) as tape:
            assert [one.fields for one in read_samples(tape.at, "it")] == [
                one.fields for one in made.samples
            ]
            tape.check(made.shard.digest)
        with HashedTape(store, made.shard) as tape:
            tape.check(made.shard.digest)  # whoever looks at nothing
    own = made.copied(tmp_path / "own")
    whole = bytearray(own.tar.read_bytes())
    whole[own.samples[3].start + 700] ^= 1
    own.tar.write_bytes(whole)
    for store in own.stores():
        with HashedTape(store, own.shard) as tape:
            assert len([*scan(tape.at)]) == COUNT
            with pytest.raises(DamageError, match="it is not what its receipt says"):
                tape.check(own.shard.digest)
