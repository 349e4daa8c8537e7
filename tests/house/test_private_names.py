"""What wdsprep takes from within other packages, which they may change in any version.

Each private name has a test that touches it in the installed version, and says what breaks without
it; a further one finds names that have none. So do texts of messages that decide something, but
for those of Pillow, which the corpus of `images/test_pixel_rule.py` draws from it.
"""

import ast
import contextlib
import importlib
import os
import re
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from tests.house.test_layers import FILES, tree_of
from tests.kit.faultproxy import FaultProxy
from tests.kit.s3 import S3Server
from wdsprep.errors import NotFoundError
from wdsprep.runners.ray import cluster
from wdsprep.runners.ray.runner import death_reason
from wdsprep.runners.stuck_workers import FEWER
from wdsprep.store import gcs_azure as library
from wdsprep.store.base import write_bytes
from wdsprep.store.gcs_azure import kind_of
from wdsprep.store.s3.s3_store import S3Store

TAKEN = {
    "encoding.models.load_networks": {"_dynamo"},
    "loading.batch_memory": {
        "_new_shared",
        "_pytree",
        "_version",
        "torch.utils.data._utils.collate",
    },
    "loading.streaming.stream": {
        "_coord_actor",
        "ray.data._internal.execution.backpressure_policy",
    },
    "runners.ray.cluster": {"_global_node", "_private", "_worker_logs_enabled", "ray._raylet"},
    "store.s3.reads": {"_endpoint", "_fp", "_get_conn", "_pool", "_put_conn"},
}
"""By module. Those of the standard library and of our own modules are no concern of this."""
PUBLIC = {"_exit", "_fields", "_make", "_replace", "_value_"}  # documented, but for their looks


BY_NAME = ("getattr", "hasattr", "_changed_in_ray")
"""Functions whose second argument is the name of an attribute."""


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def own_names(tree: ast.Module) -> set[str]:
    """What the classes and functions of a module are called, or have."""
    found = set(PUBLIC)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if name_of(node.value) in ("self", "cls") else set()
    return found


def private_names(tree: ast.Module) -> Iterator[str]:
    """Attributes and imports, and attributes that are asked for by their names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and name_of(node.func) in BY_NAME:
            names = [str(part.value) for part in node.args[1:2] if isinstance(part, ast.Constant)]
        else:
            continue
        yield from (name for name in names if re.search(r"(^|\.)_(?!_)", name))


def test_every_private_name_is_known_here() -> None:
    found: dict[str, set[str]] = {}
    for module in FILES:
        if foreign := set(private_names(tree_of(module))) - own_names(tree_of(module)):
            found[module] = foreign
    assert found == TAKEN, "test what is new here, and say what becomes of a version without it"


# torch


def test_torch_counts_what_is_written_to_a_tensor_and_its_views() -> None:
    """Without, padding that a trainer wrote to would come again: mend loading/batch_memory.py, in
    which a tensor without memory is to have that count, and to hold none."""
    memory = np.zeros(64, np.uint8)
    alive = weakref.ref(memory)
    whole = torch.from_numpy(memory)
    probe, given = whole.detach(), whole.view(torch.bfloat16).view(4, 8)
    probe.data = torch.empty(0, dtype=torch.uint8)
    counts = [probe._version]
    for view in (given, given[1:, 3], given.detach(), given.flatten().view(torch.int16)):
        view.add_(1)
        counts.append(probe._version)
    assert counts == [counts[0] + n for n in range(5)]
    assert memory.any()
    del memory, whole, given, view
    assert alive() is None


def test_torch_makes_memory_that_it_shares_as_it_is() -> None:
    """Without, workers copy each new block once more: see loading/batch_memory.py."""
    made = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(100))
    assert made.is_shared()
    assert made.share_memory_().data_ptr() == made.data_ptr()
    assert made.shape == (100,)


# botocore and urllib3


@contextlib.contextmanager
def counted(
    server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[S3Store, FaultProxy]]:
    """A store with a file of ten bytes, and the requests it makes."""
    with FaultProxy(server.url, lambda *_: None) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = S3Store(f"s3://{bucket}/data", first_pause_s=0.001)
        with contextlib.closing(store):
            write_bytes(store, "f", b"0123456789")
            yield store, proxy


def read_all(store: S3Store, proxy: FaultProxy) -> list[bool]:
    """Of each read, whether it went by a signed URL."""
    before, buffer = len(proxy.seen), bytearray(3)
    for start in range(6):
        assert store.read("f", start=start, nbytes=2) == b"0123456789"[start : start + 2]
    assert store.read_into("f", memoryview(buffer), start=4) == 3
    assert buffer == b"456"
    return ["X-Amz-Signature" in path for _, path in proxy.seen[before:]]


def test_boto3_and_urllib3_have_what_reads_take_from_them(
    s3_server: S3Server,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without, each read costs three times the processor time: mend store/s3/reads.py."""
    with counted(s3_server, bucket, monkeypatch) as (store, proxy):
        assert read_all(store, proxy) == [True] * 7
        pools = store.clients.get()[1]._wire._pools
        assert list(pools) == [proxy.url], "no connection is kept: response._pool has changed"
    assert caplog.text == ""


def test_boto3_lets_us_read_its_listings(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an event inside it. Without, a listing takes ten times as long: see s3_listing.py."""
    seen = []
    with counted(s3_server, bucket, monkeypatch) as (store, _):
        store.client.meta.events.register_last(
            "before-parse.*.ListObjectsV2",
            lambda customized_response_dict, **_: seen.append(customized_response_dict["Contents"]),
        )
        assert [entry.name for entry in store.list()] == ["f"]
    assert [[item["Key"] for item in page] for page in seen] == [["data/f"]]


# Ray


@pytest.fixture(scope="module")
def connected_ray() -> Iterator[None]:
    with cluster.connect_to_ray("local", cpus=1):
        yield


def failing() -> Any:
    """An actor; its class is made here, so that it travels as a whole."""

    @ray.remote
    class Failing:
        def die(self) -> None:
            os._exit(1)

        def refuse(self) -> None:
            raise NotFoundError("s3://b/k: no such object")

    return Failing.remote()


def error_of(call: Any) -> Any:
    with pytest.raises(ray.exceptions.RayError) as caught:
        ray.get(call.remote())
    return caught.value


@pytest.mark.usefixtures("connected_ray")
def test_ray_says_of_a_dead_worker_what_is_cut_out_of_it() -> None:
    """Else reasons of a quarantine are long, or say nothing: mend `death_reason`."""
    why = death_reason(error_of(failing().die))
    ended = "worker died: Worker unexpectedly exits with a connection error code 2. End of file"
    assert why == f"{ended}: it may have lacked memory: {FEWER}"


def test_ray_says_that_a_node_has_died_in_these_words() -> None:
    """Else units lost with a node count as failed: mend `is_node_gone`."""
    server = Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"
    assert b"node has died" in server.read_bytes()


@pytest.mark.filterwarnings("ignore")  # Ray Data's own
@pytest.mark.usefixtures("connected_ray")
def test_a_stream_has_the_actor_that_its_pipeline_runs_in() -> None:
    """Else a stream that ends leaves its workers: mend `Trainer.actors` in streaming/stream.py."""
    (part,) = ray.data.range(1).streaming_split(1)
    ray.kill(part._coord_actor)


@pytest.mark.filterwarnings("ignore")
def test_ray_data_has_the_setting_that_turns_its_own_bounds_off() -> None:
    """Else a stream may stand for ever: mend `_tune` in streaming/stream.py."""
    from ray.data import DataContext
    from ray.data._internal.execution import backpressure_policy as policies

    from wdsprep.loading.streaming.stream import _tune

    context = DataContext.get_current().copy()
    assert policies.ENABLED_BACKPRESSURE_POLICIES, "none are left to turn off"
    _tune(context)
    assert policies.get_backpressure_policies(context, None, None) == []


def test_ray_has_the_client_that_tells_of_a_token() -> None:
    """Else a cluster that asks for one is waited for: mend `_check_token` in
    runners/ray/cluster.py; runners/test_ray.py sees it at work."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled

    with pytest.raises(ValueError, match="Invalid gcs_address: nowhere"):
        GcsClient(address="nowhere")


def test_ray_has_the_switch_that_keeps_stdout_the_commands_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a dead worker is reported on stdout too: mend `without_death_notices` in
    runners/ray/cluster.py."""
    module = ray._private.worker
    monkeypatch.setattr(module, "_worker_logs_enabled", True)
    with cluster.without_death_notices():
        assert module._worker_logs_enabled is False
    assert module._worker_logs_enabled is True


# obstore


@pytest.mark.parametrize("copy", [False, True])
def test_obstore_has_what_the_store_takes_from_within_it(copy: bool) -> None:
    """Else nothing on gs:// and az:// can be read: mend store/gcs_azure.py."""
    first = importlib.import_module(library.NAME)
    loaded = library._load() if copy else first
    assert {"GCSStore", "AzureStore"} <= set(dir(loaded._store))
    assert {"get", "put", "head", "list", "delete"} <= set(dir(loaded))
    store = loaded._store.MemoryStore()
    loaded.put(store, "a/f", b"bytes", mode="create", attributes={"wdsprepwriter": "me"})
    with pytest.raises(Exception, match="exists") as caught:
        loaded.put(store, "a/f", b"bytes", mode="create")
    assert kind_of(caught.value) == "AlreadyExistsError"
    assert type(caught.value).__module__.startswith("obstore")
    found = loaded.get(store, "a/f", options={"range": (1, 3)})
    assert (bytes(found.bytes()), found.range, found.meta["size"]) == (b"yt", (1, 3), 5)
    assert sys.modules[library.NAME] is importlib.import_module(library.NAME)


def test_torch_still_asks_how_types_are_collated() -> None:
    """Without it `DataLoader(loader)` stacks whole batches; `tests/loading/test_batches.py`."""
    from torch.utils import _pytree
    from torch.utils.data._utils.collate import default_collate_fn_map

    assert default_collate_fn_map
    assert callable(_pytree.register_pytree_node)
