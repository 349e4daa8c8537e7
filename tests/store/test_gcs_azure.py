"""GCS and Azure when the network is bad, a process forks, or settings are wrong."""

import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.kit.clouds import gcs_before, open_to_all
from tests.kit.faultproxy import DropAfter, FaultProxy, Give, Rule, Status, Truncate, first
from tests.kit.stores import names, one_line_error, uploads
from wdsprep.errors import AccessError, NotFoundError, StoreError, UsageError
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes
from wdsprep.store.gcs_azure import ObjectStore

MIB = 1 << 20
BIG = random.Random(0).randbytes(11 * MIB)
Through = Callable[[Rule], AbstractContextManager[tuple[FaultProxy, ObjectStore]]]


@pytest.fixture
def through(
    bucket: str, s3_env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Through:
    """A store whose requests meet what a rule says."""
    open_to_all(bucket)

    @contextmanager
    def opened(rule: Rule) -> Iterator[tuple[FaultProxy, ObjectStore]]:
        with gcs_before(s3_env["AWS_ENDPOINT_URL"], tmp_path, monkeypatch, rule) as proxy:
            yield proxy, ObjectStore(f"gs://{bucket}/data", part_nbytes=5 * MIB, first_pause_s=0.01)

    return opened


def give_up(store: ObjectStore) -> None:
    with store.write("none.tar") as sink:
        sink.write(BIG)
        sink.end()
        raise ZeroDivisionError


def test_a_large_file_goes_up_in_parts_and_shows_when_it_is_whole(
    through: Through, bucket: str
) -> None:
    with through(first(2, Status(503), "PUT")) as (proxy, store):
        with store.write("big.tar") as sink:
            for start in range(0, len(BIG), MIB):
                sink.write(BIG[start : start + MIB])
            sink.end()
            assert names(store) == []
        assert store.read("big.tar") == BIG
        assert store.read("big.tar", start=6 * MIB, nbytes=100) == BIG[6 * MIB :][:100]
        assert len([path for _, path in proxy.seen if "partNumber=" in path]) == 5
        with pytest.raises(ZeroDivisionError):
            give_up(store)
        assert names(store) == ["big.tar"]
    assert uploads(bucket) == []


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_write_whose_answer_was_lost_is_known_again(through: Through, exclusive: bool) -> None:
    with through(first(1, DropAfter(), "PUT")) as (_, store):
        write_bytes(store, "f", b"mine", exclusive=exclusive)
        assert store.read("f") == b"mine"


@pytest.mark.parametrize("fault", [Status(503), Status(429), Truncate(3), DropAfter()])
def test_a_read_is_repeated_until_it_is_whole(
    through: Through, fault: Status | Truncate | DropAfter
) -> None:
    with through(first(3, fault, "GET", "data%2Ff")) as (_, store):
        write_bytes(store, "f", b"0123456789")
        assert store.read("f", start=2) == b"23456789"


def test_a_server_that_stays_away_is_an_error_of_one_line(through: Through) -> None:
    with through(first(999, Status(503), "GET")) as (_, store):
        write_bytes(store, "f", b"x")
        with one_line_error(StoreError, f"{store.url}/f", "503", "again and again: try later"):
            store.read("f")


def test_a_range_that_is_not_the_one_asked_for_is_an_error(through: Through) -> None:
    with through(first(99, Give(b"abc", "bytes 0-2/10"), "GET")) as (_, store):
        write_bytes(store, "f", b"0123456789")
        with one_line_error(StoreError, f"{store.url}/f"):
            store.read("f", start=4, nbytes=3)


def read_in_a_child(store: ObjectStore) -> bytes:
    return store.read("f") + open_store(store.url).read("f")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["gs", pytest.param("az", marks=pytest.mark.system)])
def test_a_forked_child_and_its_parent_both_read_on(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """The library hangs in a child of a process that has used it, and the child may crash that."""
    store: ObjectStore = request.getfixturevalue(f"{kind}_store")
    write_bytes(store, "f", b"bytes")
    for _ in range(2):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            asked = [pool.apply_async(read_in_a_child, (store,)) for _ in range(4)]
            assert {one.get(20) for one in asked} == {b"bytesbytes"}
        assert store.read("f") == b"bytes"


def test_wrong_names_and_keys_are_said_in_one_line(
    container: str, azurite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_line_error(NotFoundError, "az://no-such-container: no such bucket or container"):
        open_store("az://no-such-container/x").read("f")
    with pytest.raises(UsageError, match="has no bucket"):
        open_store("az:///x")
    with pytest.raises(UsageError, match="such a name cannot be used"):
        open_store(f"az://{container}").read("a\nb")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
    with one_line_error(AccessError, "access denied", "AZURE_STORAGE_ACCOUNT_KEY") as refused:
        open_store(f"az://{container}/x").read("f")
    assert azurite not in str(refused.value)


@pytest.mark.parametrize(("url", "extra"), [("gs://b/x", "gcs"), ("az://c/x", "azure")])
def test_without_the_library_the_error_names_the_extra(url: str, extra: str) -> None:
    code = "import sys; sys.modules['obstore'] = None; from wdsprep.store import open_store\n"
    code += f"try: open_store({url!r})\nexcept Exception as error: print(type(error), error)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert f"run pip install '.[{extra}]' in a clone" in done.stdout
    assert "UsageError" in done.stdout
    assert done.stdout.count("\n") == 1
