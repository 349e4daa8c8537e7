"""Batches: their size, their memory, the headers that are read, and how torch takes them."""

import copy
import logging
import mmap
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.kit.latent_sets import field, write_latents
from wdsprep import Stream
from wdsprep.dataset.npy_arrays import Field
from wdsprep.dataset.tar import BLOCK, padded
from wdsprep.dataset.tar.write import header
from wdsprep.errors import UsageError
from wdsprep.loading.batch_memory import BlockPool
from wdsprep.loading.loader import Loader, load
from wdsprep.loading.sample_layout import SampleLayout, layout_for

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def load_batches(url: Any, global_batch: int = 4, **options: Any) -> Loader:
    return load(url, global_batch=global_batch, **({"rank": 0, "world_size": 1} | options))


@pytest.fixture
def small(tmp_path: Path) -> str:
    return write_latents(str(tmp_path / "small"), (20, 19))


@pytest.mark.parametrize(("batch", "world", "fits"), [(50, 1, 39), (200, 1, 39), (48, 4, 36)])
def test_a_batch_of_more_than_all_samples_is_refused_with_one_that_fits(
    small: str, batch: int, world: int, fits: int
) -> None:
    with pytest.raises(UsageError, match=f"39 samples to serve.*give global_batch={fits} or less"):
        load_batches(small, batch, world_size=world)
    assert load_batches(small, fits, world_size=world).steps_per_epoch == 1


@pytest.mark.parametrize(
    "asked", [{"repeat": 2}, {"weight": 1}, {"count": 20}, {"epoch_steps": 1}], ids=str
)
def test_repeats_that_are_asked_for_are_served(small: str, asked: dict[str, Any]) -> None:
    is_of_loader = "epoch_steps" in asked
    of_stream, of_loader = ({}, asked) if is_of_loader else (asked, {})
    loader = load_batches(Stream(small, **of_stream), 50, **of_loader)
    assert len(next(iter(loader))["key"]) == 50
    loader.load_state_dict(loader.state_dict())


def test_of_a_mixture_all_samples_count_together(small: str, tmp_path: Path) -> None:
    other = write_latents(str(tmp_path / "other"), (15,), base=1000)
    both = [small, other]
    assert load_batches(both, 50).steps_per_epoch == 1
    with pytest.raises(UsageError, match=r"54 samples to serve.*global_batch=54 or less"):
        load_batches(both, 55)
    with pytest.raises(UsageError, match=r"49 samples to serve"):
        load_batches([Stream(small), Stream(other, count=10)], 50)
    with pytest.raises(UsageError, match="39 of them in the largest stream"):
        load_batches(both, 40, homogeneous=True)


def test_a_stream_that_cannot_fill_its_own_batches_is_named_in_a_line(
    small: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = write_latents(str(tmp_path / "other"), (15,), base=1000)
    with caplog.at_level(logging.WARNING, "wdsprep"):
        load_batches([small, other], 20, homogeneous=True)
        load_batches([small, Stream(other, repeat=1)], 20, homogeneous=True)
        load_batches([small, other], 20)
    assert caplog.text.count("1 of 2 streams have fewer samples than global_batch=20") == 1


def address(blocks: BlockPool, nbytes: int) -> tuple[memoryview, int]:
    block = blocks.take(nbytes)
    return block.data, block.ctypes.data


def test_a_block_is_used_again_once_no_view_of_it_is_left() -> None:
    blocks = BlockPool(keep=4)
    view, first = address(blocks, 100)
    part = view[10:20]
    del view
    other, second = address(blocks, 100)
    assert second != first
    del part
    assert address(blocks, 100)[1] == first
    assert other.nbytes == 100


def test_no_more_are_kept_than_wanted() -> None:
    nbytes, before = 256 << 20, mapped_nbytes()  # nothing is written, so it takes no memory
    blocks = BlockPool(keep=2)
    held = [blocks.take(nbytes) for _ in range(9)]
    assert round((mapped_nbytes() - before) / nbytes) == 9
    held.clear()
    assert round((mapped_nbytes() - before) / nbytes) == 2


def mapped_nbytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * mmap.PAGESIZE


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_latents(str(tmp_path_factory.mktemp("latents")), (16,))


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"batch_size": 2, "num_workers": 1}])
def test_batches_of_batches_are_refused(data: str, kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="batch_size=None"):
        next(iter(kind(load_batches(data), **options)))


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_whole_batches_go_through_as_they_are(data: str, kind: Any, workers: int) -> None:
    wanted = list(load_batches(data))
    found = list(kind(load_batches(data), batch_size=None, num_workers=workers))
    assert [batch["key"] for batch in found] == [batch["key"] for batch in wanted]
    assert all(torch.equal(a["latent"], b["latent"]) for a, b in zip(found, wanted, strict=True))


def test_a_collate_of_ones_own_decides_itself(data: str) -> None:
    (both,) = list(DataLoader(load_batches(data), batch_size=4, collate_fn=list))
    assert len(both) == 4


def test_a_batch_is_a_dict_to_whatever_looks_into_it(data: str) -> None:
    batch = next(iter(load_batches(data)))
    assert isinstance(batch, dict)
    doubled = _pytree.tree_map(lambda value: value * 2, batch)
    assert torch.equal(doubled["latent"], batch["latent"] * 2)
    assert pickle.loads(pickle.dumps(batch))["key"] == batch["key"]
    assert copy.copy(batch).keys() == batch.keys()  # as torch begins where it pins memory


def test_raw_samples_may_be_put_together_by_torch(tmp_path: Path) -> None:
    data = write_latents(str(tmp_path), (8,))
    (batch,) = list(DataLoader(load_batches(data, 8, raw=True), batch_size=8))
    assert len(batch["__key__"]) == 8


FIELDS = (field("emb_mask", (3, 5), "|u1"), field("latent", (4, 8, 8)), field("emb", (7, 16)))
VARIABLE = (*FIELDS[:2], field("emb", (7, 16), "bfloat16", is_variable=True))
Make = Callable[[str, int], bytes]


def others(name: str, nbytes: int) -> bytes:
    """What Python's tarfile writes of a member that has an owner and a time."""
    made = tarfile.TarInfo(name)
    made.size, made.mtime, made.uid, made.uname = nbytes, 1_700_000_000, 1000, "me"
    made.mode = 0o600
    return made.tobuf(tarfile.USTAR_FORMAT)


def heads_of(key: str, make: Make, fields: tuple[Field, ...] = FIELDS) -> bytes:
    """What lies between the arrays of a sample."""
    heads, padding = b"", 0
    for item in fields:
        own = make(f"{key}.{item.name}", item.nbytes) + item.header
        heads += bytes(-(len(heads) + padding) % 8 + padding) + own  # which is of whole words
        padding = padded(item.nbytes) - item.nbytes
    return heads


def rows_of(*rows: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)


def grid(fields: tuple[Field, ...] = FIELDS) -> SampleLayout:
    return layout_for(fields, ("latent", "emb"))


@pytest.mark.parametrize("fields", [FIELDS, VARIABLE])
@pytest.mark.parametrize("make", [header, others])
@pytest.mark.parametrize("key", ["a", "folder/0012", "f" * 60 + "/" + "g" * 80, "ünïcode"])
def test_keys_are_those_of_the_members(make: Make, key: str, fields: tuple[Field, ...]) -> None:
    heads = rows_of(heads_of("first", header, fields), heads_of(key, make, fields))
    assert grid(fields).read_headers(heads)[0] == ["first", key]


@pytest.mark.parametrize("make", [header, others])
def test_lengths_are_those_of_the_members(make: Make) -> None:
    samples = [(*VARIABLE[:2], VARIABLE[2].of_length(length)) for length in range(1, 8)]
    heads = rows_of(*(heads_of(f"k{n}", make, fields) for n, fields in enumerate(samples)))
    keys, lengths = grid(VARIABLE).read_headers(heads)
    assert lengths.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert keys == [f"k{n}" for n in range(7)]
    longer = rows_of(heads_of("a", make, (*VARIABLE[:2], VARIABLE[2].of_length(8))))
    keys, lengths = grid(VARIABLE).read_headers(longer)
    assert lengths.tolist() == [0]
    assert keys == [None]


@pytest.mark.parametrize("fields", [FIELDS, VARIABLE])
@pytest.mark.parametrize("make", [header, others])
def test_no_byte_of_a_header_can_change_unseen(make: Make, fields: tuple[Field, ...]) -> None:
    """Two that stand after the digits of the checksum mean nothing."""
    whole = heads_of("some-key", make, fields)
    rows = np.repeat(rows_of(whole), len(whole), axis=0)
    np.fill_diagonal(rows, rows.diagonal() ^ 1)
    unseen = {n for n, key in enumerate(grid(fields).read_headers(rows)[0]) if key is not None}
    between = set(range(len(whole)))
    after_sums = set()
    for item, place in zip(fields, grid(fields).headers, strict=True):
        top = place.stop - BLOCK - len(item.header)
        between -= set(range(top, place.stop))
        after_sums |= {top + 154, top + 155}
    assert between <= unseen <= between | after_sums


def test_members_of_two_samples_make_none() -> None:
    one, other = heads_of("one", header), heads_of("two", header)
    half = grid().headers[0].stop
    assert grid().read_headers(rows_of(one, one[:half] + other[half:], other))[0] == [
        "one",
        None,
        "two",
    ]
