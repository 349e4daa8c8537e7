"""Captions that are picked by chance: proportions, one choice for all worlds and after a resume."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import wdsprep
from tests.kit.joined_sets import LATENTS, VARIED, Images, caption, write_part
from tests.kit.latent_sets import array_of, field, flat
from tests.kit.packs import jpeg, tar_bytes, write_files
from wdsprep.dataset.reindex import index
from wdsprep.errors import FingerprintError, NotFoundError, UsageError
from wdsprep.sources.captions import caption_at

BATCH = 8
IMAGES = Images()
WEIGHTS = {"caption": 0.2, "long": 0.5, "alt": 0.3}
FIELDS = ("latent", "pooled", "emb", "emb_mask", "txt", "json", "key")


def load(url: Any, **options: Any) -> Any:
    return wdsprep.load(url, **({"global_batch": BATCH, "rank": 0, "world_size": 1} | options))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Latents with captions of their own, and two datasets of others; one lacks some."""
    folder = tmp_path_factory.mktemp("captions")
    own = write_part(str(folder / "own"), IMAGES, (*LATENTS, *VARIED), tag="own")
    long, alt = (
        write_part(
            str(folder / name),
            IMAGES,
            VARIED,
            tag=name,
            more={"caption_name": name},
            rejects={1: (4, 9)} if name == "alt" else {},
        )
        for name in ("long", "alt")
    )
    return own, long, alt


def tag_of(text: str) -> str:
    return text.partition(" ")[0]


def tags(batches: Any) -> list[str]:
    return [tag_of(text) for batch in batches for text in batch["txt"]]


def assert_made_of(tag: str, batch: dict[str, Any], row: int) -> None:
    """The latent is that of the key, and all that is made of a caption is of the one tagged so."""
    key = batch["key"][row]
    assert np.array_equal(batch["latent"][row].numpy(), array_of(key, LATENTS[0]))
    assert np.array_equal(batch["pooled"][row].numpy(), array_of(key + tag, VARIED[0]))
    wanted = array_of(key + tag, VARIED[1])
    found = batch["emb"][row].view(torch.int16).numpy().view("<u2")
    assert np.array_equal(found[: len(wanted)], wanted)
    assert not found[len(wanted) :].any()
    assert batch["emb_mask"][row].sum() == len(wanted)


def test_each_sample_has_one_caption_with_all_that_is_made_of_it(
    parts: tuple[str, str, str],
) -> None:
    own, *others = parts
    seen: Counter[str] = Counter()
    for batch in load(own, join=others, captions=WEIGHTS, fields=FIELDS, epochs=2):
        for row, key in enumerate(batch["key"]):
            seen[tag := tag_of(batch["txt"][row])] += 1
            assert batch["json"][row]["caption"] == batch["txt"][row] == caption(key, tag)
            assert_made_of(tag, batch, row)
    total = seen.total()
    for name, weight in WEIGHTS.items():
        share = seen["own" if name == "caption" else name] / total
        assert abs(share - weight) < 4 * (weight * (1 - weight) / total) ** 0.5


def test_a_dropped_caption_is_the_empty_one_of_the_part_that_was_picked(
    parts: tuple[str, str, str],
) -> None:
    """Its arrays say of which part they are."""
    own, *others = parts
    options = {"join": others, "captions": WEIGHTS, "fields": ("pooled", "txt", "key")}
    kept = load(own, **options)
    dropped = 0
    for batch, whole in zip(load(own, drop_text=0.4, **options), kept, strict=True):
        for row, text in enumerate(batch["txt"]):
            if not text:
                dropped += 1
                assert batch["pooled"][row].tolist() == [9.0 + len(tag_of(whole["txt"][row]))] * 6
            else:
                assert text == whole["txt"][row]
    assert dropped > 60


@pytest.fixture(scope="module")
def of_images(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Latents whose text depends on images, and the empty caption of each sample but two."""
    folder = tmp_path_factory.mktemp("empties")
    roles = {"text_roles": ["source"]}
    own = Path(write_part(str(folder / "own"), IMAGES, (*LATENTS, *VARIED), tag="own", more=roles))
    for path in own.glob("empty.*"):
        path.unlink()
    more = {**roles, "caption_name": "empty"}
    return str(own), write_part(
        str(folder / "empty"), IMAGES, VARIED, tag="empty", more=more, rejects={1: (4, 9)}
    )


@pytest.mark.parametrize("captions", [None, {"caption": 3, "long": 1}])
def test_a_dropped_caption_is_the_empty_one_of_that_sample(
    captions: Any, of_images: tuple[str, str], parts: tuple[str, str, str]
) -> None:
    """The same samples lose theirs as where one empty caption is there for all."""
    own, empty = of_images
    options = {"captions": captions, "fields": FIELDS}
    more = [parts[1]] * bool(captions)
    whole = [*load(own, join=[empty, *more], **options)]
    assert not {"empty", ""} & {*tags(whole)}
    found = [*load(own, join=[empty, *more], drop_text=0.4, **options)]
    others = load(parts[0], join=[parts[2], *more], captions=captions or {"caption": 1},
                  drop_text=0.4, fields=FIELDS)  # fmt: skip
    dropped = 0
    for batch, kept, other in zip(found, whole, others, strict=True):
        assert batch["key"] == kept["key"] == other["key"]
        for row, text in enumerate(batch["txt"]):
            assert (text == "") is (other["txt"][row] == "")
            assert text == batch["json"][row]["caption"]
            assert_made_of(tag_of(text) or "empty", batch, row)
            dropped += not text
            assert text in ("", kept["txt"][row])
    assert dropped > 80
    first = load(own, join=[empty, *more], drop_text=0.4, **options)
    with pytest.raises(FingerprintError):
        load(own, join=more, **options).load_state_dict(first.state_dict())


def test_empty_captions_of_samples_stand_beside_one_for_all(
    of_images: tuple[str, str], parts: tuple[str, str, str]
) -> None:
    own, empty = of_images
    with pytest.raises(NotFoundError, match="images of each sample, join the text dataset that"):
        load(own, drop_text=0.5)
    assert {*tags(load(empty, fields="txt"))} <= {"empty", ""}  # alone it is a dataset as others
    assert {*tags(load(own, join=empty, captions={"empty": 1}, fields="txt"))} <= {"empty", ""}
    with pytest.raises(UsageError, match="join the text dataset that was made with --empty per-"):
        load(own, captions={"empty": 1})
    seen: Counter[bool] = Counter()
    for batch in load(
        [wdsprep.Stream(own, join=empty), wdsprep.Stream(parts[0])],
        drop_text=0.5, fields=("pooled", "txt", "key"),
    ):  # fmt: skip
        for row, text in enumerate(batch["txt"]):
            if not text:
                values = batch["pooled"][row]
                is_of_sample = np.array_equal(
                    values.numpy(), array_of(batch["key"][row] + "empty", VARIED[0])
                )
                assert is_of_sample or values.tolist() == [12.0] * 6
                seen[is_of_sample] += 1
    assert min(seen[False], seen[True]) > 20


def test_texts_of_the_json_are_picked_where_no_arrays_are_made_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = []
    for number in range(20):
        facts: dict[str, Any] = {"caption": f"own {number}", "meta": {"alt": f"alt {number}"}}
        if number % 2:
            facts["captions"] = [f"own {number}", f"second {number}"]
        name = f"{number:02d}"
        parts += [(f"{name}.jpg", jpeg(number)), (f"{name}.json", json.dumps(facts).encode())]
        parts.append((f"{name}.txt", f"own {number}".encode()))
    dict(index(str(write_files(tmp_path, {"0.tar": tar_bytes(parts)}))))
    url, options = str(tmp_path), {"fields": ("txt", "json"), "pixels": 32}
    weights = {"caption": 1, "alt": 1, "captions[1]": 2}
    seen: Counter[str] = Counter()
    for batch in load(url, captions=weights, epochs=20, global_batch=4, **options):
        for text, facts in zip(batch["txt"], batch["json"], strict=True):
            kind, number = text.split()
            assert text in (facts["caption"], facts["meta"]["alt"], *facts.get("captions", ()))
            seen[kind, int(number) % 2] += 1
    assert set(seen) == {("own", 0), ("alt", 0), ("own", 1), ("alt", 1), ("second", 1)}
    assert abs(seen["second", 1] / 200 - 0.5) < 0.15
    assert abs(seen["own", 0] / 200 - 0.75) < 0.15
    with patch("wdsprep.loading.batch_reader.MANY", 10):
        list(load(url, captions={"meta.typo": 1, "alt": 1}, epochs=2, **options))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has a text at meta.typo in its json" in line
    assert 'ask for "txt"' in refused(url, weights, pixels=32, fields="key")


def test_a_caption_out_of_the_json_is_the_one_that_encode_takes() -> None:
    """Without white space around it, the first of several; a blank one is none."""
    values: list[Any] = ["  a car\n", "\u3000\u96ea\u3000", 7, 0.5, ["", " one ", "2"], [3, "x"]]
    nothing: list[Any] = [" \t", "", [], True, None, {"x": "y"}]
    served = [caption_at({"meta": {"long": value}}, "long") for value in (*values, *nothing)]
    assert served == ["a car", "\u96ea", "7", "0.5", "one", "x", *[None] * 6]


# What cannot be


def refused(url: str, captions: Any, *join: str, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(url, join=join, captions=captions, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_captions_that_cannot_be_picked(parts: tuple[str, str, str], tmp_path: Path) -> None:
    own, long, alt = parts
    for wrong in ({"caption": 2, "long": -1}, {"caption": 0}, ["long"], {1: 1}):
        assert "give weights by name, 0 or more and not all 0" in refused(own, wrong, long)
    assert "have caption, long; join the text dataset" in refused(own, {"alt": 1}, long)
    assert "leave out" in refused(own, {"long": 1}, long, raw=True)
    twice = write_part(str(tmp_path / "b"), IMAGES, VARIED, more={"caption_name": "long"})
    assert "both have pooled, emb" in refused(own, {"long": 1}, long, twice)
    assert "both have pooled, emb" in refused(own, None, long, alt)
    fields = (VARIED[0], field("emb", (9, 16), "bfloat16", is_variable=True))
    longer = write_part(str(tmp_path / "c"), IMAGES, fields, more={"caption_name": "c"})
    assert "were encoded alike" in refused(own, {"long": 1, "c": 1}, long, longer)
    options = {"fields": ("pooled", "txt"), "captions": {"long": 1, "c": 1}}
    assert {*tags(load(own, join=[long, longer], **options))} == {"long", ""}
    bare = write_part(str(tmp_path / "bare"), IMAGES, LATENTS)
    assert "join text datasets made with" in refused(bare, {"meta.alt": 1})


def test_a_state_of_other_weights_is_refused(parts: tuple[str, str, str]) -> None:
    own, long, _ = parts
    state = load(own, join=long, captions={"caption": 1, "long": 3}).state_dict()
    load(own, join=long, captions={"long": 3, "caption": 1}).load_state_dict(state)
    other = load(own, join=long, captions={"caption": 1, "long": 2})
    with pytest.raises(FingerprintError, match=r"captions: caption 0\.25, long 0\.75 -> "):
        other.load_state_dict(state)
    load(own, join=long, captions={"caption": 0.5e308, "long": 1.5e308}).load_state_dict(state)


def test_shards_that_one_of_the_captions_lacks_are_missed_by_its_rows_alone(
    parts: tuple[str, str, str], tmp_path: Path
) -> None:
    """So that what a rank has seen missing changes nothing."""
    own, long, alt = (
        parts[0],
        *(shutil.copytree(url, tmp_path / Path(url).name) for url in parts[1:]),
    )
    for tar in (long / "256/000003.tar", alt / "256/000000.tar", alt / "256/000002.tar"):
        tar.unlink()
    options: Any = {
        "join": [str(long), str(alt)],
        "captions": {"long": 1, "alt": 1},
        "fields": ("key", "txt"),
        "skip_missing": True,
    }
    whole = list(load(own, **options))
    ranks = [load(own, rank=rank, world_size=4, **options) for rank in range(4)]
    for batch, *some in zip(whole, *ranks, strict=True):
        assert batch["key"] == flat(part["key"] for part in some)
        assert batch["txt"] == flat(part["txt"] for part in some)
    assert list(load(own, step=20, **options)) == whole[20:]
