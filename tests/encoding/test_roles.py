"""Images in roles become arrays beside the target's: references, control images and masks."""

import io
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

import wdsprep
from tests.encoding.test_references import picture
from tests.kit.encodes import encode_here, latents_of
from tests.kit.packs import manifest_of, packing_here, tree, write_files

Family = Callable[[str], Path]
SIZES = ((96, 64), (70, 90), (64, 64), (120, 70), (66, 64))
CAPTIONS = ("make it red", "", "a dog " * 9, "two cats", "snow")


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def mask(number: int, size: tuple[int, int]) -> Image.Image:
    return Image.frombytes("L", size, random.Random(number).randbytes(size[0] * size[1]))


def scaled(size: tuple[int, int], share: float) -> tuple[int, int]:
    return round(size[0] * share), round(size[1] * share)


Images = Mapping[str, Iterable[Image.Image | None]]


def pack_images(root: Path, images: Images, *optional: str) -> Path:
    """Pack samples whose images in each role, `target` among them, are these, as PNG."""
    files: dict[str, bytes | str] = {}
    for role, pictures in images.items():
        for number, image in enumerate(pictures):
            if image is not None:
                files[f"{role}/{number}.png"] = png(image)
    for number, caption in enumerate(CAPTIONS):
        files[f"target/{number}.txt"] = caption
    write_files(root / "in", files)
    roles = [f"{role}={root}/in/{role}" for role in images if role != "target"]
    with packing_here():
        wdsprep.pack(
            root / "in/target", root / "images", role=roles, optional_role=optional, workers=1,
            buckets=(64,), samples_per_shard=3,
        )  # fmt: skip
    return root / "images"


def targets() -> list[Image.Image]:
    return [picture(size, number) for number, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five samples with a target, a source of its ratio, and of all but one a mask."""
    sources = [picture(scaled(size, 1.5), 10 + n) for n, size in enumerate(SIZES)]
    masks = [None if n == 2 else mask(n, size) for n, size in enumerate(SIZES)]
    images = {"target": targets(), "source": sources, "mask": masks}
    return pack_images(tmp_path_factory.mktemp("pairs"), images, "mask")


def test_two_roles_in_one_pass_are_what_each_is_alone(pairs: Path, tmp_path: Path) -> None:
    both = encode_here(pairs, tmp_path / "both", roles="target,source,mask")
    assert both.samples == 5
    settings = manifest_of(tmp_path / "both").settings
    assert settings["roles"] == ["target", "source", "mask"]
    assert settings["role_sizes"] == {"source": "aligned", "mask": "latent"}
    encode_here(pairs, tmp_path / "targets")
    encode_here(pairs, tmp_path / "sources", roles="source", text="none")
    encode_here(pairs, tmp_path / "again", roles=("target", "source", "mask"))
    assert tree(tmp_path / "again") == tree(tmp_path / "both")
    alone = {name: latents_of(tmp_path / name) for name in ("both", "targets", "sources")}
    for key, sample in alone["both"].items():
        facts = sample["json"]
        assert (facts["source_width"], facts["source_height"]) == (64, 64)
        names = ["latent.npy", "source.npy", *(["mask.npy"] if "mask.npy" in sample else [])]
        assert [*sample] == [*names, "emb.npy", "json", "txt"]
        for name, array in alone["targets"][key].items():
            if name.endswith("npy"):
                assert np.array_equal(sample[name], array)
        source = alone["sources"][key]["source.npy"]
        assert np.array_equal(sample["source.npy"], source)
        assert source.dtype == np.float16
        assert source.shape == sample["latent.npy"].shape
    assert not any("latent.npy" in sample for sample in alone["sources"].values())
    rows = pq.read_table(next((tmp_path / "both").glob("*/*.parquet"))).to_pydict()
    assert rows["source_width"] == [64, 64, 64]
    assert rows["mask_width"] == [64, 64, None]
