"""What is read of a dataset on the hub, and that nothing is written there."""

import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.hub import Answer, Hub
from tests.kit.stores import names, one_line_error
from wdsprep.errors import AccessError, NotFoundError, StoreError, UsageError
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes
from wdsprep.store.hub import HubStore

DATA = bytes(range(256)) * 40


def test_files_are_listed_and_read_in_order(hub: Hub, hub_dataset: str, hf_store: HubStore) -> None:
    files = {f"data/256/{number:06d}.tar": DATA + b"%d" % number for number in range(12)}
    hub.repositories[hub_dataset].commit({**files, "data/a b/é": b"", "data-2/x": b"", "y": b"z"})
    assert names(hf_store) == [*(name.removeprefix("data/") for name in files), "a b/é"]
    assert names(hf_store, "256/00001") == ["256/000010.tar", "256/000011.tar"]
    assert names(hf_store, "none/") == []
    assert [entry.nbytes for entry in hf_store.list("a b/")] == [0]
    for start, nbytes in ((0, None), (0, 0), (250, 10), (10_000, 500), (20_000, 5), (20_000, None)):
        part = (DATA + b"3")[start : None if nbytes is None else start + nbytes]
        assert hf_store.read("256/000003.tar", start=start, nbytes=nbytes) == part
    buffer = bytearray(300)
    assert hf_store.read_into("256/000003.tar", memoryview(buffer), start=10_000) == 241
    with pytest.raises(NotFoundError, match="256/none: no such file"):
        hf_store.read("256/none")
    with pytest.raises(UsageError, match="not a name inside a store"):
        hf_store.read("../y")


def test_a_reader_stays_with_the_commit_that_it_has_found(
    hub: Hub, hub_dataset: str, hf_store: HubStore
) -> None:
    commit = hub.repositories[hub_dataset].commit
    commit({"data/f": b"old"})
    assert hf_store.read("f") == b"old"
    stamp = hf_store.stamp("f")
    commit({"data/f": b"new", "data/g": b"g"})
    assert hf_store.read("f") == pickle.loads(pickle.dumps(hf_store)).read("f") == b"old"
    assert (names(hf_store), hf_store.stamp("f")) == (["f"], stamp)
    later = open_store(hf_store.url)
    assert isinstance(later, HubStore)
    assert (later.read("f"), names(later)) == (b"new", ["f", "g"])
    assert later.stamp("f") != stamp


def test_nothing_is_written(hub: Hub, hub_dataset: str, hf_store: HubStore) -> None:
    step = f'publish the finished folder with "hf upload {hub_dataset} FOLDER --repo-type dataset"'
    for act in (
        lambda: write_bytes(hf_store, "f", b"x"),
        lambda: hf_store.delete("f"),
        lambda: hf_store.hold("f.hold"),
        lambda: hf_store.let_go("f.hold"),
    ):
        with one_line_error(UsageError, hf_store.url, "the hub is only read", step):
            act()
    assert hf_store.sweep() == (0, 0)
    assert hub.requests == []


def test_attempts_are_made_and_the_address_of_a_file_is_asked_for_once(
    hub: Hub, hub_dataset: str, hf_store: HubStore
) -> None:
    hub.repositories[hub_dataset].commit({"data/a.tar": DATA, "data/a.json": b"{}"})
    left = [2]

    def busy(_method: str, path: str) -> Answer | None:
        left[0] -= "far" in path
        return (503, {}, b"") if "far" in path and left[0] >= 0 else None

    hub.before = busy
    assert [hf_store.read("a.tar", start=n, nbytes=9) for n in (0, 5, 50)] == [
        DATA[n : n + 9] for n in (0, 5, 50)
    ]
    assert len([path for path in hub.requests if "/resolve/" in path]) == 1
    assert hf_store.read("a.json", start=1) == b"}"


def test_a_range_that_is_not_the_one_asked_for_is_an_error(
    hub: Hub, hub_dataset: str, hf_store: HubStore
) -> None:
    hub.repositories[hub_dataset].commit({"data/a.tar": DATA})
    hub.before = lambda _method, path: (
        (206, {"Content-Range": "bytes 0-2/9999"}, b"abc") if "far" in path else None
    )
    with pytest.raises(StoreError, match="does not keep to ranges"):
        hf_store.read("a.tar", start=5, nbytes=3)


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_children_forked_while_other_threads_read_wait_for_nobody(
    hub: Hub, hub_dataset: str, hf_store: HubStore
) -> None:
    """Such as one of them that had a lock of the connections."""
    hub.repositories[hub_dataset].commit({"data/a.tar": DATA})
    over = threading.Event()

    def read_on() -> None:
        while not over.is_set():
            assert hf_store.read("a.tar", start=5) == DATA[5:]

    def child(start: int) -> None:
        assert hf_store.read("a.tar", start=start) == DATA[start:]

    assert hf_store.read("a.tar") == DATA  # all is imported
    forking = multiprocessing.get_context("fork")
    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read_on) for _ in range(4)]
        try:
            for number in range(10):
                process = forking.Process(target=child, args=(number,))
                process.start()
                process.join(20)
                code = process.exitcode
                process.kill()
                process.join()
                assert code == 0, "it hangs" if code is None else "it failed"
        finally:
            over.set()
    assert [reader.result() for reader in readers] == [None] * 4


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("hf://models/a/b/x", UsageError, "only datasets of the hub are taken"),
        ("hf://a/b", UsageError, "give hf://datasets/OWNER/NAME"),
        ("hf://datasets/a", UsageError, "give hf://datasets/OWNER/NAME"),
        ("hf://datasets/tests/none", NotFoundError, "no such dataset"),
        ("hf://datasets/{}@none", NotFoundError, "no such revision"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(
    hub_dataset: str, url: str, error: type[Exception], said: str
) -> None:
    with one_line_error(error, said):
        open_store(url.format(hub_dataset)).read("f")


def test_a_commit_or_a_branch_is_read_by_its_name(hub: Hub, hub_dataset: str) -> None:
    commit = hub.repositories[hub_dataset].commit({"f": b"old"})
    hub.repositories[hub_dataset].commit({"f": b"new"})
    store = open_store(f"hf://datasets/{hub_dataset}@{commit}")
    assert (store.read("f"), store.url) == (b"old", f"hf://datasets/{hub_dataset}@{commit}")
    branch = open_store(f"hf://datasets/{hub_dataset}@other%2Fbranch")
    assert branch.read("f") == b"new"


def test_without_a_token_the_error_says_where_one_goes(
    hub_dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises((AccessError, NotFoundError), match="HF_TOKEN"):
        open_store(f"hf://datasets/{hub_dataset}").read("f")
