"""A sealed file that says what no dataset can have is that file's one line."""

from typing import Annotated, Any

import pytest

from tests.kit.sealed_files import receipt_of_images, resealed, sealed, unsealed
from wdsprep.dataset.manifest import Manifest, Receipt, Shard
from wdsprep.dataset.rejects import read_rejects
from wdsprep.dataset.removed_samples import Marks, Removed
from wdsprep.dataset.sealed_json import check_record, read_record, value_rule
from wdsprep.dataset.settings import checked_settings
from wdsprep.errors import FormatError

SETTINGS = {"buckets": [256, 512], "max_area": 10**8, "source": "folder"}
DIGEST = "ab" * 32


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


def receipt(**changed: Any) -> Receipt:
    shard = Shard("256/000000.tar", 3, 10_240, DIGEST)
    said = {"settings": SETTINGS, "input": DIGEST, "inputs": 5, "shards": (shard,)}
    said |= {"rejects": {"too_small": 2}, "counts": {"side<512": 3}}
    files = {"rejects/000000.jsonl": DIGEST}
    return receipt_of_images(**(said | {"files": files} | changed))


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
    units = [
        receipt(unit=f"{n:06d}", shards=(Shard(f"256/{n:06d}.tar", 3, 10_240, DIGEST),))
        for n in range(1000)
    ]
    written = Manifest(dataset="images", settings=SETTINGS, receipts=units).to_bytes()
    data = resealed(written, lambda body: body["units"][700].update(inputs="x"))
    opened = Manifest.from_bytes(data, "images/wdsprep.json")
    assert len(opened.shards) == 1000
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
