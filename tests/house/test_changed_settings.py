"""What has changed in a dataset's settings is said in the words of the options that are given."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from wdsprep.changed_settings import say_both, say_changes, words_of
from wdsprep.changes.options import SelectOptions
from wdsprep.dataset.settings import changed_settings
from wdsprep.encoding.models.find_model import find_model
from wdsprep.encoding.options import Encode, EncodeOptions
from wdsprep.encoding.recipe_defaults import settings_of as encode_settings
from wdsprep.encoding.recipe_defaults import settle_recipe
from wdsprep.errors import FingerprintError, OtherSettingsError
from wdsprep.importing.options import ImportOptions
from wdsprep.options import options_of, takes_options
from wdsprep.packing.options import PackOptions
from wdsprep.packing.options import settings_of as pack_settings
from wdsprep.scoring.options import ScoreOptions

URLS: dict[str, Any] = {"source": "urls", "max_bytes": 50, "opt_outs": True, "robots": True}


def said(options: Callable[..., Any], old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return say_changes(changed_settings(old, new), words_of(options_of(options)))


def test_what_differs_is_named_by_its_option_with_both_values() -> None:
    old = {"buckets": [256, 512], "check": "full", "filter": "a > 3", "source": "folder"}
    new = {**old, "buckets": [512], "compute_hash": "md5", "filter": ""}
    assert said(PackOptions, old, new) == [
        "--buckets 512 (was 256,512)",
        "--compute-hash md5 (was not given)",
        "no --filter (was 'a > 3')",
    ]


def test_a_precision_that_no_option_names_is_said_to_follow_from_the_device() -> None:
    assert said(EncodeOptions, {"dtype": "half+tf32"}, {"dtype": "fp32"}) == [
        "--dtype, or auto on this device, is fp32 (was half+tf32)"
    ]


def test_an_option_without_a_value_is_named_as_it_is_typed() -> None:
    assert said(EncodeOptions, {}, {"flip": True}) == ["--flip (was not given)"]
    assert said(EncodeOptions, {"flip": True}, {}) == ["no --flip (was given)"]


def test_options_of_calls_in_python_are_named_as_python_has_them() -> None:
    class Call(Encode):
        is_command = False

    assert said(Call, {"seed": 0}, {"seed": 1}) == ["seed 1 (was 0)"]


def test_a_setting_without_an_option_is_named_as_the_dataset_has_it() -> None:
    """So it is with commands that did not make the dataset."""
    assert said(PackOptions, {"dedupe": True, "grid": 4}, {}) == [
        "no dedupe (was given)",
        "no grid (was 4)",
    ]
    old = {"layout": [{"name": "latent.npy"}], "seed": 0, "weights": "ab" * 32}
    new = {"layout": [], "seed": 1, "weights": "cd" * 32}
    assert said(ScoreOptions, old, new) == ["other layout", "seed 1 (was 0)", "other weights"]


def test_two_datasets_are_told_apart_by_what_people_can_read() -> None:
    old = {"layout": [{"name": "latent.npy"}], "resolution": 256, "weights": "ab" * 32}
    new = {"layout": [], "flip": True, "resolution": 512, "weights": "cd" * 32}
    assert say_both(changed_settings(old, new)) == ["flip none and True", "resolution 256 and 512"]
    assert say_both(changed_settings(old, {**old, "weights": "cd" * 32})) == ["other weights"]


def test_a_source_of_another_kind_is_all_that_is_told_of() -> None:
    assert said(PackOptions, {"source": "folder"}, URLS) == [
        "the source holds tables of URLs (was images)"
    ]
    assert said(EncodeOptions, {"source": "mds", "text": "emb"}, {"text": "none"}) == [
        "it was imported, not encoded"
    ]
    assert said(ImportOptions, {"text": "emb"}, {"source": "mds"}) == [
        "it was encoded, not imported"
    ]
    assert said(ImportOptions, {"source": "tars"}, {"source": "mds"}) == [
        "the cache is of mds (was of tars)"
    ]


def test_another_model_is_one_difference_without_hashes_and_what_follows_from_it() -> None:
    old = {"layout": [{"name": "latent.npy"}], "scale": 1.0, "text": "emb", "weights": "ab" * 32}
    new = {"layout": [], "scale": 0.5, "text": "none", "weights": "cd" * 32}
    assert said(EncodeOptions, old, new) == ["--text none (was emb)"]
    assert said(EncodeOptions, old, {**new, "text": "emb"}) == [
        "--model has other weights than those it was made with"
    ]
    assert said(EncodeOptions, old, {**old, "scale": 0.5}) == ["other scale"]
    short = {**old, "template": "ab", "text_arguments": {"max_sequence_length": 20}}
    assert said(EncodeOptions, short, {**short, "template": "cd", "text_arguments": {}}) == [
        "--text-length or diffusers gives encode_prompt {} (was {'max_sequence_length': 20})"
    ]
    assert said(EncodeOptions, short, {**short, "template": "cd"}) == [
        "the diffusers here puts other words around a caption, or cleans it otherwise"
    ]
    assert said(EncodeOptions, short, {**short, "pipeline": "FluxPipeline", "template": "cd"}) == [
        "--model is a FluxPipeline (was none whose code is run)"
    ]


def test_what_is_fetched_less_is_said_by_the_options_that_allow_it() -> None:
    loose = {**URLS, "allow_s3": True, "max_bytes": 60, "opt_outs": False, "robots": False}
    assert said(PackOptions, loose, URLS) == [
        "no --allow-s3 (was given)",
        "--max-bytes 50 (was 60)",
        "no --ignore-opt-outs (was given)",
        "no --ignore-robots (was given)",
    ]


def test_settings_whose_values_say_nothing_have_words_of_their_own() -> None:
    assert said(
        EncodeOptions, {"decode": "full"}, {"decode": "fast", "shapes": [[8, 8], [8, 16]]}
    ) == [
        "--decode fast (was full)",
        "--shapes are 2 (8x8, 8x16) (were not given)",
    ]
    assert said(EncodeOptions, {"captions": "ab"}, {"captions": "cd"}) == [
        "--captions says other captions than those it was made with"
    ]
    assert said(ImportOptions, {"columns": {"latent": "z"}}, {"columns": {"latent": "y"}}) == [
        "--columns latent=y (was latent=z)"
    ]
    assert said(SelectOptions, {"of": "ab", "part": "a"}, {"of": "cd", "part": "b"}) == [
        "the datasets that samples are selected from are others, or have changed",
        "another part of --split",
    ]


def test_of_scores_the_columns_are_said_or_what_made_them() -> None:
    model = {"columns": ["a"], "processor": "fast", "weights": "ab" * 32}
    old = {"columns": {"a": "number"}, "language": "", "models": [model]}
    for changes, words in (
        ({"columns": {"b": "number"}}, "the columns are b (were a)"),
        ({"language": "x 1"}, "languages are told by x 1 (were by nothing)"),
        ({"models": [{**model, "weights": "cd" * 32}]}, "--model has other weights"),
        ({"models": [{**model, "processor": "slow"}]}, "--model has the processor slow"),
        ({"models": [model, model]}, "other models"),
    ):
        assert said(ScoreOptions, {"scores": old}, {"scores": {**old, **changes}}) == [words]
    assert said(ScoreOptions, {}, {"scores": old}) == ["it holds no scores"]
    assert said(EncodeOptions, {"scores": old}, {"seed": 1}) == ["it holds scores"]


def test_every_setting_of_pack_and_encode_has_words_of_an_option() -> None:
    urls = PackOptions(
        allow_s3=True,
        compute_hash="md5",
        verify_hash="md5",
        save_additional_columns="a",
    )
    packed = {*pack_settings(urls, "urls"), *pack_settings(urls, "folder")}
    assert packed - words_of(options_of(PackOptions)).keys() == set()
    how = Encode(
        resolution=64,
        model="tiny",
        flip=True,
        shapes=((64, 64), (32, 128)),
        max_crop=0.5,
        max_area=9,
        max_bytes=9,
        decode="fast",
    )
    recipe, model = settle_recipe(how, find_model("tiny", text="emb"), "cpu")
    encoded = {*encode_settings(model, recipe), "pipeline", "template", "text_arguments", "layers"}
    assert encoded - words_of(options_of(EncodeOptions)).keys() == {"crop"}


def test_the_call_that_meets_another_dataset_says_it_and_so_does_what_travels() -> None:
    changes = {"min_size": (0, 65), "gone": (1, None)}
    error = OtherSettingsError("a was made with other settings: ", changes, ["plain"], ": run")
    assert str(error) == "a was made with other settings: plain: run"
    travelled = pickle.loads(pickle.dumps(error.with_next_step("stop")))
    assert (str(travelled), travelled.changes) == (str(error), changes)

    @takes_options(PackOptions)
    def pack(_options: PackOptions) -> None:
        raise travelled

    words = "--min-size 65 (was 0); no gone (was 1)"
    with pytest.raises(FingerprintError) as caught:
        pack()
    assert str(caught.value) == f"a was made with other settings: {words}: run: stop"


def test_of_very_many_changes_some_are_said() -> None:
    changes = {f"a{number}": (0, 1) for number in range(20)}
    error = OtherSettingsError("<", changes, [*changes], ">")
    assert str(error) == f"<{'; '.join([*changes][:8])}; and 12 more>"
