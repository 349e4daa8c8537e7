"""From images to a trainer in each place, with the bytes that a local folder gets."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import wdsprep
from tests.kit.damaged import check
from tests.kit.encodes import encode_here, packed, pictures
from tests.kit.hub import Hub
from tests.kit.packs import tree, upload
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.dataset.reindex import index
from wdsprep.dataset.stored_dataset import write_rebuilt
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes
from wdsprep.store.hub.hub_store import HubStore


@pytest.fixture(params=["gs", "az", "hf"])
def place(request: pytest.FixtureRequest) -> str:
    """The URL of an empty one."""
    names = {"gs": "gcs_bucket", "az": "container", "hf": "hub_dataset"}
    name = request.getfixturevalue(names[request.param])
    return f"hf://datasets/{name}" if request.param == "hf" else f"{request.param}://{name}"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on this disk."""
    root = tmp_path_factory.mktemp("here")
    packed(pictures(root / "in", range(18)), root / "images")
    encode_here(root / "images", root / "latents")
    return root


def keys_of(batches: Iterator[dict[str, object]]) -> list[object]:
    return [key for batch in batches for key in batch["key"]]  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_pack_encode_load_and_verify_work_in_each_place(
    place: str, here: Path, tmp_path: Path
) -> None:
    upload(here / "in", f"{place}/in")
    open_store(f"{place}/in").publish()
    packed(f"{place}/in", f"{place}/images")
    encode_here(f"{place}/images", f"{place}/latents")
    for name in ("images", "latents"):
        there = tree(f"{place}/{name}")
        assert there.keys() == tree(here / name).keys()
        shards = {n for n in there if n.endswith((".tar", ".idx"))}
        assert [n for n in shards if there[n] != (here / name / n).read_bytes()] == []
    assert check(f"{place}/images", f"{place}/latents").findings == ()
    report = wdsprep.report(f"{place}/latents", output=f"{place}/report.html", samples=2)
    assert len(open_store(place).read("report.html")) == report.nbytes
    options = {"global_batch": 4, "rank": 0, "world_size": 1, "epochs": 1, "seed": 3}
    expected = keys_of(iter(wdsprep.load(here / "latents", **options)))
    cache = {"cache": tmp_path / "cache", "cache_nbytes": 1 << 20}
    assert keys_of(iter(wdsprep.load(f"{place}/latents", **options, **cache))) == expected
    loader = wdsprep.load(f"{place}/latents", **options)
    fork = multiprocessing.get_context("fork")
    workers = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context=fork)
    assert keys_of(iter(workers)) == keys_of(iter(loader)) == expected


def test_a_run_is_one_commit_on_the_hub(hub: Hub, hub_dataset: str, here: Path) -> None:
    place, made = f"hf://datasets/{hub_dataset}", hub.repositories[hub_dataset].trees
    for _ in range(2):  # the second has nothing to do
        packed(here / "in", f"{place}/images")
        assert len(made) == 2
    assert set(list(made.values())[-1]) == {f"images/{name}" for name in tree(here / "images")}
    for to in ("wids", "energon"):
        wdsprep.export(f"{place}/images", f"{place}/{to}" if to == "wids" else "", to=to, workers=1)
    assert len(made) == 4
    assert {"wids/wids-meta.json", "images/.nv-meta/split.yaml"} <= set(list(made.values())[-1])


def test_what_other_commands_write_is_published_too(hub: Hub, hub_dataset: str, here: Path) -> None:
    place, made = f"hf://datasets/{hub_dataset}", hub.repositories[hub_dataset]
    for name in ("images", "latents"):
        upload(here / name, f"{place}/{name}")
        open_store(f"{place}/{name}").publish()
    write_bytes(open_store(f"{place}/begun"), "half.tar", b"of a run that was killed")

    def new(before: dict[str, bytes]) -> set[str]:
        return {name for name, data in made.trees[made.head].items() if before.get(name) != data}

    before = made.trees[made.head]
    card = wdsprep.card(f"{place}/images", f"{place}/latents", output=f"{place}/README.md")
    assert (new(before), card.uploads) == ({"README.md"}, ())
    assert f"# {hub_dataset.partition('/')[2]}\n" in card.text
    assert '- "latents/64/**/*.tar"' in card.text
    index_of = min(name for name in before if name.endswith(".idx"))
    for gone, again in (
        (MANIFEST, lambda: write_rebuilt(f"{place}/images")),
        (index_of.removeprefix("images/"), lambda: index(f"{place}/images")),
    ):
        store = open_store(f"{place}/images")
        store.delete(gone)
        store.publish()
        assert f"images/{gone}" not in made.trees[made.head]
        again()
        assert f"images/{gone}" in made.trees[made.head]
    found = wdsprep.inspect(f"{place}/images", "000000000000", out=f"{place}/begun")
    there = {f"{place}/{name}" for name in made.trees[made.head] if name.startswith("begun/")}
    assert {*found.written} == there
    assert f"{place}/begun/half.tar" not in there


def _killed(source: Path, images: str, target: object, name: str, calls: int) -> None:
    """A pack that dies in the last of so many calls."""
    left, real = [calls], getattr(target, name)

    def dying(*given: object, **options: object) -> object:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **options)

    setattr(target, name, dying)
    packed(source, images)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_pack_shows_nothing_on_the_hub_and_goes_on(
    hub: Hub, hub_dataset: str, here: Path
) -> None:
    images, made = f"hf://datasets/{hub_dataset}/images", hub.repositories[hub_dataset].trees
    for target, name, calls in ((HubStore, "write", 6), (HubStore, "publish", 1)):
        given = (here / "in", images, target, name, calls)
        child = multiprocessing.get_context("fork").Process(target=_killed, args=given)
        child.start()
        child.join(120)
        assert child.exitcode == -signal.SIGKILL
        assert len(made) == 1
    packed(here / "in", images)
    assert len(made) == 2
    there = {n.removeprefix("images/"): d for n, d in list(made.values())[-1].items()}
    assert there.keys() == tree(here / "images").keys()
    assert all((here / "images" / n).read_bytes() == there[n] for n in there if ".tar" in n)


def test_remove_is_one_commit_on_the_hub(hub: Hub, hub_dataset: str, here: Path) -> None:
    places = [f"hf://datasets/{hub_dataset}/{name}" for name in ("images", "latents")]
    for name, place in zip(("images", "latents"), places, strict=True):
        upload(here / name, place)
        open_store(place).publish()
    made = hub.repositories[hub_dataset].trees
    before = len(made)
    wdsprep.remove(*places, keys=["000000000000"], yes=True)
    assert len(made) - before == 2  # one of each dataset
    assert check(*places).findings == ()
