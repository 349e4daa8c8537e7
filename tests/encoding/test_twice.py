"""A second run finds all done, whatever the pipeline is, and so does one that trains first."""

from collections.abc import Callable
from pathlib import Path

import pytest

import wdsprep
from tests.kit.encodes import encode_here, packed, pictures
from tests.kit.families import each_family
from tests.kit.packs import tree

Family = Callable[[str], Path]
SIDE = 64


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("twice")
    return packed(pictures(root / "downloads", range(3)), root / "images")


@pytest.mark.parametrize("name", each_family())
def test_every_family_is_encoded_once_and_found_done(
    name: str, family: Family, images: Path, tmp_path: Path
) -> None:
    out, model = tmp_path / "out", str(family(name))
    first = encode_here(images, out, model=model, resolution=SIDE)
    before = tree(out)
    again = encode_here(images, out, model=model, resolution=SIDE)
    assert tree(out) == before
    assert again.manifest == first.manifest
    assert again.manifest.samples == 3


@pytest.mark.parametrize("name", ["Flux2Klein", "Krea2"])
def test_what_a_trainer_keeps_is_found_done_by_encode(
    name: str, family: Family, images: Path, tmp_path: Path
) -> None:
    kept, model = tmp_path / "kept", str(family(name))
    how = wdsprep.Encode(resolution=SIDE, model=model, device="cpu")
    for _ in range(2):
        list(wdsprep.load(str(images), encode=how, tee=str(kept), global_batch=3, epochs=2))
    before = tree(kept)
    assert any(path.endswith(".tar") for path in before)
    encode_here(images, kept, model=model, resolution=SIDE)
    after = tree(kept)
    assert {name: after[name] for name in before if name != "wdsprep.json"} == {
        name: data for name, data in before.items() if name != "wdsprep.json"
    }
