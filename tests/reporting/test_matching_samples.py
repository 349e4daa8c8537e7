"""`inspect --where` finds in the tables what the closures of a condition find in the json."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import wdsprep
from tests.kit.command_lines import CommandLine
from tests.kit.latent_sets import write_latents
from tests.kit.packs import jpeg, manifest_of, pack, samples_of, write_files
from wdsprep.changes.merged_datasets import select_samples
from wdsprep.dataset.condition_syntax import Condition
from wdsprep.dataset.file_names import MANIFEST, receipt_name, table_name
from wdsprep.dataset.sample_table import MARK
from wdsprep.dataset.samples import value_at_path
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.stored_dataset import read_receipt
from wdsprep.errors import DamageError, FingerprintError, NotFoundError, UsageError
from wdsprep.reporting.inspect import MatchingSamples
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes
from wdsprep.tables import stored_tables

ASKED = (
    "1 <= width / height < 1.5 and not caption == ''",
    "meta.license in ('nc', 'by') and 'photo 1' in caption",
    "tags[0] == 'big' and number > 9007199254740992",
    "meta['a name'].deep == 2 or width * height > 5000",
    "width",
    "width < 0",
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards in two buckets. Their tars are gone: only tables tell of the samples."""
    root = tmp_path_factory.mktemp("matching")
    files: dict[str, bytes | str] = {}
    for number in range(40):
        facts = {"aesthetic": number / 5, "license": ["nc", "by", "\u00fc"][number % 3]}
        facts |= {"tags": ["red", "big"][number % 2 :], "number": 2**53 + number % 2}
        facts |= {"a name": {"deep": number % 4}, "captions": [f"photo {number}", "second"]}
        files[f"photo-{number:02d}.jpg"] = jpeg(number)
        if number % 3:
            files[f"photo-{number:02d}.json"] = json.dumps(facts)
    options = ("--caption-col", "captions", "--samples-per-shard", "20")
    images = pack(write_files(root / "photos", files), root / "images", *options)
    (root / "json").write_text(json.dumps([sample["json"] for sample in samples_of(images)]))
    for tar in images.rglob("*.tar"):
        tar.unlink()
    return images


@pytest.fixture(params=["whole", "by column"])
def _read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by column":
        monkeypatch.setattr(stored_tables, "WHOLE_NBYTES", 0)


def find(images: Path | str, where: str, **options: Any) -> MatchingSamples:
    found = wdsprep.inspect(images, where=where, **options)
    assert isinstance(found, MatchingSamples)
    return found


def by_closures(images: Path, where: str) -> Iterator[dict[str, Any]]:
    condition = Condition(where)
    for facts in json.loads((images.parent / "json").read_text()):
        if condition.holds([value_at_path(facts, path) for path in condition.names]):
            yield facts


def check_found(images: Path, url: Path | str, where: str) -> None:
    expected = [*by_closures(images, where)]
    found = find(url, where, limit=100)
    assert (found.matching, found.samples) == (len(expected), 40)
    for row, facts in zip(found.first, expected, strict=True):
        assert row["key"] == facts["key"]
        assert (row["width"], row["height"]) == (facts["width"], facts["height"])
        assert row["caption"] == facts.get("caption")
        assert row["shard"].startswith(f"{facts['bucket']}/")
    numbers = [(row["shard"], row["number"]) for row in found.first]
    assert len(set(numbers)) == len(numbers)
    assert find(url, where, limit=3).first == found.first[:3]


@pytest.mark.usefixtures("_read")
@pytest.mark.parametrize("where", ASKED)
def test_tables_alone_tell_which_samples_meet_a_condition(images: Path, where: str) -> None:
    assert len(manifest_of(images).shards) > 2
    check_found(images, images, where)
    count = len([*by_closures(images, where)])
    assert {"width < 0": count == 0, "width": count == 40}.get(where, 0 < count < 40)


@pytest.mark.usefixtures("_read")
@pytest.mark.parametrize("removed", ["000000000000", "000000000001", ""])
def test_tables_that_another_run_changes_meanwhile_are_no_damage(
    tmp_path: Path, removed: str
) -> None:
    """A table has fewer rows, or is gone with its only sample, or has been packed anew."""
    photos = write_files(tmp_path / "photos", {f"{n}.jpg": jpeg(n) for n in range(3)})
    images = pack(photos, tmp_path / "images")
    before = select_samples(str(images), (), "width > 1")
    if removed:
        wdsprep.remove(images, keys=[removed], yes=True)
    else:
        write_files(photos, {"1.txt": "other", "3.jpg": jpeg(3)})
        pack(photos, images, "--overwrite")
    with pytest.raises(FingerprintError, match="written anew while it was read"):
        before.selection(None)


def test_the_screen_and_the_json(images: Path, command: CommandLine) -> None:
    where = "like(caption, 'photo 1%')"
    count = len([*by_closures(images, where)])
    words = ("inspect", images, "--where", where, "--limit")
    head, first, _, more = command(*words, 2).lines
    assert head == f'{count} of 40 samples of {images} meet "{where}"'
    facts = next(by_closures(images, where))
    size = f"{facts['width']}x{facts['height']}"
    assert re.fullmatch(rf'{facts["key"]}  \d+ of \d+/\d+.tar  {size}  "photo 1.*"', first)
    assert more == f"and {count - 2} more: --limit shows more of them"
    found = command(*words, 1, "--json").facts
    assert (found["matching"], found["samples"]) == (count, 40)
    assert [row["key"] for row in found["first"]] == [facts["key"]]
    nothing = f"0 of 40 samples of {images} meet 'width < 0'\n"
    assert command("inspect", images, "--where", "width < 0").out == nothing


def test_latents_and_foreign_tars_are_asked_too(tmp_path: Path) -> None:
    url = write_latents(str(tmp_path / "latents"), (4, 3))
    where = "like(key, '%5') or key == '000000000001'"
    found = find(url, where)
    assert [(row["key"], row["shard"], row["number"]) for row in found.first] == [
        ("000000000001", "256/000000.tar", 1),
        ("000000000005", "256/000001.tar", 1),
    ]
    assert (found.matching, found.samples, found.first[0]["width"]) == (2, 7, None)
    Path(url, MANIFEST).unlink()
    assert find(url, where).first == found.first


def test_columns_of_a_joined_table_may_be_named(images: Path, tmp_path: Path) -> None:
    keys = [facts["key"] for facts in by_closures(images, "width")]
    lines = [f"{key},{number}" for number, key in enumerate(keys[::2])]
    (tmp_path / "marks.csv").write_text("\n".join(["key,mark", *lines]))
    found = find(images, "mark >= 15 and width", join=tmp_path / "marks.csv")
    assert [row["key"] for row in found.first] == keys[30::2]
    assert (found.matching, found.samples) == (5, 40)


# --- what is refused, in one line
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("wdth > 3", "no sample has wdth, .* did you mean width?"),
        ("meta.licence == 'nc'", "no sample has meta.licence, .* did you mean license?"),
        ("meta['a name'].dep > 1", "no sample has meta.a name.dep, .* did you mean deep?"),
        ("meta['a nmae'].deep > 1", "no sample has meta.a nmae.deep, .* did you mean a name?"),
        ("sha512 == 'a'", "no sample has sha512, .*shows the json of a sample"),
        ("xyzzy == 1", "no sample has xyzzy, .*shows the json of a sample"),
        ("width >=", 'where="width >=": invalid syntax'),
        ("__import__('os').system('true')", "cannot be used"),
    ],
)
def test_a_condition_that_means_nothing_is_one_line(images: Path, where: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        find(images, where)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["000000000001", "--where", "width"], "leave out KEY"),
        (["--urls", "--where", "width"], "leave out KEY"),
        (["--join", "scores.csv"], "--join and --limit are for --where: give a condition too"),
        (["--limit", "5"], "--join and --limit are for --where: give a condition too"),
    ],
)
def test_a_condition_goes_with_no_key(
    images: Path, words: list[str], line: str, command: CommandLine
) -> None:
    assert line in command("inspect", images, *words, code=2).err


def a_copy(images: Path, tmp_path: Path) -> tuple[Path, str]:
    """Copy a dataset, and return the path of the copy with the name of its first table."""
    shutil.copytree(images, tmp_path / "images")
    return tmp_path / "images", table_name(manifest_of(images).shards[0].name)


def another_table(data: bytes, kind: str) -> bytes:
    """Return what somebody has made of a table."""
    if kind == "cut":
        return data[:-40]
    if kind == "flipped":
        at = data.index(b"(\xb5/\xfd") + 20  # in a page that zstd has packed
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    table = pq.read_table(pa.BufferReader(data))
    if kind == "other rows":
        table = table.slice(1)
    width = table.schema.get_field_index("width")
    if kind == "other type":
        table = table.set_column(width, "width", table["width"].cast(pa.float64()))
    if kind == "two names":
        table = table.append_column("width", table["width"])
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(out, table.schema.remove_metadata(), store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(MARK)
    return out.getvalue().to_pybytes()


@pytest.mark.usefixtures("_read")
@pytest.mark.parametrize("kind", ["cut", "flipped", "other rows", "other type", "two names"])
def test_a_table_that_is_missing_or_another_is_one_line_that_names_it(
    images: Path, tmp_path: Path, kind: str
) -> None:
    copy, name = a_copy(images, tmp_path)
    data = (copy / name).read_bytes()
    (copy / name).unlink()
    with pytest.raises(NotFoundError, match=f"{name} is missing: run .*wdsprep index {copy}"):
        find(copy, "width")
    (copy / name).write_bytes(another_table(data, kind))
    with pytest.raises(DamageError, match="wdsprep repair") as damage:
        find(copy, "key and width and source and caption and sha256 and meta and bucket")
    assert str(copy / name) in str(damage.value)
    assert "\n" not in str(damage.value)


def test_a_table_that_was_made_again_since_the_manifest_is_read(
    images: Path, tmp_path: Path
) -> None:
    copy, name = a_copy(images, tmp_path)
    (copy / name).write_bytes(data := another_table((copy / name).read_bytes(), "same"))
    store = open_store(str(copy))
    with pytest.raises(DamageError, match="not what its receipt says"):
        find(copy, "width")
    receipt = read_receipt(store, "000000")
    receipt = replace(receipt, files={**receipt.files, name: hex_digest(data)})
    write_bytes(store, receipt_name("000000"), receipt.to_bytes())
    assert find(copy, "width").matching == 40
