"""A DataLoader takes a loader's batches as they are, and is refused where it would stack them."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.kit.latent_sets import write_latents
from wdsprep.errors import UsageError
from wdsprep.loading.loader import Loader, load

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_latents(str(tmp_path_factory.mktemp("latents")), (16,))


def loader(data: str, **options: Any) -> Loader:
    return load(data, **({"global_batch": 4, "rank": 0, "world_size": 1} | options))


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"batch_size": 2, "num_workers": 1}])
def test_batches_of_batches_are_refused(data: str, kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="batch_size=None"):
        next(iter(kind(loader(data), **options)))


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_whole_batches_go_through_as_they_are(data: str, kind: Any, workers: int) -> None:
    wanted = list(loader(data))
    found = list(kind(loader(data), batch_size=None, num_workers=workers))
    assert [batch["key"] for batch in found] == [batch["key"] for batch in wanted]
    assert all(torch.equal(a["latent"], b["latent"]) for a, b in zip(found, wanted, strict=True))


def test_a_collate_of_ones_own_decides_itself(data: str) -> None:
    (both,) = list(DataLoader(loader(data), batch_size=4, collate_fn=list))
    assert len(both) == 4


def test_a_batch_is_a_dict_to_whatever_looks_into_it(data: str) -> None:
    batch = next(iter(loader(data)))
    assert isinstance(batch, dict)
    doubled = _pytree.tree_map(lambda value: value * 2, batch)
    assert torch.equal(doubled["latent"], batch["latent"] * 2)
    assert pickle.loads(pickle.dumps(batch))["key"] == batch["key"]
    assert copy.copy(batch).keys() == batch.keys()  # as torch begins where it pins memory


def test_raw_samples_may_be_put_together_by_torch(tmp_path: Path) -> None:
    data = write_latents(str(tmp_path), (8,))
    (batch,) = list(DataLoader(loader(data, raw=True, global_batch=8), batch_size=8))
    assert len(batch["__key__"]) == 8
