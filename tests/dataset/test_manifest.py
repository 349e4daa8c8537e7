import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from wdsprep.dataset.coarse_histograms import sum_counts
from wdsprep.dataset.digests import FORMAT
from wdsprep.dataset.manifest import Manifest, differences
from wdsprep.dataset.receipts import Receipt, Shard, fingerprint
from wdsprep.dataset.sealed_json import seal
from wdsprep.errors import FormatError, OtherFormatError

SETTINGS = {"buckets": [256, 512], "check": "full", "caption_col": "", "größe": 1.5}


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


@pytest.mark.parametrize("other", [0, 2, 17])
def test_another_format_is_refused_with_what_to_do(
    other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.dataset.sealed_json.FORMAT", other)
    sealed = manifest().to_bytes()
    monkeypatch.undo()
    with pytest.raises(OtherFormatError) as refused:
        Manifest.from_bytes(sealed, "m/wdsprep.json")
    assert str(refused.value) == (
        f"m/wdsprep.json is of format {other}, and this wdsprep reads format 1 alone: use the "
        "wdsprep that wrote it, or make the dataset again with --overwrite"
    )


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


def test_fingerprint_is_frozen() -> None:
    assert fingerprint({"a": 1, "b": [256, 512]}) == (
        "793e9ffef3ba9ac18b5134d76dc373a06c5dd42c724fc4eac7f7e9d0435e52e7"
    )


def test_differences_are_said_as_a_user_would() -> None:
    old = {"buckets": [256, 512], "check": "full", "min_size": 0}
    new = {"buckets": [512], "check": "full", "filter": ""}
    assert differences(old, new) == [
        "buckets: 256,512 -> 512",
        'filter: (none) -> ""',
        "min-size: 0 -> (none)",
    ]
