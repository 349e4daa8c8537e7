"""From images to a trainer in each place, with the bytes that a local folder gets."""

import multiprocessing
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import wdsprep
from tests.kit.command_lines import CommandLine
from tests.kit.damaged import check
from tests.kit.encodes import encode_here, packed, pictures
from tests.kit.hub import Hub
from tests.kit.packs import tree, upload
from wdsprep.store import open_store


@pytest.fixture(params=["gs", "az"])
def place(request: pytest.FixtureRequest) -> str:
    """The URL of an empty one."""
    name = request.getfixturevalue({"gs": "gcs_bucket", "az": "container"}[request.param])
    return f"{request.param}://{name}"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on this disk."""
    root = tmp_path_factory.mktemp("here")
    packed(pictures(root / "in", range(18)), root / "images")
    encode_here(root / "images", root / "latents")
    return root


def check_loaded(latents: str, here: Path, cache: Path) -> None:
    """Load latents with a cache, here and in workers: each time as from this disk."""
    options = {"global_batch": 4, "rank": 0, "world_size": 1, "epochs": 1, "seed": 3}
    loader = wdsprep.load(latents, **options)
    cached = wdsprep.load(latents, **options, cache=cache, cache_nbytes=1 << 20)
    fork = multiprocessing.get_context("fork")
    workers = DataLoader(loader, batch_size=None, num_workers=2, multiprocessing_context=fork)
    expected = [batch["key"] for batch in wdsprep.load(here / "latents", **options)]
    for batches in (cached, workers, loader):
        assert [batch["key"] for batch in batches] == expected


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_pack_encode_load_and_verify_work_in_each_place(
    place: str, here: Path, tmp_path: Path
) -> None:
    upload(here / "in", f"{place}/in")
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
    check_loaded(f"{place}/latents", here, tmp_path / "cache")


def test_a_dataset_on_the_hub_is_read_as_it_was_uploaded(
    hub: Hub, hub_dataset: str, here: Path, tmp_path: Path
) -> None:
    place, repository = f"hf://datasets/{hub_dataset}", hub.repositories[hub_dataset]
    files = {"README.md": b"# Cats\n", ".gitattributes": b"*.tar filter=lfs\n"}
    names = ("in", "images", "latents")
    files |= {f"{name}/{file}": data for name in names for file, data in tree(here / name).items()}
    repository.commit(files)
    images, latents = f"{place}/images", f"{place}/latents"
    encode_here(images, tmp_path / "latents")
    assert tree(tmp_path / "latents") == tree(here / "latents")
    assert tree(packed(f"{place}/in", tmp_path / "images")).keys() == tree(here / "images").keys()
    assert check(images, latents).findings == ()
    assert wdsprep.inspect(images, where="width >= 64").samples
    wdsprep.select(latents, tmp_path / "some", count=3, workers=1)
    card = wdsprep.card(images, latents, output=tmp_path / "card.md")
    assert card.uploads[-1].endswith(f"{tmp_path}/card.md README.md --repo-type dataset")
    found = wdsprep.duplicates(images, hashes=tmp_path / "hashes", workers=1)
    assert found.samples == 18
    expected = wdsprep.duplicates(here / "images", hashes=tmp_path / "local", workers=1)
    assert tree(tmp_path / "hashes/images") == tree(tmp_path / "local/images")
    assert (found.equal, found.near) == (expected.equal, expected.near)
    check_loaded(latents, here, tmp_path / "cache")


@pytest.mark.parametrize(
    ("words", "step"),
    [
        ("pack HERE/in HF/new", "hf upload"),
        ("encode HERE/images HF/new --resolution 64 --model tiny", "hf upload"),
        ("select HERE/images HF/new", "hf upload"),
        ("export HERE/latents HF/mds --to mds", "hf upload"),
        ("export HF/images --to energon", "hf upload"),
        ("inspect HERE/images 000000000000 -o HF/sample", "hf upload"),
        ("report HERE/images -o HF/report.html --model none", "hf upload"),
        ("card HERE/images -o HF/README.md", "hf upload"),
        ("remove HF/images --keys 000000000000 --yes", "hf upload"),
        ("index HF/images", "hf upload"),
        ("rebuild HF/images", "hf upload"),
        ("duplicates HF/images", "another folder with --hashes"),
        ("duplicates HERE/images --hashes HF/kept --workers 1", "another folder with --hashes"),
    ],
)
def test_what_would_be_written_to_the_hub_is_refused_in_one_line(
    words: str, step: str, hub: Hub, hub_dataset: str, here: Path, command: CommandLine
) -> None:
    files = tree(here / "images")
    if words.startswith("index"):  # it writes what is missing
        files.pop(min(name for name in files if name.endswith(".idx")))
    repository = hub.repositories[hub_dataset]
    repository.commit({f"images/{name}": data for name, data in files.items()})
    there = words.replace("HERE", str(here)).replace("HF", f"hf://datasets/{hub_dataset}")
    (said,) = command(*there.split(), "-q", code=2).err.splitlines()
    assert "the hub is only read" in said
    assert step in said
    assert not any(method in request for request in hub.requests for method in ("POST", "PUT"))
