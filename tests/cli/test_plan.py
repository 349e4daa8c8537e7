"""A plan is arithmetic on counts and what a trial measured; its sizes are those of the format."""

import io
import re
from pathlib import Path

import pytest
from PIL import Image

import wdsprep
from tests.kit.command_lines import CommandLine
from tests.kit.encodes import encode_here, packed, pictures
from tests.kit.packs import jpeg, manifest_of, pack, packing_here, write_files
from tests.kit.paths import ROOT
from wdsprep.dataset.npy_arrays import Field
from wdsprep.dataset.tar import BLOCK, END, padded
from wdsprep.dataset.tar.write import TarWriter
from wdsprep.encoding.models.presets import PRESETS, TIME_IDS
from wdsprep.encoding.sample_arrays import sample_nbytes
from wdsprep.text import human_bytes

COUNTS = ("plan", "--counts", "256=490M,512=300M")


@pytest.mark.parametrize("latents", ["sample", "moments"])
@pytest.mark.parametrize("text", ["emb", "tokens", "none"])
@pytest.mark.parametrize("flip", [False, True])
def test_a_sample_takes_what_it_takes_in_a_tar(latents: str, text: str, flip: bool) -> None:
    shape = (8 if latents == "moments" else 4, 32, 32)
    names = ("latent.npy", "latent_flipped.npy") if flip else ("latent.npy",)
    fields = [Field(name=name, dtype="<f2", shape=shape) for name in names]
    if text == "emb":
        fields.append(Field(name="emb.npy", dtype="<f2", shape=(77, 1024)))
    if text == "tokens":
        fields.append(Field(name="tokens.npy", dtype="<i4", shape=(77,)))
    tar = TarWriter(io.BytesIO())
    arrays = [(field.name, field.header + bytes(field.array_nbytes)) for field in fields]
    tar.add("000000000001", [*arrays, ("json", b"{}"), ("txt", b"a caption")])
    assert tar.nbytes == sample_nbytes(256, latents=latents, flip=flip, text=text)


def test_sizes_of_images_that_a_denoiser_takes_are_stored_without_text_too() -> None:
    with_sizes, without = (sample_nbytes(512, name, text="none") for name in ("sdxl", "sd1"))
    assert with_sizes - without == BLOCK + padded(TIME_IDS.nbytes)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("roles", [("target", "source", "mask"), ("source",)])
def test_a_sample_takes_what_encode_stores_of_its_images_in_roles(
    roles: tuple[str, ...], flip: bool, tmp_path: Path, command: CommandLine
) -> None:
    for role in ("target", "source"):
        write_files(tmp_path / role, {"0.jpg": jpeg(8, (64, 64)), "0.txt": "a red cat"})
    (tmp_path / "mask").mkdir()
    Image.new("L", (64, 64), 255).save(tmp_path / "mask/0.png")
    images = tmp_path / "images"
    more = [f"{role}={tmp_path / role}" for role in ("source", "mask")]
    with packing_here():
        wdsprep.pack(
            tmp_path / "target", images, role=more, buckets=(64,), min_caption=0, workers=1
        )
    encode_here(images, tmp_path / "out", roles=roles, flip=flip, text="none")
    manifest = manifest_of(tmp_path / "out")
    nbytes = sample_nbytes(64, "tiny", roles=roles, flip=flip, text="none")
    assert manifest.nbytes == nbytes + len(END)
    words = ("plan", images, "--roles", ",".join(roles), "--text", "none", "--resolution", 64)
    words += ("--flip",) * flip
    (phase,) = command(*words, "--json").facts["phases"]
    assert phase["nbytes_written"] == sample_nbytes(64, roles=roles, flip=flip, text="none")
    assert f"--roles {','.join(roles)} --limit" in command(*words).lines[-1]
    told = "has no images in the role control, only in target, source, mask"
    assert told in command("plan", images, "--roles", "target,control", code=2).err


def test_a_trial_says_the_speed_and_the_bytes_of_a_sample_and_the_whole_run_takes_it_away(
    tmp_path: Path, command: CommandLine
) -> None:
    images = packed(pictures(tmp_path / "pictures", range(6)), tmp_path / "images")
    latents = tmp_path / "latents"
    encode_here(images, latents, limit=4)
    trial = manifest_of(latents).extra["trial"]
    assert trial["device"] == "cpu"
    assert 0 < trial["busy"] <= 1
    encode_here(images, latents, limit=4)
    manifest = manifest_of(latents)
    assert manifest.extra["trial"] == trial
    own = ("plan", images, "--trial", latents)
    (phase,) = command(*own, "--gpus", 2, "--price", 3, "--json").facts["phases"]
    assert (phase["resolution"], phase["samples"], phase["rate"]) == (64, 6, trial["each"])
    assert phase["gpu_hours"] == pytest.approx(6 / trial["each"] / 3600)
    assert phase["wall_hours"] == phase["gpu_hours"] / 2
    assert phase["dollars"] == phase["gpu_hours"] * 3
    assert phase["nbytes_written"] == round(6 * manifest.nbytes / manifest.samples)
    shards = manifest_of(images).shards
    assert (phase["nbytes_read"], phase["shards"]) == (sum(s.nbytes for s in shards), len(shards))
    first, second, *_ = command(*COUNTS, "--trial", latents, "--gpus", 2).lines
    assert first == "resolution 64: 790,000,000 images"
    assert second == (
        f"  speed     {trial['each']:,.1f} images/s for a GPU (measured in {latents}: tiny on cpu, "
        f"busy {trial['busy']:.0%} of the time)"
    )
    told = "no --trial was made at 256: wdsprep encode shards/images trial --res"
    assert told in command(*COUNTS, "--trial", latents, "--resolution", "64,256", code=2).err
    scaled = tmp_path / "scaled"
    encode_here(images, scaled, limit=4, upscale=1.5)
    words = ("plan", "--counts", "42=1,43=10,64=100", "--trial", scaled, "--json")
    assert command(*words).facts["phases"][0]["samples"] == 110, "43 x 1.5 is over 64"
    encode_here(images, latents)
    assert manifest_of(latents).extra == {"model": "tiny"}
    assert "is not a trial" in command(*own, code=2).err


def test_without_a_trial_bytes_are_told_and_what_others_published(command: CommandLine) -> None:
    lines = command(*COUNTS).lines
    assert lines[:2] == [
        "resolution 256: 790,000,000 images",
        "  bytes     134.3 TB written in 79,000 shards: 170.0 kB a sample of sd2",
    ]
    assert lines[3] == "resolution 512: 300,000,000 images"
    assert "58 images a second for each A100" in lines[-2]
    assert lines[-1].startswith(
        "to measure a GPU of yours: wdsprep encode shards/images trial --re"
    )
    assert command(*COUNTS, "--latents", "none").lines[0] == "text: 790,000,000 images"


def test_a_dataset_has_the_images_that_are_large_enough_at_any_resolution(
    tmp_path: Path, command: CommandLine
) -> None:
    sizes = [(300, 400), (520, 600), (800, 900), (1100, 1024)]
    files = {f"{number}.jpg": jpeg(number, size) for number, size in enumerate(sizes)}
    source = write_files(tmp_path / "pictures", files)
    images = pack(source, tmp_path / "my set", "--buckets", "256,512")
    phases = command("plan", images, "--resolution", "256,512,768,1024", "--json").facts["phases"]
    found = [(phase["resolution"], phase["samples"], phase["shards"]) for phase in phases]
    assert found == [(256, 4, 2), (512, 3, 1), (768, 2, 1), (1024, 1, 1)]
    last = command("plan", images).lines[-1]
    assert last.endswith(f"wdsprep plan '{images}' --trial trial")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a dataset of images, or --counts"),
        (["--counts", "256"], "write 256=490M,512=300M"),
        (["--counts", "256=0"], "no image is large enough for 256, 512: give a smaller"),
        (["--counts", "256=1M", "--resolution", "512"], "no image is large enough for 512"),
        (
            ["--counts", "256=1M", "--latents", "none", "--flip"],
            "--flip is for images, of which --latents none encodes none",
        ),
        (
            ["--counts", "256=1M", "--latents", "none", "--roles", "source"],
            "--roles is for images, of which --latents none",
        ),
        (["--counts", "256=1M", "--model", "tiny"], "--model 'tiny': give one of sd1"),
        (
            ["--counts", "256=1M", "--model", "sana", "--latents", "moments"],
            "--latents moments: the VAE of sana gives no distribution",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(words: list[str], said: str, command: CommandLine) -> None:
    assert said in command("plan", *words, code=2).err


@pytest.mark.parametrize("model", [name for name in PRESETS if name != "tiny"])
def test_each_model_can_be_planned_at_any_size(model: str, command: CommandLine) -> None:
    words = ("plan", "--counts", "1024=1M", "--resolution", "256,512,1024", "--model", model)
    phases = command(*words, "--json").facts["phases"]
    assert [phase["resolution"] for phase in phases] == [256, 512, 1024]
    written = [phase["nbytes_written"] for phase in phases]
    assert written == sorted(written)


def test_the_page_says_what_a_sample_of_each_model_takes() -> None:
    page = (ROOT / "wdsprep/encoding/README.md").read_text()
    rows = re.findall(r"^\| `([\w.-]+)` \| `emb` .* \| (.+) \| (.*) \|$", page, re.MULTILINE)
    assert [model for model, *_ in rows] == [name for name in PRESETS if name != "tiny"]
    for model, *sizes in rows:
        nbytes = [sample_nbytes(512, model, tokens=tokens) for tokens in (10**6, 60)]
        longest, short = (human_bytes(n) if n >= 10**6 else f"{n / 1000:.0f} kB" for n in nbytes)
        assert sizes == [longest, short if PRESETS[model].is_trimmed else ""], model
