"""Tables of what was made of images: after each command they say what the tars and images say."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet as pq

import wdsprep
from tests.kit.damaged import check, findings, flip
from tests.kit.encodes import encode_here, members, packed, positions_in, rejected
from tests.kit.packs import check_tables, jpeg, manifest_of, tar_bytes, tree, write_files
from wdsprep.checks.findings import Kind
from wdsprep.checks.repair import do_repair, plan_repair
from wdsprep.dataset.file_names import MANIFEST, index_name, receipt_name, table_name
from wdsprep.dataset.reindex import index
from wdsprep.dataset.sample_table import LATENT_COLUMNS, TableWriter
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.stored_dataset import write_rebuilt
from wdsprep.errors import FormatError

pytestmark = pytest.mark.usefixtures("no_models")
SIZES = ((64, 80), (100, 70), (300, 66), (70, 120), (66, 66), (64, 300))
"""Of these, the third and the last lose too much in any shape."""
SHAPED = {"shapes": "nearest:32,2", "max_crop": 0.3}
KINDS = {"square": {"max_crop": 0.3}, "shaped": SHAPED, "text": {"latents": "none"}}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that pack packed, a tar of another program whose keys do not rise, and what of both
    was made."""
    root = tmp_path_factory.mktemp("made")
    files: dict[str, bytes | str] = {}
    for number in range(18):
        files[f"{number:03d}.jpg"] = jpeg(number, SIZES[number * 5 % 6])
        files[f"{number:03d}.txt"] = f"caption {number}"
    images = packed(write_files(root / "photos", files), root / "images")
    turned = ((f"{int(name[:3]) * 7 % 18:03d}{name[3:]}", data) for name, data in files.items())
    write_files(root / "tars/64", {"x.tar": tar_bytes((n, _bytes(data)) for n, data in turned)})
    for kind, options in KINDS.items():
        encode_here(images, root / kind, **options)
    encode_here(root / "tars/64", root / "foreign", **SHAPED)
    return root


def _bytes(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else data


@pytest.fixture
def root(once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(once, tmp_path / "made"))


def check_made(images: Path, made: Path) -> int:
    """Each row is that of its sample, which stands in the image shard where the row says. Return
    how many shards have samples that moved."""
    check_tables(made)
    moved = 0
    for shard in manifest_of(made).shards:
        rows, keys = positions_in(made, shard.name), [*members(images / shard.name)]
        assert [keys[row] for row in rows] == [*members(made / shard.name)]
        moved += rows != [*range(len(rows))]
    return moved


def keys_to_remove(made: Path) -> list[str]:
    return [next(iter(members(made / shard.name))) for shard in manifest_of(made).shards]


def lose_tables(made: Path) -> list[str]:
    """Take one table away, and damage another."""
    names = [table_name(shard.name) for shard in manifest_of(made).shards]
    (made / names[0]).unlink()
    for name in names[1:2]:
        flip(made / name, 99)
    return names[:2]


def mend(made: Path) -> None:
    whole, lost = tree(made), lose_tables(made)
    assert findings(made) == [f"{name} index" for name in lost]
    do_repair(plan_repair(check(made).surveys[0]))
    assert tree(made) == whole


def make_lost(made: Path) -> None:
    whole = tree(made)
    for shard in manifest_of(made).shards:
        (made / table_name(shard.name)).unlink()
    assert index(str(made)) == {table_name(s.name): s.samples for s in manifest_of(made).shards}
    assert tree(made) == whole


def rebuild(made: Path) -> None:
    whole = tree(made)
    (made / MANIFEST).unlink()
    write_rebuilt(str(made))
    assert tree(made).keys() == whole.keys()


STEPS: dict[str, Callable[[Path, Path], object]] = {
    "encode": lambda _images, _made: None,
    "repair": lambda _images, made: mend(made),
    "index": lambda _images, made: make_lost(made),
    "rebuild": lambda _images, made: rebuild(made),
    "remove": lambda images, made: wdsprep.remove(
        images, made, keys=keys_to_remove(made), yes=True
    ),
    "remove later": lambda images, made: (
        wdsprep.remove(images, keys=keys_to_remove(images), yes=True),
        wdsprep.remove(made, yes=True),
    ),
    "remove alone": lambda _images, made: wdsprep.remove(made, keys=keys_to_remove(made), yes=True),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_tables_hold_what_tars_and_images_hold(root: Path, kind: str, step: str) -> None:
    images, made = root / "images", root / kind
    before = manifest_of(made).samples
    STEPS[step](images, made)
    moved = check_made(images, made)
    assert bool(moved) is (bool(rejected(made)) or kind == "shaped")
    assert (manifest_of(made).samples < before) is step.startswith("remove")
    assert findings(images, made) == []
    assert encode_here(images, made, **KINDS[kind]).samples == 0


@pytest.mark.parametrize("kind", KINDS)
def test_selected_latents_have_the_positions_of_the_selected_images(root: Path, kind: str) -> None:
    for source, part, options in (
        (root, "part", {"count": 11, "seed": 1, "samples_per_shard": 4}),
        (root / "part", "whole", {"samples_per_shard": 99, "prefix": True}),
    ):
        images, made = root / part / "images", root / part / kind
        wdsprep.select([source / "images", source / kind], str(root / part / "{name}"), **options)
        assert check_made(images, made) or kind == "text"
        assert findings(images, made) == []


def test_nothing_but_their_table_has_the_positions_of_foreign_samples(root: Path) -> None:
    made, tars = root / "foreign", root / "tars"
    whole = tree(made)
    assert rejected(made)
    assert check_made(tars, made)
    assert findings(made) == []
    wdsprep.remove(made, keys=keys_to_remove(made), yes=True)
    assert check_made(tars, made)
    assert findings(made) == []
    (name,) = lose_tables(made)
    assert findings(made) == [f"{name} missing"]
    told: list[str] = []
    assert index(str(made), on_message=told.append) == {}
    assert f"{name} cannot be made: no keys tell which images" in told[0]
    do_repair(plan_repair(check(made).surveys[0]))
    encode_here(tars / "64", made, **SHAPED)
    assert check_made(tars, made)
    assert tree(made).keys() - {"removed"} == whole.keys()


def test_repair_finishes_before_it_says_which_table_it_cannot_make(root: Path) -> None:
    images, made = root / "part/images", root / "part/shaped"
    wdsprep.select(
        [root / "images", root / "shaped"], str(root / "part/{name}"), samples_per_shard=99
    )
    shards = [shard.name for shard in manifest_of(made).shards]
    for name in (MANIFEST, index_name(shards[0]), table_name(shards[0])):
        (made / name).unlink()
    with pytest.raises(FormatError, match='same "wdsprep encode" again with --overwrite'):
        wdsprep.repair(str(made), yes=True)
    assert findings(made) == [f"{table_name(shards[0])} index"]
    encode_here(images, made, overwrite=True, **SHAPED)
    assert check_made(images, made)
    assert findings(made) == []


@pytest.mark.parametrize(
    ("kind", "change", "wrong"),
    [
        ("shaped", {"caption": "another"}, "its rows are not what the json in its tar says"),
        ("shaped", {"row": 5}, "its positions are not those of its samples"),
        ("square", {"row": 5}, "its positions are not those of its samples"),
        ("text", {"row": 5}, "its positions are not those of its samples"),
        ("foreign", {"row": 17}, "its positions are not those of its samples"),
    ],
)
def test_a_table_with_the_digest_of_its_receipt_has_to_be_that_of_its_tar(
    root: Path, kind: str, change: dict[str, Any], wrong: str
) -> None:
    made = root / kind
    receipt, *_ = manifest_of(made).receipts
    (shard,) = receipt.shards
    table = TableWriter(LATENT_COLUMNS)
    rows = pq.read_table(made / table_name(shard.name)).to_pylist()
    for row in ({**rows[0], **change}, *rows[1:]):
        table.add(row["key"], {name: value for name, value in row.items() if value is not None})
    (made / table_name(shard.name)).write_bytes(data := table.finish())
    files = {**receipt.files, table_name(shard.name): hex_digest(data)}
    (made / receipt_name(receipt.unit)).write_bytes(replace(receipt, files=files).to_bytes())
    write_rebuilt(str(made))
    (found,) = check(made).findings
    kinds = Kind.DAMAGED if kind == "foreign" else Kind.INDEX
    assert (found.name, found.kind, found.what) == (table_name(shard.name), kinds, wrong)
    do_repair(plan_repair(check(made).surveys[0]))
    if kind == "foreign":
        encode_here(root / "tars/64", made, **SHAPED)
    assert check_made(root / ("tars" if kind == "foreign" else "images"), made) or kind == "text"
    assert findings(made) == []
