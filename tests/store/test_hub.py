"""What is written for the hub waits, and is one commit when it is whole."""

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kit.hub import Answer, Hub
from tests.kit.stores import names, one_line
from wdsprep.errors import AccessError, NotFoundError, StoreError, UsageError
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes
from wdsprep.store.hub.hub_store import HubStore

DATA = bytes(range(256)) * 40
Elsewhere = Callable[..., HubStore]


@pytest.fixture
def elsewhere(
    hub_dataset: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Elsewhere:
    """Opens the dataset as another machine does."""

    def opened(number: int = 0) -> HubStore:
        with monkeypatch.context() as patch:
            folder = tmp_path_factory.mktemp(f"machine-{number}")
            patch.setenv("HF_HOME", str(folder))
            return HubStore(f"hf://datasets/{hub_dataset}/data", first_pause_s=0.01)

    return opened


def staged_files() -> list[Path]:
    """Return the files of datasets that wait on this machine until they are published."""
    found = Path(os.environ["HF_HOME"], "wdsprep").glob("*/files/**/*")
    return [path for path in found if path.is_file()]


def test_others_see_nothing_until_all_is_published_in_one_commit(
    hub: Hub, hub_dataset: str, hf_store: HubStore, elsewhere: Elsewhere
) -> None:
    commits = hub.repositories[hub_dataset].trees
    for number in range(12):  # more than a page of a listing
        write_bytes(hf_store, f"256/{number:06d}.tar", DATA + b"%d" % number)
    write_bytes(hf_store, "receipts/0.json", b"{}")
    assert (len(commits), names(elsewhere())) == (1, [])
    assert len(staged_files()) == 13
    with hf_store.hold("receipts/1.hold"):
        hf_store.publish()
    there = elsewhere()
    assert (
        names(there)
        == names(hf_store)
        == [*(f"256/{n:06d}.tar" for n in range(12)), "receipts/0.json"]
    )
    assert there.read("256/000003.tar", start=250, nbytes=10) == DATA[250:260]
    assert len(commits) == 2
    hf_store.publish()
    assert len(commits) == 2
    assert staged_files() == []


def test_a_reader_stays_with_the_commit_that_it_has_found(
    hf_store: HubStore, elsewhere: Elsewhere
) -> None:
    write_bytes(hf_store, "f", b"old")
    hf_store.publish()
    reader = elsewhere()
    assert reader.read("f") == b"old"
    write_bytes(hf_store, "f", b"new")
    hf_store.delete("none")
    hf_store.publish()
    assert reader.read("f") == pickle.loads(pickle.dumps(reader)).read("f") == b"old"
    assert (hf_store.read("f"), elsewhere(1).read("f")) == (b"new", b"new")


def test_a_run_that_was_killed_goes_on_with_what_waits(
    hf_store: HubStore, elsewhere: Elsewhere
) -> None:
    write_bytes(hf_store, "256/000000.tar", DATA)
    again = open_store(hf_store.url)
    assert again.read("256/000000.tar") == DATA
    again.publish()
    assert names(elsewhere()) == names(hf_store) == ["256/000000.tar"]


def test_what_is_deleted_is_gone_with_the_commit(hf_store: HubStore, elsewhere: Elsewhere) -> None:
    for name in ("a", "b.tar"):
        write_bytes(hf_store, name, DATA)
    hf_store.publish()
    hf_store.delete("b.tar")
    assert names(hf_store) == ["a"]
    with pytest.raises(NotFoundError):
        hf_store.read("b.tar")
    assert names(elsewhere()) == ["a", "b.tar"]
    write_bytes(hf_store, "b.tar", b"anew", exclusive=True)
    hf_store.delete("a")
    hf_store.publish()
    assert names(elsewhere(1)) == names(hf_store) == ["b.tar"]


def test_what_others_have_committed_meanwhile_stays(
    hf_store: HubStore, elsewhere: Elsewhere
) -> None:
    other = elsewhere()
    for store, name in ((hf_store, "a.tar"), (other, "b.tar")):
        write_bytes(store, name, DATA)
        write_bytes(store, "same", b"same")
    other.publish()
    hf_store.publish()
    assert names(hf_store) == ["a.tar", "b.tar", "same"]
    late = elsewhere(1)
    write_bytes(late, "a.tar", b"another")
    write_bytes(hf_store, "a.tar", b"a third")
    hf_store.publish()
    with pytest.raises(StoreError) as caught:
        late.publish()
    assert one_line(caught.value, "data/a.tar: somebody has changed it", "run the same again")
    assert elsewhere(2).read("a.tar") == b"a third"


def test_a_file_that_is_published_alone_leaves_a_run_as_it_waits(
    hub_dataset: str, hf_store: HubStore, elsewhere: Elsewhere
) -> None:
    whole = HubStore(f"hf://datasets/{hub_dataset}", first_pause_s=0.01)
    write_bytes(hf_store, "a.tar", DATA)
    write_bytes(whole, "report.html", b"<html>")
    other = elsewhere()
    write_bytes(other, "a.tar", b"another")
    other.publish()
    whole.publish(["report.html"])
    assert whole.read("report.html") == b"<html>"
    with pytest.raises(StoreError, match=r"data/a.tar: somebody has changed it"):
        hf_store.publish()


def test_what_somebody_else_has_changed_meanwhile_is_not_deleted(
    hf_store: HubStore, elsewhere: Elsewhere
) -> None:
    write_bytes(hf_store, "a.tar", DATA)
    hf_store.publish()
    other = elsewhere()
    write_bytes(other, "a.tar", b"another")
    hf_store.delete("a.tar")
    other.publish()
    with pytest.raises(StoreError, match=r"data/a.tar: somebody has changed it"):
        hf_store.publish()
    assert elsewhere(1).read("a.tar") == b"another"


def test_a_commit_whose_answer_was_lost_is_not_made_twice(
    hub: Hub, hub_dataset: str, hf_store: HubStore
) -> None:
    made, lost = hub.repositories[hub_dataset].trees, [1]

    def lose(_method: str, path: str) -> Answer | None:
        return (503, {}, b"") if "/commit/" in path and lost and lost.pop() else None

    write_bytes(hf_store, "a.tar", DATA)
    hub.after = lose
    hf_store.publish()
    assert [list(tree) for tree in made.values()] == [[], ["data/a.tar"]]
    assert staged_files() == []


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


def test_a_forked_child_reads_what_its_parent_has_read(
    hub: Hub, hub_dataset: str, hf_store: HubStore
) -> None:
    hub.repositories[hub_dataset].commit({"data/a.tar": DATA})
    assert hf_store.read("a.tar") == DATA
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(hf_store.read, ("a.tar",)).get(20) == DATA


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_children_forked_while_other_threads_read_wait_for_nobody(
    hub: Hub, hub_dataset: str, hf_store: HubStore
) -> None:
    """Such as one of them that had a lock of the connections."""
    hub.repositories[hub_dataset].commit({"data/a.tar": DATA})
    over, failures = threading.Event(), list[BaseException]()

    def read_on() -> None:
        try:
            while not over.is_set():
                assert hf_store.read("a.tar", start=5) == DATA[5:]
        except BaseException as error:
            failures.append(error)
            raise

    def child(start: int) -> None:
        assert hf_store.read("a.tar", start=start) == DATA[start:]

    assert hf_store.read("a.tar") == DATA  # all is imported
    readers = [threading.Thread(target=read_on) for _ in range(4)]
    for reader in readers:
        reader.start()
    children = [
        multiprocessing.get_context("fork").Process(target=child, args=(n,)) for n in range(10)
    ]
    try:
        for one in children:
            one.start()
            one.join(20)
            assert one.exitcode == 0, "it hangs" if one.exitcode is None else "it failed"
    finally:
        over.set()
        for one in children:
            if one.pid is not None:
                one.kill()
                one.join()
        for reader in readers:
            reader.join()
    assert not failures


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
    with pytest.raises(error) as caught:
        open_store(url.format(hub_dataset)).read("f")
    assert one_line(caught.value, said)


def test_a_commit_is_read_and_not_written(hub: Hub, hub_dataset: str) -> None:
    commit = hub.repositories[hub_dataset].commit({"f": b"old"})
    hub.repositories[hub_dataset].commit({"f": b"new"})
    store = open_store(f"hf://datasets/{hub_dataset}@{commit}")
    assert (store.read("f"), store.url) == (b"old", f"hf://datasets/{hub_dataset}@{commit}")
    with pytest.raises(UsageError, match="a commit is only read"):
        write_bytes(store, "f", b"x")
    branch = open_store(f"hf://datasets/{hub_dataset}@other%2Fbranch")
    assert branch.read("f") == b"new"


def test_without_a_token_the_error_says_where_one_goes(
    hub_dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises((AccessError, NotFoundError), match="HF_TOKEN"):
        open_store(f"hf://datasets/{hub_dataset}").read("f")


def test_a_file_that_the_hub_ignores_is_an_error(hf_store: HubStore) -> None:
    write_bytes(hf_store, "f.ignored", DATA)
    with pytest.raises(StoreError, match="see whether a"):
        hf_store.publish()
