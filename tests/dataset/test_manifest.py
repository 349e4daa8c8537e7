"""Manifests, receipts and settings as files of a dataset have them; what cannot be is one line."""

import json
import random
from pathlib import Path
from typing import Annotated, Any

import pytest

from tests.kit.sealed_files import receipt_of_images, resealed, sealed, unsealed
from wdsprep.dataset.coarse_histograms import sum_counts
from wdsprep.dataset.file_names import receipt_name
from wdsprep.dataset.manifest import Manifest, Receipt, Shard, fingerprint
from wdsprep.dataset.rejects import read_rejects
from wdsprep.dataset.removed_samples import Marks, Removed
from wdsprep.dataset.sealed_json import FORMAT, check_record, read_record, value_rule
from wdsprep.dataset.settings import (
    allowed_more,
    as_json,
    changed_settings,
    checked_settings,
    is_same,
    loosened,
    say_changes,
)
from wdsprep.dataset.stored_dataset import find_receipt
from wdsprep.errors import FingerprintError, FormatError, OtherFormatError
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes

SETTINGS = {"buckets": [256, 512], "check": "full", "caption_col": "", "größe": 1.5}
DIGEST = "ab" * 32


def receipt(unit: str = "000000", **changed: Any) -> Receipt:
    shards = (
        Shard(name=f"256/{unit}.tar", samples=3, nbytes=10_240, digest=DIGEST),
        Shard(name=f"512/{unit}.tar", samples=1, nbytes=4_096, digest="cd" * 32),
    )
    said = {"settings": SETTINGS, "input": "ef" * 32, "inputs": 6, "shards": shards}
    said |= {"rejects": {"too_small": 2}, "counts": {"side<512": 3}}
    files = {f"rejects/{unit}.jsonl": DIGEST}
    return receipt_of_images(**(said | {"unit": unit, "files": files} | changed))


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
    for whole, read in (
        (receipt().to_bytes(), Receipt.from_bytes),
        (manifest().to_bytes(), Manifest.from_bytes),
    ):
        for bit in random.Random(0).sample(range(len(whole) * 8), 400):
            damaged = bytearray(whole)
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
    written = manifest().to_bytes()
    monkeypatch.undo()
    with pytest.raises(OtherFormatError) as refused:
        Manifest.from_bytes(written, "m/wdsprep.json")
    assert str(refused.value) == (
        f"m/wdsprep.json is of format {other}, and this wdsprep reads format 1 alone: use the "
        "wdsprep that wrote it, or make the dataset again with --overwrite"
    )


def test_anyone_can_read_the_json() -> None:
    found = json.loads(manifest().to_bytes())
    assert found["format"] == FORMAT
    assert found["fingerprint"] == fingerprint(SETTINGS)
    assert found["units"][0]["shards"][0]["name"] == "256/000000.tar"


def test_manifest_lists_shards_by_bucket_and_sums_rejects() -> None:
    names = [shard.name for shard in manifest().shards]
    assert names == ["256/000000.tar", "256/000001.tar", "512/000000.tar", "512/000001.tar"]
    assert manifest().rejects == {"too_small": 4}
    assert sum_counts([{"b": 1}, {"a": 2, "b": 3}]) == {"a": 2, "b": 4}


def test_fingerprint_is_frozen() -> None:
    assert fingerprint({"a": 1, "b": [256, 512]}) == (
        "793e9ffef3ba9ac18b5134d76dc373a06c5dd42c724fc4eac7f7e9d0435e52e7"
    )


URLS: dict[str, Any] = {"source": "urls", "max_bytes": 50, "opt_outs": True, "robots": True}


def test_what_may_be_fetched_can_be_loosened_and_never_tightened() -> None:
    loose = {**URLS, "allow_s3": True, "max_bytes": 60, "opt_outs": False, "robots": False}
    assert changed_settings(URLS, loose) == {}
    assert loosened(URLS, loose) == ("allow_s3", "opt_outs", "robots", "max_bytes")
    assert changed_settings(loose, URLS) == {
        "allow_s3": (True, None),
        "max_bytes": (60, 50),
        "opt_outs": (False, True),
        "robots": (False, True),
    }
    assert loosened(loose, URLS) == ()
    assert allowed_more(["robots"]) == {"allowed_more:robots": 1}


@pytest.mark.parametrize(
    "value",
    [(9, 18, 27), {"layers": (1, (2, 3))}, [(1.0, 2)], {1: "a"}, float("nan"), [float("nan"), ()]],
)
def test_settings_that_a_file_has_given_back_are_the_same(value: Any) -> None:
    new = {"a": 1, "value": value}
    old = as_json(new)
    assert changed_settings(old, new) == changed_settings(new, old) == {}
    assert is_same(old, new)
    for one, other in ((old, new), (new, old)):
        assert changed_settings({**one, "a": 2}, other) == {"a": (2, 1)}


def test_a_receipt_is_found_by_settings_that_hold_a_tuple(tmp_path: Path) -> None:
    settings = {"buckets": [64], "value": (9, (18, 27))}
    receipt = receipt_of_images(settings=settings, input="i")
    store = open_store(str(tmp_path))
    write_bytes(store, receipt_name("000000"), receipt.to_bytes())
    found = find_receipt(store, "000000", "i", settings)
    assert found is not None
    with pytest.raises(FingerprintError, match="made with other settings"):
        find_receipt(store, "000000", "i", {**settings, "value": (9,)})


def said(old: dict[str, Any], new: dict[str, Any]) -> str:
    return say_changes(changed_settings(old, new))


def test_each_setting_that_differs_is_named_with_both_values() -> None:
    old = {"buckets": [256, 512], "check": "full", "filter": "a > 3", "flip": True, "seed": 0}
    new = {"buckets": (512,), "check": "full", "filter": "", "max_side": 9, "seed": 1}
    assert said(old, new) == (
        "buckets: 256,512, now 512; filter: 'a > 3', now ''; flip: yes, now none; "
        "max-side: none, now 9; seed: 0, now 1"
    )
    assert say_changes(changed_settings({"seed": 1}, {"seed": 2}), " and ") == "seed: 1 and 2"


def test_values_that_nobody_can_read_are_not_shown() -> None:
    layout: list[dict[str, Any]] = [{"name": "latent.npy", "shape": [4, 8, 8]}]
    old = {"layout": layout, "shapes": [[8, 8]], "weights": "ab" * 32}
    larger = [{**layout[0], "shape": [4, 16, 16]}]
    new = {"layout": larger, "of": "cd" * 32, "seed": 1, "shapes": [[8, 16]], "weights": "cd" * 32}
    assert said(old, new) == (
        "layout: other; the datasets to select from: other; seed: none, now 1; shapes: other; "
        "the weights of the model: other"
    )
    more = [*layout, {"name": "mask.npy"}]
    assert said({"layout": more}, {"layout": larger}) == (
        "layout: latent.npy,mask.npy, now latent.npy"
    )


def test_another_kind_of_source_is_all_that_is_said() -> None:
    assert said({"source": "folder"}, URLS) == "source: folder, now urls"


def test_settings_within_settings_are_compared_by_their_names() -> None:
    old = {"columns": {"latent": "z", "emb": "t5"}, "text_arguments": {"max_length": 20}}
    new = {"columns": {"latent": "y", "emb": "t5"}, "scores": {"columns": {"a": "number"}}}
    assert said(old, new) == (
        "columns.latent: z, now y; scores.columns.a: none, now number; "
        "text-arguments.max-length: 20, now none"
    )


# --- what no dataset can have


NO_OBJECTS = [b"", b"{", b"[" * 200_000, b"\xff", b'{"x":NaN}', b'{"x":1e999}', b"1"]


@pytest.mark.parametrize("data", [*NO_OBJECTS, b'{"x":' + b"9" * 9999])
def test_what_is_no_object_of_json_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^the file is damaged: .{1,200}$"):
        read_record(dict[str, Any], data, "the file")


def test_a_value_is_shown_in_few_characters() -> None:
    for value in ("\x1b" * 1_000_000, [[0] * 1000] * 1000, 10**4000, {"a": "b" * 10**6}):
        with pytest.raises(FormatError) as refused:
            check_record(Annotated[str, value_rule("short", lambda v: not v)], value, "the file")
        assert len(str(refused.value)) < 400


def changes() -> list[dict[str, Any]]:
    shard = {"name": "256/000000.tar", "samples": 3, "nbytes": 10_240, "blake3": DIGEST}
    names = ("../../x.tar", "/256/000000.tar", "256/000001.tar", "x/000000.tar", "", 1, None)
    shards: list[dict[str, Any]] = [{"name": name} for name in names]
    shards += [{"samples": value} for value in (-1, 1.5, "3", True, 10**18, 21)]
    shards += [{"nbytes": value} for value in (-1, None, 10**30, 100)]
    shards += [{"blake3": value} for value in ("", "xy", "../..", 5)]
    found: list[dict[str, Any]] = [{"shards": [shard | each]} for each in shards]
    found += [{"shards": value} for value in (None, {}, "x", [None], [[]], [{}])]
    found += [{"unit": value} for value in ("", "x", "../000000", "0", 0, None, "9" * 5000)]
    found += [{"inputs": value} for value in (10**18, -1, "5", None, 5.0, True, [5])]
    found += [{"generation": value} for value in (-1, "0", None)]
    found += [{"input": value} for value in (None, 5, "x:y", f"{DIGEST}:x", f"{DIGEST}:{10**12}")]
    found += [{"rejects": value} for value in (None, [], {"a": "b"}, {"a": -1}, {"a": 10**18})]
    found += [{"counts": value} for value in (5, {"side<x": 1}, {"side<": 1}, {"side<512": None})]
    found += [{"files": value} for value in (None, {"a": 1}, ["a"])]
    return found


@pytest.mark.parametrize("changed", changes(), ids=str)
def test_a_sealed_receipt_and_manifest_of_what_cannot_be_are_refused(
    changed: dict[str, Any],
) -> None:
    data = resealed(receipt().to_bytes(), lambda body: body.update(changed))
    with pytest.raises(FormatError, match=r"^the file is damaged: .{1,300}$"):
        Receipt.from_bytes(data, "the file")
    written = Manifest(dataset="images", settings=SETTINGS, receipts=(receipt(),)).to_bytes()
    data = resealed(written, lambda body: body["units"][0].update(changed))
    what = "images/wdsprep.json"
    for end in (data, data.replace(b'"units"', b'"zzzz":0,"units"')):  # with lines, and without
        with pytest.raises(FormatError, match=r"^images/wdsprep\.json is damaged: .{1,400}$"):
            Manifest.from_bytes(sealed(unsealed(end)), what).ledger.check()


def test_one_of_many_units_is_named_with_what_makes_the_manifest_again() -> None:
    units = [receipt(f"{n:06d}") for n in range(1000)]
    written = Manifest(dataset="images", settings=SETTINGS, receipts=units).to_bytes()
    data = resealed(written, lambda body: body["units"][700].update(inputs="x"))
    opened = Manifest.from_bytes(data, "images/wdsprep.json")
    assert len(opened.shards) == 2000
    said = r"inputs of unit '000700': it is 'x', not a whole number: run \"wdsprep rebuild images\""
    with pytest.raises(FormatError, match=said):
        _ = opened.inputs


LAYOUT = [{"dtype": "<f2", "name": "latent.npy", "offset": 640, "shape": [4, 8, 8]}]
LATENTS = {"layout": LAYOUT, "resolution": 64, "latents": "sample", "text": "none"}


@pytest.mark.parametrize(
    ("dataset", "changed"),
    [
        *(("images", {"buckets": value}) for value in ([], [2, 1], ["x"], [0], None, 5)),
        ("images", {"max_area": "x"}),
        ("images", {"scores": {"columns": "x"}}),
        ("latents", {"layout": []}),
        ("latents", {"layout": [LAYOUT[0] | {"shape": [4, 8, 10**9]}]}),
        ("latents", {"layout": [LAYOUT[0] | {"shape": [4, 8, -8]}]}),
        ("latents", {"layout": [LAYOUT[0] | {"dtype": "object"}]}),
        ("latents", {"layout": [LAYOUT[0] | {"name": "../x.npy"}]}),
        ("latents", {"scale": [1.0, 2.0]}),
        ("latents", {"shift": "1"}),
        ("latents", {"patch": 0}),
        ("latents", {"upscale": 0}),
        ("latents", {"upscale": 1e300}),
        ("latents", {"captions": "../../x"}),
        ("latents", {"shapes": [[64, 64], [64, 0]]}),
        ("latents", {"shapes": [[64, 65]]}),
        ("latents", {"shapes": [64]}),
        ("latents", {"resolution": 0}),
    ],
)
def test_settings_that_cannot_be_are_refused(dataset: str, changed: dict[str, Any]) -> None:
    sound: dict[str, Any] = SETTINGS if dataset == "images" else LATENTS
    checked_settings(dataset, sound | {"newer": {}}, "the file")
    with pytest.raises(FormatError, match=r"^the file is damaged: "):
        checked_settings(dataset, sound | changed, "the file")


def test_a_setting_that_is_asked_for_and_missing_is_damage() -> None:
    with pytest.raises(FormatError, match="the file is damaged: it says no dtype"):
        _ = checked_settings("latents", LATENTS, "the file")["dtype"]


@pytest.mark.parametrize("line", [b"5", b"{}", b'{"code":"x","detail":"","key":"a","source":""}'])
def test_a_line_that_is_no_reject_is_refused(line: bytes) -> None:
    with pytest.raises(FormatError, match=r"^rejects is damaged: "):
        read_rejects(line, "rejects")


def test_a_list_of_what_was_removed_keeps_folders_that_are_no_utf8() -> None:
    removed = Removed(marks=Marks(), images="/a\udcff")
    assert Removed.from_bytes(removed.to_bytes(), "r") == removed
