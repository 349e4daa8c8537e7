"""What differs between two settings is said in the words of the options, and shortly."""

from pathlib import Path
from typing import Any

import pytest

from wdsprep.dataset.digests import FORM
from wdsprep.dataset.names import receipt_name
from wdsprep.dataset.receipts import Receipt
from wdsprep.dataset.settings import allowed_more, as_json, changed_options, is_same, loosened
from wdsprep.dataset.state import find_receipt
from wdsprep.errors import FingerprintError
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes

URLS: dict[str, Any] = {"source": "urls", "max_bytes": 50, "opt_outs": True, "robots": True}


def test_what_differs_is_named_by_its_option_with_both_values() -> None:
    old = {"buckets": [256, 512], "check": "full", "filter": "a > 3", "source": "folder"}
    new = {**old, "buckets": [512], "compute_hash": "md5", "filter": ""}
    assert changed_options(old, new) == [
        "--buckets 512 (was 256,512)",
        "--compute-hash md5 (was not given)",
        "no --filter (was 'a > 3')",
    ]


def test_an_option_without_a_value_is_named_as_it_is_typed() -> None:
    assert changed_options({}, {"flip": True}) == ["--flip (was not given)"]
    assert changed_options({"flip": True}, {}) == ["no --flip (was given)"]


def test_a_source_of_another_kind_is_all_that_is_told_of() -> None:
    assert changed_options({"source": "folder"}, URLS) == [
        "the source holds tables of URLs (was images)"
    ]


def test_another_model_is_one_difference_without_hashes_and_what_follows_from_it() -> None:
    old = {"layout": [{"name": "latent.npy"}], "scale": 1.0, "text": "emb", "weights": "ab" * 32}
    new = {"layout": [], "scale": 0.5, "text": "none", "weights": "cd" * 32}
    assert changed_options(old, new) == ["--text none (was emb)"]
    assert changed_options(old, {**new, "text": "emb"}) == [
        "--model has other weights than those it was made with"
    ]
    assert changed_options(old, {**old, "scale": 0.5}) == ["another scale"]
    short = {**old, "template": "ab", "text_arguments": {"max_sequence_length": 20}}
    assert changed_options(short, {**short, "template": "cd", "text_arguments": {}}) == [
        "--text-length or diffusers gives encode_prompt {} (was {'max_sequence_length': 20})"
    ]


def test_what_may_be_fetched_can_be_loosened_and_never_tightened() -> None:
    loose = {**URLS, "allow_s3": True, "max_bytes": 60, "opt_outs": False, "robots": False}
    assert changed_options(URLS, loose) == []
    assert set(loosened(URLS, loose)) == {"allow_s3", "max_bytes", "opt_outs", "robots"}
    assert changed_options(loose, URLS) == [
        "no --allow-s3 (was given)",
        "--max-bytes 50 (was 60)",
        "no --ignore-opt-outs (was given)",
        "no --ignore-robots (was given)",
    ]
    assert loosened(loose, URLS) == ()
    assert allowed_more(["robots"]) == {"allowed_more:robots": 1}


def test_of_other_sources_the_size_of_an_image_decides_as_before() -> None:
    assert changed_options({"source": "tars"}, {"source": "tars", "max_bytes": 9}) == [
        "--max-bytes 9 (was not given)"
    ]


@pytest.mark.parametrize(
    "value",
    [(9, 18, 27), {"layers": (1, (2, 3))}, [(1.0, 2)], {1: "a"}, float("nan"), [float("nan"), ()]],
)
def test_settings_that_a_file_has_given_back_are_the_same(value: Any) -> None:
    new = {"a": 1, "value": value}
    old = as_json(new)
    assert changed_options(old, new) == changed_options(new, old) == []
    assert is_same(old, new)
    for one, other in ((old, new), (new, old)):
        assert [*map(len, changed_options({**one, "a": 2}, other))] == [len("--a 1 (was 2)")]


def test_values_that_differ_in_a_file_are_told_of() -> None:
    for old, new in (((9, 18), (9, 27)), (float("nan"), 1.0), (None, ()), ({"a": (1,)}, {"a": 1})):
        assert len(changed_options({"value": old}, {"value": new})) == 1
        assert not is_same(old, new)


def test_a_receipt_is_found_by_settings_that_hold_a_tuple(tmp_path: Path) -> None:
    settings = {**FORM, "buckets": [64], "value": (9, (18, 27))}
    receipt = Receipt(
        dataset="images", unit="000000", generation=0, settings=settings, input="i", inputs=0,
        shards=(), rejects={},
    )  # fmt: skip
    store = open_store(str(tmp_path))
    write_bytes(store, receipt_name("000000"), receipt.to_bytes())
    found = find_receipt(store, "000000", "i", settings)
    assert found is not None
    with pytest.raises(FingerprintError, match="made with other settings"):
        find_receipt(store, "000000", "i", {**settings, "value": (9,)})
