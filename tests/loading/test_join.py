"""Datasets of the same images, joined: the batches of one dataset that has it all."""

import contextlib
import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq

import wdsprep
from tests.kit.batches import assert_same, damage
from tests.kit.encode_work import Making
from tests.kit.encodes import encode_here, packed, pictures
from tests.kit.joined_sets import LATENTS, TEXT, VARIED, Images, caption, write_part
from tests.kit.latent_sets import array_of, field, flat, keys
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.sample_table import LATENT_COLUMNS, TableWriter
from wdsprep.encoding.on_the_fly.encode_steps import BatchEncoder, StepBegun
from wdsprep.errors import FingerprintError, FormatError, NotFoundError, UsageError
from wdsprep.loading.join import join_datasets, read_positions
from wdsprep.loading.open_datasets import open_stream
from wdsprep.loading.options import Stream
from wdsprep.tables import stored_tables

BATCH, SIZE = 8, 20
IMAGES = Images(sizes=(SIZE,) * 5)
SHAPED = Images(shapes=((48, 80), (64, 64), (80, 48)), sizes=(40, 33, 50))
ALL = ("latent", "pooled", "emb", "emb_mask", "txt", "json", "key")
USUAL = ["pooled", "emb", "latent", "emb_mask", "key"]
LOST = {0: (0, 7, SIZE - 1), 2: (3,), 3: (SIZE - 2, SIZE - 1)}
LOST_TEXT = {1: (5,), 2: (3, 4), 4: tuple(range(SIZE))}
LOST_BOTH = {0: LOST[0], 1: (5,), 2: (3, 4), 3: LOST[3], 4: tuple(range(SIZE))}


def load(url: Any, **options: Any) -> Any:
    return wdsprep.load(url, **({"global_batch": BATCH, "rank": 0, "world_size": 1} | options))


Three = tuple[str, str, str]


def three(folder: Path, images: Images, text: Any, *losts: Any) -> Three:
    """One dataset with all, and its latents and text each in one of their own."""
    both, latents, texts = (str(folder / name) for name in ("both", "latents", "texts"))
    lost, lost_text, lost_both = losts or ({}, {}, {})
    write_part(both, images, (*LATENTS, *text), rejects=lost_both)
    write_part(latents, images, LATENTS, rejects=lost)
    write_part(texts, images, text, rejects=lost_text)
    return both, latents, texts


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Three:
    return three(tmp_path_factory.mktemp("plain"), IMAGES, VARIED)


@pytest.fixture(scope="module")
def rejected(tmp_path_factory: pytest.TempPathFactory) -> Three:
    """Some samples are lacking here, some there, some in both, and a shard has no text at all."""
    return three(tmp_path_factory.mktemp("rejected"), IMAGES, VARIED, LOST, LOST_TEXT, LOST_BOTH)


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Three:
    lost, of_text = {0: (1, 2), 1: (32,)}, {1: (0,), 2: (7,)}
    both = {0: (1, 2), 1: (0, 32), 2: (7,)}
    return three(tmp_path_factory.mktemp("shaped"), SHAPED, TEXT, lost, of_text, both)


# The same batches as of one dataset with both


@pytest.mark.parametrize("kind", ["plain", "rejected", "shaped"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fields": ("emb", "key")},
        {"fields": ("latent", "txt")},
        {"fields": ("json", "key", "emb"), "drop_text": 0.4},
        {"epochs": 3, "seed": 5, "run": 1, "window": 16},
    ],
)
def test_joined_they_give_the_batches_of_one_dataset(
    kind: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    both, latents, texts = request.getfixturevalue(kind)
    assert_same(load(latents, join=texts, **options), load(both, **options))


def test_the_first_gives_the_order_and_text_may_be_the_first(plain: Three) -> None:
    _, latents, texts = plain
    found = list(load(texts, join=latents, fields=ALL))
    assert_same(found, load(latents, join=texts, fields=ALL))
    assert [*next(iter(load(texts, join=latents)))] == USUAL


@pytest.mark.parametrize(("where", "below"), [(None, 5 * SIZE), ("width < 33", 33)])
def test_every_sample_that_all_have_comes_once(
    rejected: Three, where: str | None, below: int
) -> None:
    _, latents, texts = rejected
    options: dict[str, Any] = {"where": where, "fields": ("key", "txt", "json")}
    loader = load(latents, join=texts, global_batch=1, **options)
    wanted = {
        IMAGES.key(shard, n)
        for shard in range(5)
        for n in range(SIZE)
        if n not in LOST_BOTH.get(shard, ()) and shard * SIZE + n < below
    }
    came = Counter(flat(keys(loader)))
    assert came == Counter(wanted)
    for batch in itertools.islice(load(latents, join=texts, **options), 5):
        assert batch["txt"] == [caption(key, "") for key in batch["key"]]
        assert [facts["width"] for facts in batch["json"]] == list(map(int, batch["key"]))
        assert [facts["tokens"] for facts in batch["json"]] == [int(k) % 7 for k in batch["key"]]


def test_raw_samples_have_the_members_of_all(rejected: Three) -> None:
    both, latents, texts = rejected
    for one, two in zip(load(latents, join=texts, raw=True), load(both, raw=True), strict=True):
        assert one.pop("__url__").startswith(latents)
        two.pop("__url__")
        assert one == two


def test_joined_text_takes_the_place_of_all_text_beside_an_array_of_its_name(
    plain: Three, tmp_path: Path
) -> None:
    both, latents, _ = plain
    other = (field("emb", (5, 4)),)
    texts = write_part(str(tmp_path / "other"), IMAGES, other, tag="new")
    for batch in load(both, join=texts, fields=("latent", "emb", "txt", "key")):
        for row, key in enumerate(batch["key"]):
            assert np.array_equal(batch["emb"][row].numpy(), array_of(f"{key}new", other[0]))
            assert batch["txt"][row] == caption(key, "new")
    assert [*next(iter(load(both, join=texts)))] == ["latent", "emb", "key"]
    assert "pooled" not in str([*next(iter(load(both, join=texts, raw=True)))])
    assert_same(load(both, join=texts, fields="latent"), load(latents, fields="latent"))


def test_each_stream_of_a_mixture_has_its_own(rejected: Three, tmp_path: Path) -> None:
    """One joined and one with all of its own may even share a batch, as their arrays are alike."""
    _, latents, texts = rejected
    rest = write_part(str(tmp_path), replace(IMAGES, sizes=(30,)), (*LATENTS, *VARIED), tag="b")
    mixture = [Stream(latents, join=texts, weight=1), Stream(rest, weight=1)]
    seen = set()
    turned = load([Stream(texts, join=latents, weight=1), Stream(rest, weight=1)])
    assert [*next(iter(turned))] == USUAL
    for batch in load(mixture, fields=("latent", "emb", "emb_mask", "txt", "key")):
        for row, key in enumerate(batch["key"]):
            tag = batch["txt"][row].partition(" ")[0]
            seen.add(tag)
            wanted = array_of(key + tag, VARIED[1])
            count = int(batch["emb_mask"][row].sum())
            found = batch["emb"][row, :count].view(torch.int16).numpy().view("<u2")
            assert np.array_equal(found, wanted)
            assert np.array_equal(batch["latent"][row].numpy(), array_of(key, LATENTS[0]))
    assert seen == {"", "b"}


@pytest.mark.parametrize("first", [1, 2])
def test_what_the_first_json_lacks_is_looked_for_in_the_others(rejected: Three, first: int) -> None:
    """Latents say the width, text says how many tokens there are."""
    one, other = rejected[first], rejected[3 - first]
    options: dict[str, Any] = {"join": other, "global_batch": 1}
    every = flat(keys(load(one, **options)))
    for _ in range(2):  # from the file that is kept, too
        came = flat(keys(load(one, where="width < 66 and tokens == 3", **options)))
        assert sorted(came) == sorted(k for k in every if int(k) < 66 and int(k) % 7 == 3)
    none = rf"^{re.escape(one)}, {re.escape(other)}: no sample has wide, which"
    with pytest.raises(UsageError, match=none):
        load(one, where="wide > 1", **options)
    with pytest.raises(UsageError, match="no sample has tokens"):
        load(rejected[1], where="tokens == 3", **{**options, "join": None})


def test_shapes_stand_beside_the_same_shapes(shaped: Three, tmp_path: Path) -> None:
    """As latents of another model, with text beside them."""
    others = (field("latent", (8, 8, 8)), *TEXT)
    beside = write_part(str(tmp_path / "beside"), SHAPED, others, rejects={1: (0,), 2: (7,)})
    lost = {0: (1, 2), 1: (0, 32), 2: (7,)}
    both = write_part(str(tmp_path / "both"), SHAPED, others, rejects=lost)
    fields = ("latent", "emb", "shape", "txt", "key")
    options: dict[str, Any] = {"fields": fields, "epochs": 2, "where": "tokens != 3"}
    assert_same(load(shaped[1], join=beside, **options), load(both, **options))
    other = replace(SHAPED, shapes=((48, 80), (64, 64)))
    square = write_part(str(tmp_path / "square"), replace(SHAPED, shapes=()), LATENTS)
    wrong = write_part(str(tmp_path / "other"), other, LATENTS)
    assert f"{wrong} has other shapes than {shaped[1]}" in refused(shaped[1], wrong)
    assert "load latents of many shapes first" in refused(square, beside)


# With latents that are made on the way


@patch("wdsprep.encoding.encode.make_encoder", Making())
def test_text_by_itself_joined_to_latents_is_what_one_run_makes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Byte for byte, as both are stored, and with the latents made on the way. The encoder loads in
    no time."""
    images = packed(pictures(tmp_path / "photos", range(42)), tmp_path / "images")
    both, latents, texts = (tmp_path / name for name in ("both", "latents", "texts"))
    encode_here(images, both)
    encode_here(images, latents, text="none")
    encode_here(images, texts, latents="none")
    options = {"fields": ("latent", "emb", "txt", "json", "key"), "drop_text": 0.2, "epochs": 2}
    wanted = list(load(str(both), **options))
    stored = load(str(latents), join=[texts], **options)
    assert_same(stored, wanted)
    how = wdsprep.Encode(resolution=64, model="tiny", device="cpu", text="none")
    online = load(str(images), join=str(texts), encode=how, **options)
    batches = iter(online)
    assert_same(itertools.islice(batches, 3), wanted[:3])
    again = load(str(latents), join=str(texts), **options)
    again.load_state_dict(online.state_dict())
    assert_same(batches, wanted[3:])
    assert_same(again, wanted[3:])
    text_of = {
        key: row
        for one in load(str(texts), global_batch=1)
        for key, row in zip(one["key"], one["emb"], strict=True)
    }
    for batch in load(str(images), join=str(texts), pixels=64):
        assert [*batch] == ["pixels", "emb", "txt", "key"]
        for key, row in zip(batch["key"], batch["emb"], strict=True):
            assert torch.equal(row, text_of[key])
    lines = ["key,score", *(f"{key},1" for key in [*text_of][1:])]
    (tmp_path / "some.csv").write_text("\n".join(lines))
    with pytest.raises(UsageError, match=r"keeps whole shards: .* lacks samples \(1 sample"):
        load(str(images), join=[texts, tmp_path / "some.csv"], encode=how, tee=str(tmp_path / "t"))
    damaged = shutil.copytree(texts, tmp_path / "damaged")
    tar = next(damaged.glob("*/*.tar"))
    damage(tar, 0)
    stored = list(load(str(latents), join=str(damaged), **options))
    found = list(load(str(images), join=str(damaged), encode=how, **options))
    assert f"{tar}: sample 0 cannot be served" in caplog.text
    for one, two in zip(found, stored, strict=True):
        assert torch.allclose(one.pop("latent").float(), two.pop("latent").float(), atol=1e-2)
    assert_same(found, stored)
    with not_finite_once(row=3):
        found = list(load(str(images), join=str(texts), encode=how))
    stored = list(load(str(latents), join=str(texts)))
    others = [(n, row) for n, one in enumerate(found) for row in differing(one, stored[n])]
    assert others == [(0, 3)]
    for batch in found:
        for key, row in zip(batch["key"], batch["emb"], strict=True):
            assert torch.equal(row, text_of[key])


def differing(one: Any, other: Any) -> list[int]:
    pairs = zip(one["key"], other["key"], strict=True)
    return [row for row, (key, stored) in enumerate(pairs) if key != stored]


@contextlib.contextmanager
def not_finite_once(*, row: int) -> Iterator[None]:
    """As if a model had made such numbers of one row of the first step."""
    seen: list[StepBegun] = []
    real = BatchEncoder.results

    def results(encoder: BatchEncoder, begun: StepBegun) -> Any:
        seen.append(begun)
        return [
            Code.NOT_FINITE if begun is seen[0] and number == row else encoded
            for number, encoded in enumerate(real(encoder, begun))
        ]

    with patch.object(BatchEncoder, "results", results):
        yield


# Damage


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_damage_in_either_part_costs_that_sample_alone(
    plain: Three, tmp_path: Path, caplog: pytest.LogCaptureFixture, which: int, *, raw: bool
) -> None:
    parts = [shutil.copytree(url, tmp_path / Path(url).name) for url in plain[1:]]
    tar = parts[which] / "256/000001.tar"
    offsets = np.fromfile(f"{tar}.idx", "<u8")
    damage(tar, int(offsets[4]))
    latents, texts = map(str, parts)
    options: Any = {"raw": True} if raw else {"fields": ("latent", "emb", "txt", "key")}
    wanted = list(load(plain[1], join=plain[2], **options))
    found = list(load(latents, join=texts, **options))
    lost = IMAGES.key(1, 4)

    def keys_and_texts(items: list[Any]) -> list[tuple[str, str]]:
        if raw:
            return [(sample["__key__"], sample["txt"].decode()) for sample in items]
        return [pair for one in items for pair in zip(one["key"], one["txt"], strict=True)]

    pairs = zip(keys_and_texts(found), keys_and_texts(wanted), strict=True)
    for (key, text), (stored, _) in pairs:
        assert text == caption(key, "")
        assert lost != key
        assert key == stored or stored == lost
    assert f"{tar}: sample 4 cannot be served" in caplog.text


def test_a_missing_shard_of_a_part(plain: Three, tmp_path: Path) -> None:
    _, latents, texts = plain
    copied = shutil.copytree(texts, tmp_path / "texts")
    (copied / "256/000002.tar").unlink()
    with pytest.raises(NotFoundError, match=r"000002.tar or its index is missing"):
        list(load(latents, join=str(copied)))
    for batch in load(latents, join=str(copied), skip_missing=True, fields=("key", "txt", "emb")):
        assert batch["txt"] == [caption(key, "") for key in batch["key"]]
        assert not any(2 * SIZE <= int(key) < 3 * SIZE for key in batch["key"])
    for tar in copied.glob("*/*.tar"):
        tar.unlink()
    with pytest.raises(NotFoundError, match=f"all its shards are .* {latents} or {copied}$"):
        list(load(latents, join=str(copied), skip_missing=True))


def test_a_sample_with_another_key_is_an_error_that_names_both(
    plain: Three, tmp_path: Path
) -> None:
    """Such as positions that were made up."""
    _, latents, _ = plain
    texts = write_part(str(tmp_path / "t"), IMAGES, TEXT, rejects={1: (3,)})
    table = TableWriter(LATENT_COLUMNS)
    for row in (row for row in range(SIZE) if row != 5):
        table.add(IMAGES.key(1, row), {"row": row})
    (tmp_path / "t/256/000001.parquet").write_bytes(table.finish())
    with pytest.raises(
        FormatError, match=rf"sample 4 of .*t/256/000001.tar has the key 0+{SIZE + 5}, but"
    ) as e:
        list(load(latents, join=texts))
    assert "\n" not in str(e.value)
    assert f"000001.tar, to which it is joined, has {IMAGES.key(1, 4)}" in str(e.value)


# What cannot be joined, in one line before the first step


def refused(latents: str, *join: str, **options: Any) -> str:
    with pytest.raises((UsageError, FormatError)) as caught:
        load(latents, join=join, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_joined(plain: Three, tmp_path: Path) -> None:
    both, latents, texts = plain

    def made(name: str, images: Images = IMAGES, fields: Any = TEXT, **options: Any) -> str:
        return write_part(str(tmp_path / name), images, fields, **options)

    others = made("others", replace(IMAGES, version="2"))
    assert "were made from different images in 256/000000.tar and 4 more" in refused(
        latents, others
    )
    anew = made("anew", replace(IMAGES, changed={3: "2"}))
    assert "different images in 256/000003.tar: join" in refused(latents, anew)
    half = made("half", units=3)
    assert "nothing of 256/000003.tar and 1 more shard" in refused(latents, half)
    assert 'run the same "wdsprep encode" again' in refused(latents, half)
    shaped = made("shaped", SHAPED, LATENTS)
    assert "load latents of many shapes first" in refused(latents, shaped)
    assert "joined twice" in refused(latents, texts, texts)
    assert "joined twice" in refused(latents, latents)
    (tmp_path / "link").symlink_to(texts)
    assert "joined twice" in refused(latents, texts, str(tmp_path / "link"))
    assert "both have pooled, emb" in refused(latents, texts, both)
    assert "does not say which images" in refused(latents, str(tmp_path / "nothing"))
    second = made("second", fields=(field("t5", (9, 4), "bfloat16", is_variable=True),))
    assert "one emb_mask: ask for one of them in fields=" in refused(latents, texts, second)
    for name, join in itertools.product(("t5", "emb"), ([texts, second], [second, texts])):
        batch = next(iter(load(latents, join=join, fields=(name, "emb_mask"))))
        assert [*batch] == [name, "emb_mask"]
        assert batch["emb_mask"].shape == batch[name].shape[:2]
        assert (batch["emb_mask"].any(dim=1) & (batch[name][~batch["emb_mask"]] == 0).all()).all()
    tars = shutil.copytree(latents, tmp_path / "tars")
    (tars / "wdsprep.json").unlink()
    assert "without a manifest" in refused(str(tars), texts)
    assert "does not say which images" in refused(latents, str(tars))
    none = made("none", rejects={n: range(SIZE) for n in range(4)} | {4: range(1, SIZE)})
    assert len(load(latents, join=none, global_batch=1)) == 1


@pytest.mark.parametrize("whole_rows", [10_000, 0])
def test_tables_that_are_missing_or_damaged(
    plain: Three, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_rows: int
) -> None:
    monkeypatch.setattr(stored_tables, "WHOLE_ROWS", whole_rows)
    _, latents, _ = plain
    rejects = {1: (3,), 2: (SIZE - 2, SIZE - 1)}
    texts = write_part(str(tmp_path / "t"), IMAGES, TEXT, rejects=rejects)
    assert len(load(latents, join=texts, global_batch=1)) == 5 * SIZE - 3
    table = tmp_path / "t/256/000001.parquet"
    whole = table.read_bytes()
    rows = pq.read_table(BytesIO(whole))
    place, zeros = rows.schema.names.index("row"), pa.array([0] * len(rows))
    again = f'run "wdsprep repair {tmp_path}/t", then the same "wdsprep encode" again'
    for data, what in (
        (whole[:-4], "no sound Parquet file"),
        ((tmp_path / "t/256/000003.parquet").read_bytes(), f"its shard {SIZE - 1} samples"),
        (_parquet(rows.set_column(place, rows.schema.field("row"), zeros)), "those of its samples"),
        (_parquet(pa.table({"key": ["a"], "row": [0]})), "not those of a table of samples"),
    ):
        table.write_bytes(data)
        assert what in (said := refused(latents, texts))
        assert said.endswith(f": {again}")
    table.unlink()
    assert f'run "wdsprep index {tmp_path}/t"' in refused(latents, texts)
    assert f'run "wdsprep index {tmp_path}/t"' in refused(texts, latents)


def _parquet(rows: pa.Table) -> bytes:
    pq.write_table(rows, out := BytesIO())
    return out.getvalue()


def test_positions_of_several_shapes_are_read_as_batches_need_them(tmp_path: Path) -> None:
    """A shard of one sample, and one whose three shapes come as their images do."""
    images = replace(SHAPED, sizes=(3, 1, 40, 40))
    both, latents, texts = three(tmp_path, images, TEXT)
    assert_same(load(latents, join=texts, global_batch=1), load(both, global_batch=1))
    with patch("wdsprep.loading.join.read_positions", side_effect=read_positions) as read:
        load(latents, join=texts, global_batch=1)
    assert not read.call_args_list
    (Path(latents) / "256/000003.parquet").unlink()
    assert "256/000003.parquet is missing" in refused(latents, texts)
    assert f'run "wdsprep index {latents}"' in refused(latents, texts)


def test_a_shard_that_the_other_dataset_lacks_needs_no_rows_of_its_last_one(tmp_path: Path) -> None:
    latents = write_part(str(tmp_path / "latents"), IMAGES, LATENTS, rejects={4: (0,)})
    texts = write_part(str(tmp_path / "texts"), IMAGES, TEXT, rejects={3: (0,), 4: range(SIZE)})
    (dataset,) = join_datasets(open_stream(Stream(latents), texts))
    with patch("wdsprep.loading.join.read_positions", side_effect=AssertionError):
        shards, _ = dataset.joined[0].locate(np.full(2, 4), np.array([0, 3]))
    assert shards.tolist() == [-1, -1]


# States


def test_a_state_is_of_what_is_joined(plain: Three, rejected: Three, tmp_path: Path) -> None:
    _, latents, texts = plain
    moved = shutil.copytree(texts, tmp_path / "elsewhere")
    loader = load(latents, join=texts, epochs=2)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    assert len(json.dumps(state)) < 1024
    again = load(latents, join=str(moved), epochs=2)
    again.load_state_dict(state)
    assert_same(again, batches)
    other = load(latents, join=rejected[2], epochs=2)
    with pytest.raises(FingerprintError, match=r"joined 0 \(.*texts\): [0-9a-f]{16}, 100 samples"):
        other.load_state_dict(state)
    with pytest.raises(FingerprintError, match=r"joined 0: .* -> \(none\)"):
        load(latents, epochs=2).load_state_dict(state)
