import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3

from wdsprep.dataset.coarse_histograms import sum_counts
from wdsprep.dataset.digests import FIRST_FORM, FORM, FORMAT
from wdsprep.dataset.manifest import Manifest, differences, sorted_receipts
from wdsprep.dataset.receipts import Receipt, Shard, fingerprint
from wdsprep.dataset.sealed_json import seal
from wdsprep.errors import FormatError, NewerFormatError

SETTINGS = {**FORM, "buckets": [256, 512], "check": "full", "caption_col": "", "größe": 1.5}


def receipt(unit: str = "000000") -> Receipt:
    shards = (
        Shard(name=f"256/{unit}.tar", samples=3, nbytes=10_240, digest="ab" * 32),
        Shard(name=f"512/{unit}.tar", samples=1, nbytes=4_096, digest="cd" * 32),
    )
    return Receipt(
        dataset="images",
        unit=unit,
        generation=0,
        settings=SETTINGS,
        input="ef" * 32,
        inputs=6,
        shards=shards,
        rejects={"too_small": 2},
    )


def manifest() -> Manifest:
    receipts = (receipt("000000"), receipt("000001"))
    return Manifest(dataset="images", settings=SETTINGS, receipts=receipts, complete=True)


def test_receipt_and_manifest_survive_json() -> None:
    assert Receipt.from_bytes(receipt().to_bytes(), "r") == receipt()
    assert Manifest.from_bytes(manifest().to_bytes(), "m") == manifest()


def test_equal_values_give_equal_bytes_whatever_order_they_were_made_in() -> None:
    turned = dict(reversed(SETTINGS.items()))
    one = Manifest(dataset="images", settings=SETTINGS)
    assert one.to_bytes() == Manifest(dataset="images", settings=turned).to_bytes()


def test_any_flipped_bit_is_found() -> None:
    for sealed, read in (
        (receipt().to_bytes(), Receipt.from_bytes),
        (manifest().to_bytes(), Manifest.from_bytes),
    ):
        for bit in random.Random(0).sample(range(len(sealed) * 8), 400):
            damaged = bytearray(sealed)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(FormatError, match="the file is damaged"):
                read(bytes(damaged), "the file")


@pytest.mark.parametrize("cut", [0, 1, 11, 75, 77, 200, -1])
def test_a_cut_file_is_damaged(cut: int) -> None:
    with pytest.raises(FormatError, match="damaged"):
        Manifest.from_bytes(manifest().to_bytes()[:cut], "m")


def test_a_newer_format_asks_for_an_upgrade() -> None:
    newer = Manifest(dataset="images", settings={**SETTINGS, "format": FORMAT + 1}).to_bytes()
    with pytest.raises(NewerFormatError, match="upgrade wdsprep"):
        Manifest.from_bytes(newer, "m")


def test_a_receipt_is_no_manifest() -> None:
    with pytest.raises(FormatError, match="holds a receipt where a manifest should be"):
        Manifest.from_bytes(receipt().to_bytes(), "m")


def test_anyone_can_read_the_json() -> None:
    found = json.loads(manifest().to_bytes())
    assert found["format"] == FORMAT
    assert found["fingerprint"] == fingerprint(SETTINGS)
    assert found["units"][0]["shards"][0]["name"] == "256/000000.tar"


@pytest.mark.parametrize(
    "change",
    [
        lambda body: [unit.update(attempts=2) for unit in body["units"]],
        lambda body: [unit.update(when="today") for unit in body["units"]],
        lambda body: body.update(zebra=[{"counts": {}}, {"counts": {}}]),
        lambda body: body["extra"].update(trials=[{"a": 1}, {"counts": {}}]),
    ],
    ids=["a field before the others", "a field after them", "more after the units", "a like text"],
)
def test_a_manifest_that_another_program_has_written_is_read_all_the_same(
    change: Callable[[dict[str, Any]], None],
) -> None:
    body = json.loads(manifest().to_bytes())
    change(body)
    kind = body.pop("kind")
    for name in ("digest", "format"):
        del body[name]
    found = Manifest.from_bytes(b"".join(seal(kind, body)), "m")
    assert found.receipts == manifest().receipts
    assert found.shards == manifest().shards


def test_manifest_lists_shards_by_bucket_and_sums_rejects() -> None:
    names = [shard.name for shard in manifest().shards]
    assert names == ["256/000000.tar", "256/000001.tar", "512/000000.tar", "512/000001.tar"]
    assert manifest().rejects == {"too_small": 4}
    assert sum_counts([{"b": 1}, {"a": 2, "b": 3}]) == {"a": 2, "b": 4}


def test_receipts_come_in_the_order_of_their_numbers() -> None:
    units = ["1000000", "000002", "999999"]
    found = [r.unit for r in sorted_receipts(map(receipt, units))]
    assert found == ["000002", "999999", "1000000"]


def test_fingerprint_is_frozen() -> None:
    assert fingerprint({"a": 1, "b": [256, 512]}) == (
        "06630645968c4d90e0cef41049e519309c127860006a27075a12df9fe0a3a47a"
    )
    assert fingerprint({"a": 1, "b": [256, 512]} | FORM) == (
        "feb8125097a97f23b1fde43195e75042c257318a1e15b248928846701d19f42e"
    )


@pytest.mark.parametrize(
    ("form", "digest", "other"),
    [(FORM, blake3, "sha256"), (FIRST_FORM, hashlib.sha256, "blake3")],
    ids=["now", "before"],
)
def test_a_dataset_keeps_the_digest_that_it_was_begun_with(
    form: dict[str, Any], digest: Callable[[bytes], Any], other: str
) -> None:
    settings = {"buckets": [256, 512], **form}
    receipts = [replace(receipt(unit), settings=settings) for unit in ("000000", "000001")]
    whole = Manifest(dataset="images", settings=settings, receipts=receipts)
    for sealed in (receipts[0].to_bytes(), whole.to_bytes()):
        said = json.loads(sealed)
        assert said["digest"] == digest(sealed.partition(b",")[2]).hexdigest()
        assert said["format"] == form["format"]
        (unit, *_) = said.get("units", [said])
        assert unit["shards"][0].keys() == {"name", "nbytes", "samples", digest(b"").name}
        assert other.encode() not in sealed
    assert Manifest.from_bytes(whole.to_bytes(), "m").shards == whole.shards
    assert [r.shards for r in whole.ledger] == [r.shards for r in receipts]


def test_differences_are_said_as_a_user_would() -> None:
    old = {"buckets": [256, 512], "check": "full", "min_size": 0}
    new = {"buckets": [512], "check": "full", "filter": ""}
    assert differences(old, new) == [
        "buckets: 256,512 -> 512",
        'filter: (none) -> ""',
        "min-size: 0 -> (none)",
    ]
