"""What a dataset says of itself, and one sample found without reading its shard."""

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.kit.command_lines import CommandLine
from tests.kit.damaged import pack_here, source_of_photos
from tests.kit.latent_sets import field, layout, npy, publish, write_latents, write_unit
from tests.kit.packs import manifest_of, rejects_of, tree
from wdsprep.dataset.coarse_histograms import bin_name, quantile
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.rejects import Reject
from wdsprep.dataset.samples import facts_bytes
from wdsprep.dataset.stored_dataset import open_dataset
from wdsprep.dataset.tar.read import file_tape, read_samples
from wdsprep.errors import NotFoundError, UsageError
from wdsprep.reporting.inspect import FoundSample, find_sample, inspect, member_facts
from wdsprep.reporting.overview import Overview
from wdsprep.sources.patterns import expand_braces
from wdsprep.store import open_store


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inspect")
    return pack_here(source_of_photos(root / "photos"), root / "images")


def every_sample(images: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    for shard in manifest_of(images).shards:
        with file_tape(images / shard.name) as tape:
            yield from ((s.key, s.fields) for s in read_samples(tape, shard.name))


def find(url: Path | str, key: str) -> FoundSample | Reject:
    return find_sample(*open_dataset(str(url)), key, lambda _count: None)


def test_the_screen_comes_from_the_manifest_alone(
    images: Path, tmp_path: Path, command: CommandLine
) -> None:
    (tmp_path / MANIFEST).write_bytes((images / MANIFEST).read_bytes())
    printed = command("inspect", tmp_path)
    assert "images, complete: 12 samples in 7 shards" in printed.out
    assert "14 inputs, 2 rejects (not_an_image 2)" in printed.out
    assert "characters in a caption, as ranges: 5% 16-23" in printed.out
    assert len(printed.lines) < 24
    facts = command("inspect", tmp_path, "--json").facts
    assert facts["samples"] == 12
    assert facts["phases"]["64"]["samples"] == facts["buckets"]["64"]["samples"]
    assert facts["quantiles"]["side"]["0.05"] == [32, 47]


def test_every_sample_is_found_by_its_key_as_it_lies_in_its_shard(images: Path) -> None:
    for key, fields in every_sample(images):
        found = find(images, key)
        assert isinstance(found, FoundSample)
        assert found.members == fields
        assert found.facts["json"]["key"] == key


def latents(root: Path, keys: list[list[str]]) -> str:
    """Latent shards with these keys, the arrays all of one value."""
    store, fields = open_store(str(root / "latents")), (field("latent", (2, 2)),)
    data = npy(np.array([[1, 2], [3, np.inf]], "<f2"))

    settings = {"layout": layout(fields), "resolution": 64}
    receipts = []
    for number, shard_keys in enumerate(keys):
        samples = (
            (n, key, [("latent.npy", data), ("json", facts_bytes({"key": key})), ("txt", b"")])
            for n, key in enumerate(shard_keys)
        )
        receipts.append(write_unit(store, f"64/{number:06d}", settings, samples))
    publish(store, settings, receipts, fields, complete=False)
    return store.url


def test_rules_for_sizes_of_roles_are_told_in_words(tmp_path: Path, command: CommandLine) -> None:
    rules = {"roles": ["target", "source"], "role_sizes": {"source": "aligned", "mask": "latent"}}
    url = write_latents(str(tmp_path / "pairs"), (2,), more=rules)
    said = " ".join(command("inspect", url).out.split())
    assert "role-sizes mask latent, source aligned;" in said


def test_bfloat16_is_described_by_its_numbers() -> None:
    found = member_facts("emb.npy", npy(np.array([[0x3F80, 0xC000], [0x4040, 0x4110]], "<u2")))
    assert (found["dtype"], found["shape"], found["finite"]) == ("bfloat16", [2, 2], True)
    assert (found["min"], found["max"], found["mean"]) == (-2, 9, 2.75)
    assert not member_facts("emb.npy", npy(np.array([0x7F80, 0], "<u2")))["finite"]


def test_json_that_is_no_object_states_nothing() -> None:
    members = {"json": b'["caption"]'}
    found = FoundSample(key="a", shard="a.tar", number=0, start=0, shape="", members=members)
    assert found.facts["json"] == {}


def test_arrays_are_described_and_members_written(tmp_path: Path, command: CommandLine) -> None:
    url = latents(tmp_path, [["000000000000", "000000000001"], ["some/where"]])
    said = command("inspect", url, "000000000001", "-o", tmp_path / "out").out
    assert "float16 2 x 2: min 1, max 3, mean 2" in said
    assert "not finite" in said
    assert sorted(tree(tmp_path / "out")) == [
        f"000000000001.{name}" for name in ("json", "latent.npy", "txt")
    ]
    facts = command("inspect", url, "some/where", "-o", tmp_path / "more", "--json").facts
    assert facts["shard"] == "64/000001.tar"
    assert "where.latent.npy" in tree(tmp_path / "more")


def test_a_place_that_members_cannot_be_written_to_is_named(
    images: Path, tmp_path: Path, command: CommandLine
) -> None:
    (tmp_path / "file").touch()
    key = next(iter(every_sample(images)))[0]
    file, none = tmp_path / "file", Path("/proc/none")
    for place, named in ((file, file), (file / "more", file), (none, none)):
        said = command("inspect", images, key, "-o", place, code=1).err
        assert f"{named} is not a folder, and none can be made there: choose another" in said


def test_a_place_without_a_manifest_says_what_to_do(
    images: Path, tmp_path: Path, command: CommandLine
) -> None:
    with pytest.raises(NotFoundError, match="give the folder or URL that pack or encode wrote"):
        inspect(tmp_path)
    with pytest.raises(UsageError, match=rf"holds some: give one of them \({images}\)"):
        inspect(images.parent)
    copied = tmp_path / "copied"
    shutil.copytree(images, copied, ignore=shutil.ignore_patterns(MANIFEST))
    with pytest.raises(UsageError, match=rf'lost its {MANIFEST}: run "wdsprep rebuild {copied}"'):
        inspect(copied)
    command("rebuild", copied)
    assert inspect(copied).manifest.samples == inspect(images).manifest.samples


def test_a_rejected_key_says_why(images: Path, command: CommandLine) -> None:
    key = rejects_of(images)[0]["key"]
    assert f"{key} is a reject (not_an_image)" in command("inspect", images, key).out


def test_the_patterns_stand_for_exactly_the_shards(images: Path) -> None:
    manifest = manifest_of(images)
    every = [f"{images}/{shard.name}" for shard in manifest.shards]
    short = Overview(dataset=str(images), manifest=manifest).patterns
    assert [url for pattern in short for url in expand_braces(pattern)] == every
    assert f"{images}/64/{{000000..000003}}.tar" in short
    assert inspect(str(images)).patterns == short
    assert inspect(str(images)).urls == every
    first, _, *others = manifest.receipts
    left = (first, *others)
    without = Manifest(dataset="images", settings=manifest.settings, receipts=left)
    listed = Overview(dataset=str(images), manifest=without).patterns
    listed = [url for pattern in listed for url in expand_braces(pattern)]
    assert listed == [url for url in every if "000001" not in url]


def test_a_quantile_is_the_range_that_holds_it() -> None:
    numbers = [0, 1, 2, 3, 5, 40, 300, 511, 512, 4_000]
    counts = Counter(bin_name("side", number) for number in numbers)
    for place, number in enumerate(numbers, 1):
        ends = quantile(counts, "side", place / len(numbers))
        assert ends is not None
        assert ends[0] <= number <= ends[1] <= max(2 * ends[0], 0)
    assert quantile(counts, "caption", 0.5) is None
