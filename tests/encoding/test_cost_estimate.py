"""A plan is arithmetic on counts and speeds; its sizes are those of the real format."""

import io
import json
from pathlib import Path

import pytest

from tests.kit.encodes import encode_here, packed, pictures
from tests.kit.packs import manifest_of
from wdsprep.cli import main
from wdsprep.dataset.npy_arrays import Field
from wdsprep.dataset.tar.write import TarWriter
from wdsprep.encoding.cost_estimate import (
    Bucket,
    Choice,
    Fleet,
    Speed,
    count_puts,
    estimate,
    estimate_one_run,
    gflops,
    sample_nbytes,
)
from wdsprep.encoding.models.presets import PRESETS
from wdsprep.store.s3.uploads import PART_NBYTES

COUNTS = {256: Bucket(samples=490_000_000), 512: Bucket(samples=300_000_000)}
SPEEDS = {256: Speed(each=100, source="given"), 512: Speed(each=25, source="given")}


def test_a_phase_counts_the_images_of_its_buckets_and_those_above() -> None:
    small, large = estimate(COUNTS, SPEEDS, Choice(), Fleet(devices=48, price=1.5))
    assert (small.resolution, small.samples) == (256, 790_000_000)
    assert (large.resolution, large.samples) == (512, 300_000_000)
    assert small.device_hours == pytest.approx(790e6 / 100 / 3600)
    assert small.wall_hours == pytest.approx(small.device_hours / 48)
    assert small.dollars == pytest.approx(1.5 * small.device_hours)
    assert small.shards == 79_000
    assert estimate(COUNTS, SPEEDS, Choice(), Fleet())[0].dollars is None


@pytest.mark.parametrize("latents", ["sample", "moments"])
@pytest.mark.parametrize("text", ["emb", "tokens", "none"])
@pytest.mark.parametrize("flip", [False, True])
def test_a_sample_takes_what_it_takes_in_a_tar(latents: str, text: str, flip: bool) -> None:
    choice = Choice(latents=latents, flip=flip, text=text)
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
    assert tar.nbytes == sample_nbytes(256, choice)


def test_an_object_goes_up_in_the_parts_of_the_store() -> None:
    assert count_puts(PART_NBYTES) == 1
    assert count_puts(PART_NBYTES + 1) == 2 + 2
    assert count_puts(10 * PART_NBYTES) == 2 + 10


def test_a_trial_leaves_its_speed_and_the_whole_run_takes_it_away(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    images = packed(pictures(tmp_path / "pictures", range(6)), tmp_path / "images")
    latents = tmp_path / "latents"
    encode_here(images, latents, limit=4)
    trial = manifest_of(latents).extra["trial"]
    assert trial["device"] == "cpu"
    assert 0 < trial["busy"] <= 1
    encode_here(images, latents, limit=4)
    assert manifest_of(latents).extra["trial"] == trial
    capfd.readouterr()
    assert main(["plan", str(images), "--trial", str(latents), "--json"]) == 0
    phase, larger = json.loads(capfd.readouterr().out)["phases"]
    assert larger["speed"]["source"].endswith("scaled by the operations")
    assert phase["samples"] == 6
    assert phase["speed"] == {
        "each": trial["each"],
        "source": f"measured with tiny on cpu at 64, busy {trial['busy']:.0%}",
    }
    encode_here(images, latents)
    assert manifest_of(latents).extra == {"model": "tiny"}
    assert main(["plan", str(images), "--trial", str(latents)]) == 2
    assert "is not a trial" in capfd.readouterr().err


def test_the_table_knows_four_gpus_and_scales_by_operations(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--counts", "256=490M,512=300M", "--gpus", "48"]
    assert main([*words, "--gpu", "a10g"]) == 0
    said = capfd.readouterr().out
    assert "phase 256: 790,000,000 images" in said
    assert "93 images/s a GPU (derived for A10G, not measured)" in said
    assert "2,359.6 GPU hours, $2,374; 2.0 days on 48" in said
    assert main([*words, "--gpu", "a10g", "--text", "none"]) == 0
    assert "108 images/s" in capfd.readouterr().out  # 45.1 of 317.8 GFLOPs are the text's
    assert main([*words, "--gpu", "a10g", "--flip"]) == 0
    said = capfd.readouterr().out
    assert "50 images/s" in said  # of 590.5 GFLOPs with the mirror image
    assert "flip      7.3 TB (5% of what is written); the VAE's work twice" in said
    assert main(["plan", "--counts", "256=1M,512=0", "--gpu", "a10g"]) == 0
    assert "phase 512" not in capfd.readouterr().out
    assert main([*words, "--rate", "512=30.5"]) == 0
    said = capfd.readouterr().out
    assert "phase 256" not in said.splitlines()[0]
    assert "30 images/s a GPU (given)" in said


def test_the_published_runs_are_planned(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--published"]) == 0
    said = capfd.readouterr().out
    assert "estimated 1,633 A100 hours" in said
    assert "published 3,784 A100 hours: 2.3 times as many" in said
    assert "estimated 5,974 A10G hours, 5.2 days on 48" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give a dataset of images, or --counts"),
        (["--counts", "256=1M"], "give a --gpu of the table, --rate"),
        (["--counts", "256"], "write 256=490M,512=300M"),
        (["--counts", "256=0", "--gpu", "A100"], "no images to plan for"),
        (
            ["--counts", "256=1M", "--gpu", "A100", "--latents", "none", "--flip"],
            "--flip is for images, of which --latents none encodes none",
        ),
        (["--counts", "256=1M", "--gpu", "V100"], "is not in the table (A10G, A100, H100, H200)"),
        (
            ["--counts", "256=1M", "--gpu", "A100", "--model", "tiny"],
            "--model 'tiny': give one of sd1",
        ),
        (
            ["--counts", "256=1M", "--gpu", "A100", "--model", "sana", "--latents", "moments"],
            "--latents moments: the VAE of sana gives no distribution",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert said in capfd.readouterr().err


def operations(side: int, model: str = "sd2", text: str = "emb", tokens: int = 60) -> float:
    return gflops(side, Choice(model=model, text=text, tokens=tokens))


def test_operations_are_those_counted_and_attention_grows_with_the_square_of_pixels() -> None:
    found = [operations(side, text="none") for side in (256, 512, 1024)]
    assert found == pytest.approx([272.7, 1116.7, 1.093 * 4 * 1116.7], rel=1e-3)
    texts = [operations(256, name) - operations(256, name, "none") for name in ("sd1", "sd2")]
    assert texts == pytest.approx([13.3, 45.1], abs=0.05)


def test_only_a_tower_that_pads_to_no_length_saves_on_short_captions() -> None:
    assert operations(256, "qwen-image", tokens=20) < operations(256, "qwen-image", tokens=200)
    assert operations(256, "flux", tokens=20) == operations(256, "flux", tokens=200)
    few, many = (operations(256, "sana", "tokens", tokens) for tokens in (20, 200))
    assert few == many == operations(256, "sana", "none")


@pytest.mark.parametrize("model", [name for name in PRESETS if name != "tiny"])
def test_each_model_can_be_planned_at_any_size(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--counts", "256=1M,512=1M,1024=1M", "--gpu", "A100", "--model", model]
    assert main([*words, "--json"]) == 0
    phases = json.loads(capfd.readouterr().out)["phases"]
    assert [phase["resolution"] for phase in phases] == [256, 512, 1024]
    speeds = [phase["speed"]["each"] for phase in phases]
    assert speeds == sorted(speeds, reverse=True)
    assert all(0 < phase["text_share"] < 1 for phase in phases)
    assert all(0 < phase["text_nbytes"] < phase["nbytes_written"] for phase in phases)


def test_phases_in_one_run_read_each_image_and_encode_each_caption_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    fleet = Fleet(devices=48, price=1.5)
    small, large = estimate(COUNTS, SPEEDS, Choice(), fleet)
    one_run = estimate_one_run([small, large], Choice(), fleet)
    assert one_run.device_hours == pytest.approx(
        small.device_hours + (1 - large.text_share) * large.device_hours
    )
    assert one_run.wall_hours == pytest.approx(one_run.device_hours / 48)
    assert one_run.dollars == pytest.approx(one_run.device_hours * 1.5)
    assert one_run.nbytes_read == small.nbytes_read
    bare = [sample_nbytes(side, Choice(text="none")) for side in (256, 512)]
    text = sample_nbytes(256, Choice(latents="none"))
    assert one_run.nbytes_written_text_once == 790e6 * (bare[0] + text) + 300e6 * bare[1]
    assert one_run.nbytes_written_text_once < 0.8 * one_run.nbytes_written
    words = ["plan", "--counts", "256=490M,512=300M", "--gpu", "a10g"]
    assert main(words) == 0
    said = capfd.readouterr().out
    assert "all in one run (--resolution 256,512):" in said
    assert "110.8 TB read, apart 189.4 TB; 192.7 TB written" in said
    assert "stored once (--text-out): 146.7 TB written" in said
    assert main([*words, "--latents", "none"]) == 0  # one run as it is
    assert "in one run" not in capfd.readouterr().out


def test_what_text_alone_costs_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--counts", "512=1M", "--gpu", "A100", "--model", "pixart-sigma"]
    assert main(words) == 0
    said = capfd.readouterr().out
    assert "of these GPU hours, by the operations; 492.5 GB (" in said
    assert (
        "captions: 60 tokens each (--tokens); if all had 300, phase 512 would take 2.5 TB" in said
    )
    assert main([*words, "--tokens", "10"]) == 0
    assert "; 82.9 GB (" in capfd.readouterr().out
    assert main([*words[:-1], "flux", "--tokens", "10"]) == 0
    assert "captions: flux stores each whole, so --tokens" in capfd.readouterr().out
    assert main([*words, "--text", "none"]) == 0
    assert "text  " not in capfd.readouterr().out.partition("stored by")[0]


@pytest.mark.parametrize(
    ("model", "full", "at_60"),
    [
        *[("sdxl", 0.32, 0.32), ("sd3", 2.73, 2.73), ("flux", 4.20, 4.20)],
        *[("flux2-klein", 7.9, 7.9), ("pixart-sigma", 2.46, 0.49), ("sana", 1.38, 0.28)],
        *[("lumina2", 1.18, 0.28), ("qwen-image", 3.67, 0.43), ("z-image", 2.62, 0.31)],
        *[("auraflow", 1.05, 0.25), ("chroma", 4.19, 0.50), ("kolors", 2.11, 2.11)],
        *[("hidream", 34.6, 34.6)],
    ],
)
def test_text_takes_what_its_shapes_say(model: str, full: float, at_60: float) -> None:
    """In MB; headers and padding are a few kB."""
    for tokens, wanted in ((10**6, full), (60, at_60)):
        each, none = (
            sample_nbytes(512, Choice(model=model, text=text, tokens=tokens))
            for text in ("emb", "none")
        )
        assert (each - none) / 1e6 == pytest.approx(wanted, rel=0.02)


def test_large_images_at_a_reduced_scale_take_fewer_cores() -> None:
    """1,024 pixels to 256 are reduced, 512 to 256 and 1,024 to 512 are not."""
    whole, fewer = (
        estimate(COUNTS, SPEEDS, Choice(decode=decode), Fleet()) for decode in ("full", "fast")
    )
    assert fewer[0].cores_each < whole[0].cores_each
    assert fewer[1].cores_each == whole[1].cores_each
