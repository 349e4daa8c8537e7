"""Which settings differ, as a file of a dataset has them."""

from pathlib import Path
from typing import Any

import pytest

from wdsprep.dataset.file_names import receipt_name
from wdsprep.dataset.receipts import Receipt
from wdsprep.dataset.settings import (
    allowed_more,
    as_json,
    changed_settings,
    is_same,
    loosened,
    say_changes,
)
from wdsprep.dataset.stored_dataset import find_receipt
from wdsprep.errors import FingerprintError
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes

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
    old = {"layout": [{"name": "latent.npy"}], "shapes": [[8, 8]], "weights": "ab" * 32}
    new = {"layout": [], "of": "cd" * 32, "seed": 1, "shapes": [[8, 16]], "weights": "cd" * 32}
    assert said(old, new) == (
        "seed: none, now 1; layout: other; the datasets to select from: other; shapes: other; "
        "the weights of the model: other"
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


def test_of_very_many_changes_some_are_named() -> None:
    words = say_changes({f"a{number}": (0, 1) for number in range(20)})
    assert words == f"{'; '.join(f'a{n}: 0, now 1' for n in range(8))}; and 12 more"
