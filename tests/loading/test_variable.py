"""Arrays as long as their captions, in batches: padded, masked, never another sample's bytes."""

import io
import logging
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import wdsprep
from tests.kit.batches import damage
from tests.kit.latent_sets import array_of, field, npy, write_latents
from wdsprep.dataset import aio
from wdsprep.dataset.npy_arrays import layout, normalise, patchify
from wdsprep.dataset.tar import BLOCK
from wdsprep.dataset.tar.write import header
from wdsprep.encoding.models.noise import noise_keys, normal
from wdsprep.errors import UsageError
from wdsprep.loading import shard_access

BATCH, LENGTH, SIZES = 16, 40, (30, 30, 38)
EMB = field("emb", (LENGTH, 24), "bfloat16", is_variable=True)
FIELDS = (
    field("latent", (4, 8, 8)),
    field("time_ids", (6,), "<i4"),
    field("pooled", (32,), "bfloat16"),
    EMB,
)
USUAL = ("latent", "time_ids", "pooled", "emb", "emb_mask", "key")
ALL = (*USUAL, "txt", "json", "caption")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Samples whose texts are longer than what many arrays leave of their rows."""
    return write_latents(str(tmp_path_factory.mktemp("variable")), SIZES, fields=FIELDS)


def load(url: Any, **options: Any) -> Any:
    return wdsprep.load(url, **({"global_batch": BATCH, "rank": 0, "world_size": 1} | options))


def bits(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.int16).numpy().view("<u2")


def assert_right(batch: dict[str, Any], length: int = LENGTH) -> None:
    """Padded to this length, and what NumPy would read, to the bit."""
    assert batch["emb"].dtype == batch["pooled"].dtype == torch.bfloat16
    assert batch["emb_mask"].dtype == torch.bool
    assert batch["emb"].shape == (len(batch["key"]), length, 24)
    for row, key in enumerate(batch["key"]):
        wanted = array_of(key, EMB)
        count = len(wanted)
        assert np.array_equal(bits(batch["emb"][row, :count]), wanted)
        assert not bits(batch["emb"][row, count:]).any()
        assert batch["emb_mask"][row].tolist() == [n < count for n in range(length)]
        assert np.array_equal(bits(batch["pooled"][row]), array_of(key, FIELDS[2]))


def longest(batch: dict[str, Any]) -> int:
    return max(len(array_of(key, EMB)) for key in batch["key"])


WAYS = ("at once", "one by one", "slowly", "in pieces")


def read_in_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loaders read in one of these ways, the last two as on a network file system."""
    monkeypatch.setattr(aio, "spare_queues", [])
    if way == "one by one":
        monkeypatch.setattr(aio, "SYSCALLS", {})
    if way in ("slowly", "in pieces"):
        monkeypatch.setattr(shard_access, "read_all", lambda fds, *_: np.zeros(len(fds), np.int64))

    def read(fd: int, buffers: Any, start: int) -> int:
        assert way in ("slowly", "in pieces"), "a sample is read again"
        return preadv(fd, buffers if way == "slowly" else [buffers[0][:1000]], start)

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", read)


@pytest.mark.parametrize("names", [None, ALL])
@pytest.mark.parametrize("way", WAYS)
def test_batches_hold_what_numpy_reads_from_the_tar(
    data: str, monkeypatch: pytest.MonkeyPatch, way: str, names: tuple[str, ...] | None
) -> None:
    read_in_way(way, monkeypatch)
    stored = {}
    for path in Path(data).glob("*/*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                stored[member.name] = tar.extractfile(member).read()  # type: ignore[union-attr]
    for batch in load(data, fields=names):
        assert tuple(batch) == (names or USUAL)
        assert_right(batch)
        for row, key in enumerate(batch["key"]):
            for name in ("latent", "time_ids"):
                wanted = np.load(io.BytesIO(stored[f"{key}.{name}.npy"]))
                assert np.array_equal(batch[name][row].numpy(), wanted)
            assert npy(array_of(key, EMB)) == stored[f"{key}.emb.npy"]
            if names:
                text = stored[f"{key}.txt"].decode()
                assert batch["txt"][row] == batch["caption"][row] == text
                assert batch["json"][row] == {"key": key}


def test_arrays_of_three_axes_and_of_half_precision_vary_too(tmp_path: Path) -> None:
    item = field("emb", (9, 3, 5), "<f2", is_variable=True)  # 30 bytes a token
    url = write_latents(str(tmp_path), [70], fields=(item,))
    for batch in load(url):
        for row, key in enumerate(batch["key"]):
            wanted = array_of(key, item)
            assert np.array_equal(batch["emb"][row, : len(wanted)].numpy(), wanted)
            assert not batch["emb"][row, len(wanted) :].any()
            assert int(batch["emb_mask"][row].sum()) == len(wanted)


@pytest.mark.parametrize("names", [None, ALL])
def test_padding_may_end_with_the_longest_caption_of_a_batch(
    data: str, names: tuple[str, ...] | None
) -> None:
    shorter = 0
    for batch in load(data, pad="longest", fields=names, global_batch=4, epochs=2):
        assert_right(batch, longest(batch))
        shorter += longest(batch) < LENGTH
    assert shorter > 10


def test_what_a_trainer_writes_into_padding_is_gone_with_its_batch(data: str) -> None:
    """Memory is used again, and remembers how far it was; a view may outlive its batch."""
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda emb: emb,
        lambda emb: emb[:, LENGTH // 2, 3:5],
        lambda emb: emb.detach()[3:9].view(torch.int16),
        lambda emb: emb[~(emb != 0)],  # a copy
    ]
    with torch.inference_mode():
        for number, batch in enumerate(load(data, epochs=16, threads=1, ahead=1)):
            assert_right(batch)
            view = views[number % len(views)](batch["emb"])
            del batch
            view.add_(1)
            del view
    for batch in DataLoader(load(data, epochs=4, threads=1), batch_size=None, num_workers=1):
        assert_right(batch)
        batch["emb"].add_(1)


@pytest.mark.parametrize("pad", ["full", "longest"])
def test_a_caption_that_is_dropped_has_the_mask_of_the_empty_one(data: str, pad: str) -> None:
    """And what is made of sizes stays."""
    options = {"epochs": 4, "pad": pad, "fields": ALL}
    dropped = 0
    for batch, whole in zip(
        load(data, drop_text=0.3, **options), load(data, **options), strict=True
    ):
        for row, text in enumerate(batch["txt"]):
            is_empty = bool((batch["pooled"][row] == 9).all())
            dropped += is_empty
            count = 2 if is_empty else int(whole["emb_mask"][row].sum())
            words = [n < count for n in range(batch["emb"].shape[1])]
            assert batch["emb_mask"][row].tolist() == words
            wanted = torch.full((2, 24), 9.0) if is_empty else whole["emb"][row, :count]
            assert torch.equal(batch["emb"][row, :count], wanted.bfloat16())
            assert not batch["emb"][row, count:].any()
            assert text == ("" if is_empty else whole["txt"][row])
        assert torch.equal(batch["time_ids"], whole["time_ids"])
    assert 80 < dropped < 150
    (found,) = load(data, drop_text=1, pad="longest", global_batch=sum(SIZES))
    assert found["emb"].shape == (sum(SIZES), 2, 24)
    assert bool(found["emb_mask"].all())


def test_streams_of_other_lengths_keep_to_themselves(data: str, tmp_path: Path) -> None:
    longer = field("emb", (LENGTH + 1, 24), "bfloat16", is_variable=True)
    other = write_latents(str(tmp_path), [64], base=10**6, fields=(*FIELDS[:-1], longer))
    with pytest.raises(UsageError, match="differ in name or shape"):
        load([data, other])
    lengths = {
        (batch["emb"].shape[1], int(batch["key"][0]) >= 10**6)
        for batch in load([data, other], homogeneous=True)
    }
    assert lengths == {(LENGTH, False), (LENGTH + 1, True)}
    fixed = write_latents(str(tmp_path / "fixed"), [64], base=10**7)
    for batch in load([data, fixed], homogeneous=True):
        assert ("emb_mask" in batch) is (int(batch["key"][0]) < 10**7)
    with pytest.raises(UsageError, match="pad 'short': give one of full, longest"):
        load(data, pad="short")
    with pytest.raises(UsageError, match="leave out the other options"):
        load(data, raw=True, pad="longest")


# Damage


def emb_start(path: Path, number: int) -> int:
    """Where the header of a sample's last array stands in its tar."""
    start = int(np.fromfile(f"{path}.idx", "<u8")[number])
    return start + layout(FIELDS)[-1]["offset"] - BLOCK - len(EMB.header)


def with_length(key: str, said: int, shaped: int) -> bytes:
    """Headers that state one length by the size, and another one by the shape."""
    tar = header(f"{key}.{EMB.name}", len(EMB.header) + said * EMB.row_nbytes)
    return tar + EMB.header_for(shaped)


@pytest.mark.parametrize("names", [None, ALL])
@pytest.mark.parametrize(
    "change",
    [
        lambda key, n: with_length(key, n, n % LENGTH + 1),
        lambda key, n: with_length(key, n % LENGTH + 1, n),
        lambda key, _n: with_length(key, 0, 0),
        lambda key, _n: with_length(key, LENGTH + 1, LENGTH + 1),
        lambda key, n: header(f"{key}.{EMB.name}", 128 + n * EMB.row_nbytes - 2),
        lambda key, _n: header(f"{key}.{EMB.name}", 8 << 20),
        lambda key, n: with_length(key, n, n)[:124] + b"zz",
        lambda _key, n: with_length("other", n, n),
    ],
)
def test_a_sample_of_a_damaged_length_is_replaced_and_nothing_shifts(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    names: tuple[str, ...] | None,
    change: Callable[[str, int], bytes],
) -> None:
    url = write_latents(str(tmp_path), SIZES, fields=FIELDS)
    whole = [key for batch in load(url) for key in batch["key"]]
    path, bad = tmp_path / "256/000001.tar", f"{37:012d}"
    damage(path, emb_start(path, 7), change(bad, len(array_of(bad, EMB))))
    found = []
    with caplog.at_level(logging.WARNING, "wdsprep"):
        for batch in load(url, fields=names):
            assert_right(batch)
            found += batch["key"]
    assert [k for k, w in zip(found, whole, strict=True) if k != w] == [found[whole.index(bad)]]
    assert "000001.tar: sample 7 cannot be served" in caplog.text


# Latents whose scale and shift are by channel, and whose cells are folded


def folded(z: torch.Tensor) -> torch.Tensor:
    """2 x 2 cells to channels, in the order of Flux.2's VAE."""
    count, channels, height, width = z.shape
    cells = z.view(count, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
    return cells.reshape(count, channels * 4, height // 2, width // 2)


def test_cells_are_folded_in_the_order_of_diffusers() -> None:
    z = torch.randn(3, 8, 6, 10)
    assert torch.equal(patchify(z, 2), folded(z))
    assert np.array_equal(patchify(z.numpy()[0], 2), folded(z)[0].numpy())
    assert patchify(z, 1) is z


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "bfloat16"])
def test_moments_give_what_would_have_been_stored(tmp_path: Path, dtype: str) -> None:
    item = field("latent", (8, 6, 4), dtype)
    more = {
        "patch": 2,
        "scale": [round(0.5 + n / 16, 4) for n in range(16)],
        "shift": [round(n / 8 - 1, 4) for n in range(16)],
        "latents": "moments",
    }
    url = write_latents(str(tmp_path), [64], fields=(item, EMB), more=more)
    kind = {"<f2": torch.float16, "<f4": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    for step, batch in enumerate(load(url, epochs=2)):
        assert batch["latent"].shape == (BATCH, 16, 3, 2)
        arrays = np.stack([array_of(key, item) for key in batch["key"]])
        if dtype == "bfloat16":
            arrays = (arrays.astype("<u4") << 16).view("<f4")
        mean, logvar = torch.from_numpy(arrays).float().chunk(2, dim=1)
        noise = normal(noise_keys(0, [f"{step}:{key}" for key in batch["key"]]), (4, 6, 4))
        z = mean + (0.5 * logvar).exp() * noise
        shift, scale = (torch.tensor(more[of])[:, None, None] for of in ("shift", "scale"))
        wanted = (folded(z) - shift) * scale
        assert batch["latent"].dtype == kind
        assert torch.allclose(batch["latent"].float(), wanted, atol=0.03, rtol=0.01)
        assert torch.equal(batch["latent"], normalise(z, more).to(kind)) or dtype != "<f4"
