"""A report says of datasets what their receipts and their samples say, and reads little for it."""

import base64
import io
import os
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from shutil import copytree
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.encoding.test_references import picture
from tests.encoding.test_roles import SIZES as PAIR_SIZES
from tests.encoding.test_roles import mask, pack_images, scaled, targets
from tests.kit.command_lines import CommandLine, python
from tests.kit.encodes import encode_here, latents_of
from tests.kit.latent_sets import npy
from tests.kit.packs import manifest_of, pack, samples_of, write_files
from tests.kit.reports import SCRIPT, Made, Page, make, pack_pictures, parsed
from tests.kit.stores import note_reads
from wdsprep import remove
from wdsprep.dataset.manifest import Shard
from wdsprep.dataset.npy_arrays import Field, layout
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject
from wdsprep.errors import NotFoundError, StoreError, UsageError
from wdsprep.reporting.contact_sheet import fact_pairs
from wdsprep.reporting.datasets import ReadSample, SamplePlace, open_all, pick
from wdsprep.reporting.distributions import latent_of, spectrum_of
from wdsprep.reporting.funnel import pace_of
from wdsprep.reporting.page import UNREADABLE, fill
from wdsprep.reporting.pictures import find_decoding
from wdsprep.reporting.report import report
from wdsprep.runners.job import JobListener

PLACE = SamplePlace(Shard(name="64/0.tar", samples=1, nbytes=1, digest=""), 0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def page(made: Made) -> Page:
    return made.report()


def test_the_funnel_is_what_the_receipts_say(made: Made, page: Page) -> None:
    rows = {row[0]: row[2] for row in page.rows("Funnel")}
    assert rows == {
        "samples in the source": "15",
        "failed the image check": "\N{MINUS SIGN}1",
        "packed": "14",
        "for phase 64": "14",
        "could not be encoded at 64": "\N{MINUS SIGN}1",
        "encoded at 64": "13",
    }
    for root in (made.images, made.latents):
        for bucket, _, samples, shards, _ in page.rows(f"Buckets of {root}"):
            there = [s for s in manifest_of(root).shards if s.bucket == int(bucket)]
            assert (int(samples), int(shards)) == (sum(s.samples for s in there), len(there))
    assert [row[2] for row in page.rows(f"Phases of {made.images}")] == ["14", "4"]


def test_rejects_and_histograms_count_every_sample(made: Made, page: Page) -> None:
    assert [row[0] for row in page.rows(f"Rejects of {made.images} by code")] == ["not_an_image"]
    assert [row[0] for row in page.rows(f"Rejects of {made.latents} by code")] == ["truncated"]
    rejects = page.section("rejects")
    assert rejects is not None
    examples = [item.text.partition(" ")[0] for item in rejects.every("li")]
    assert examples == ["zzz.jpg", "64/000001.tar/000001000000"]
    sides = page.rows(f"{made.images}, Shorter side")
    sizes = [min(s["json"]["width"], s["json"]["height"]) for s in samples_of(made.images)]
    assert {row[0]: int(row[1]) for row in sides if row[1] != "0"} == {
        "64 to 95": sum(64 <= size < 96 for size in sizes),
        "128 to 191": sum(size >= 128 for size in sizes),
    }
    for title in ("Aspect ratio", "Caption length"):
        assert sum(int(row[1]) for row in page.rows(f"{made.images}, {title}")) == 14


def test_each_image_is_shown_with_what_was_made_of_it(made: Made, page: Page) -> None:
    """The crop that the page has is compared with what the VAE's input was."""
    latents = latents_of(made.latents)
    samples = {sample["__key__"]: sample for sample in samples_of(made.images)}
    assert page.cards.keys() == samples.keys()
    for key, card in page.cards.items():
        pictures = {f.one("figcaption").text.split()[0]: f for f in card.every("figure")}
        if key not in latents:
            assert "rejected: truncated" in card.text
            assert list(pictures) == ["original"]
            continue
        assert list(pictures) == ["original", "crop", "latent", "decoded"]
        assert samples[key]["txt"][:200].replace("\u202e", "") in card.text.replace("\u202e", "")
        facts = latents[key]["json"]
        shown = [f"latents 64 {name}{facts[name]}\n" for name in ("crop", "tokens")]
        assert all(fact in card.text for fact in shown)
        for name, figure in pictures.items():
            image = opened(figure.one("img").attributes["src"])
            size = {"latent": (8, 8), "crop": (64, 64), "decoded": (64, 64)}.get(name)
            assert image.size == (size or image.size)
        assert re.search(r"-?\d+\.\d dB", pictures["decoded"].text)


def opened(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def test_latents_of_several_shapes_are_counted_and_shown(made: Made) -> None:
    shaped = made.root / "shaped"
    encode_here(made.images, shaped, shapes="nearest:8,2")
    page = made.report(made.images, shaped, name="shaped")
    counts = manifest_of(shaped).counts
    rows = {row[0]: int(row[2]) for row in page.rows(f"Shapes of {shaped}")}
    assert rows == {name: count for name, count in counts.items() if "x" in name}
    assert len(rows) == 3
    for key, sample in latents_of(shaped).items():
        left, top, right, bottom = sample["json"]["crop"]
        figures = {f.one("figcaption").text.split()[0]: f for f in page.cards[key].every("figure")}
        shown = {name: opened(f.one("img").attributes["src"]).size for name, f in figures.items()}
        size = right - left, bottom - top
        assert (shown["crop"], shown["decoded"]) == (size, size)
        assert shown["latent"] == (size[0] // 8, size[1] // 8)
        assert re.search(r"-?\d+\.\d dB", figures["decoded"].text)
    assert page.rows(f"Statistics of {shaped} by channel")
    rows = {row[0]: row[2] for row in page.rows("Funnel")}
    assert (rows["for phase 64"], rows["encoded at 64"]) == ("14", "13")
    alone = made.report(shaped, name="shaped-alone", model="none")
    assert alone.cards.keys() == latents_of(shaped).keys()


def test_the_same_data_and_seed_give_the_same_page(made: Made) -> None:
    few = {"samples": 3, "model": "none"}
    first, again, other = (made.report(name="few", seed=seed, **few) for seed in (5, 5, 6))
    assert first.html == again.html
    assert first.cards.keys() != other.cards.keys()
    assert len(first.cards) == 6


def test_the_pick_is_fair_and_whole() -> None:
    shards = [Shard(name=f"64/{n}.tar", samples=n, nbytes=0, digest="") for n in (3, 1, 50, 6)]
    every = pick(shards, 60, "")
    assert [(p.shard.samples, p.number) for p in every] == [
        (shard.samples, number) for shard in shards for number in range(shard.samples)
    ]
    counts = np.zeros(60)
    for seed in range(600):
        for place in pick(shards, 6, f"{seed}"):
            counts[every.index(place)] += 1
    assert 30 < counts.min() <= counts.max() < 90
    assert not pick([], 6, "")


def test_nothing_is_read_of_shards_but_the_picked_samples(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = note_reads(monkeypatch)
    with patch("wdsprep.reporting.distributions.SAMPLES", 2):
        made.report(name="little", samples=1, model="none")
    parts = [read for read in reads if read[0].endswith((".tar", ".idx"))]
    assert all(asked is not None for _, asked, _ in parts)
    whole = sum(s.nbytes for root in (made.images, made.latents) for s in manifest_of(root).shards)
    assert sum(came for *_, came in parts) < whole / 3
    assert len(parts) < 2 * (2 + 2) * 5


def test_a_damaged_sample_is_said_to_be_one(made: Made, tmp_path: Path) -> None:
    pack_pictures(made.root / "photos", tmp_path / "images")
    shards = manifest_of(tmp_path / "images").shards
    (tmp_path / "images" / shards[0].name).unlink()
    (tmp_path / "images" / f"{shards[1].name}.idx").write_bytes(b"short")
    page = made.report(tmp_path / "images", name="damaged", model="none")
    lost = shards[0].samples + shards[1].samples
    assert page.text.count("This sample could not be read: ") == lost
    assert f"{shards[0].name}: no such file" in page.text
    assert "is damaged: it has no sample" in page.text
    assert f"{lost} of 14 picked samples could not be read" in page.text
    (reject,) = (tmp_path / "images/rejects").glob("000003.jsonl")
    reject.write_bytes(b"{}\n")
    again = made.report(tmp_path / "images", name="damaged", model="none")
    assert "0 of 1 file of rejects, of which 1 could not be read" in again.text


def test_a_model_that_is_not_at_hand_is_no_error(made: Made) -> None:
    latents = open_all([str(made.latents)]).latents[0]

    def decoding(model: str, **changes: object) -> str:
        changed = {**latents.manifest.settings, **changes}
        manifest = replace(latents.manifest, extra={"model": model}, settings=changed)
        return find_decoding(replace(latents, manifest=manifest), "")[1]

    assert decoding("tiny") == ""
    assert decoding("no-such/model-at-all") == "no-such/model-at-all is not on this machine"
    assert "is not a folder here" in decoding("./nowhere")
    assert "give it with --model" in decoding("")
    assert decoding("tiny", weights="0" * 64) == "the latents were made with other weights of tiny"
    with pytest.raises(UsageError, match="is not a folder here"):
        find_decoding(latents, "./nowhere")


@pytest.mark.system
def test_images_are_reported_on_where_torch_is_not_installed(made: Made) -> None:
    """The finder of modules denies torch and all that needs it."""
    code = (
        "import sys\n"
        "for name in ('torch', 'torchvision', 'diffusers', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from wdsprep.reporting.report import report\n"
        f"print(report({str(made.images)!r}, output={str(made.root / 'bare.html')!r}).samples)\n"
    )
    done = python(code)
    assert (done.stdout, done.stderr) == ("14\n", "")


def test_the_worst_hosts_are_named(tmp_path: Path) -> None:
    """No request is made: addresses of this machine are refused."""
    urls = ["http://127.0.0.1/a.jpg"] * 3 + ["http://10.0.0.1/b.jpg", "ftp://x.y/c.jpg"]
    lines = [f"{url}{'?' * n}" for n, url in enumerate(urls)]
    table = write_files(tmp_path, {"urls.txt": "\n".join(lines)}) / "urls.txt"
    pack(table, tmp_path / "images", "--ignore-robots")
    page = Made(root=tmp_path).report(tmp_path / "images")
    assert [row[0] for row in page.rows("Worst hosts")][:2] == ["127.0.0.1", "10.0.0.1"]
    assert page.rows("Worst hosts")[0][2:4] == ["private_address 3", "3"]
    assert not page.cards
    assert page.section("sizes") is None


@pytest.mark.parametrize(
    ("times", "pauses", "active_s", "rates"),
    [
        ((0, 10, 40_010, 40_020), 1, 30, (0.4, 0.4, 0.3)),  # a night
        ((0, 0, 1, 1681), 1, 1.75, (4, 4)),  # 28 minutes, after a run that did most
        ((0, 1, 2, 302), 1, 2.75, (4, 4, 4)),  # five minutes before the last of few
        ((0, 1800, 3700, 5400), 0, 5400, None),  # large units
        ((0, 0, 500, 1681), 0, 1681, None),  # some are slower
        ((0, 0, 50, 51), 0, 51, None),  # several workers, in step
    ],
)
def test_throughput_is_told_by_the_times_of_receipts_without_pauses(
    made: Made,
    tmp_path: Path,
    times: tuple[int, ...],
    pauses: int,
    active_s: float,
    rates: tuple[float, ...] | None,
) -> None:
    """Four slices of 4, 4, 4 and 3 inputs."""
    images = copytree(made.images, tmp_path / "images")
    for path, at in zip(sorted((images / "receipts").iterdir()), times, strict=True):
        os.utime(path, (1_000_000_000 + at, 1_000_000_000 + at))
    pace = pace_of(open_all([str(images)]).every[0])
    assert pace is not None
    assert (pace["pauses"], pace["active_s"]) == (pauses, active_s)
    assert rates is None or pace["rates"] == pytest.approx(rates)
    page = made.report(images, name="paced", model="none", samples=0)
    assert " 0.0 samples a second" not in page.text
    said = "over 30 s, with 1 pause; 2001-09-09 01:46 to 12:53 UTC"
    assert (said in page.text) == (active_s == 30)


def test_removed_samples_are_called_removed(made: Made, tmp_path: Path) -> None:
    images = copytree(made.images, tmp_path / "images")
    latents = copytree(made.latents, tmp_path / "latents")
    for root in (latents, images):
        remove(root, keys=["000000000001", "000001000001"], yes=True)
    page = made.report(images, latents, name="removed", model="none", samples=0)
    minus = "\N{MINUS SIGN}"
    assert [(row[0], row[2]) for row in page.rows("Funnel")] == [
        ("samples in the source", "15"),
        ("failed the image check", f"{minus}1"),
        ("removed", f"{minus}2"),
        ("packed", "12"),
        ("for phase 64", "14"),
        ("could not be encoded at 64", f"{minus}1"),
        ("removed at 64", f"{minus}2"),
        ("encoded at 64", "11"),
    ]
    assert "3 rejects of 15 samples: 1 failed the image check, 2 removed." in page.text
    assert "left out by a filter" not in page.text


def latent_sample(key: str, array: object) -> ReadSample:
    return ReadSample(PLACE, key, {"latent.npy": npy(array)})


def test_statistics_of_latents_show_what_is_wrong_with_them() -> None:
    values = np.random.default_rng(1).standard_normal((64, 4, 16, 16))
    values[:, 1] = values[:, 1] * 2 + 1
    values[7, 2, 3, 3] = -40
    samples = [latent_sample(f"{n}", one.astype("<f2")) for n, one in enumerate(values)]
    broken = values[0].astype("<f2")
    broken[0, 0, 0] = np.nan
    samples += [latent_sample("nan", broken), latent_sample("small", broken[:, :2, :2])]
    field = Field(name="latent.npy", dtype="<f2", shape=(4, 16, 16))
    found = spectrum_of(samples, {"layout": layout([field]), "latents": "sample"})
    assert found is not None
    assert (found["samples"], found["unsound"]) == (64, 2)
    good, wide = found["channels"][:2]
    assert abs(good["mean"]) < 0.03
    assert good["std"] == pytest.approx(1, abs=0.03)
    assert good["far"] == pytest.approx(0.0027, abs=0.0015)
    assert (round(wide["mean"], 1), round(wide["std"], 1)) == (1.0, 2.0)
    assert sum(wide["shares"]) == pytest.approx(1)
    assert found["extremes"][0][:2] == ("7", 2)
    assert spectrum_of(samples[64:], {"layout": layout([field]), "latents": "sample"}) is None


def test_latents_are_shown_as_a_trainer_takes_them() -> None:
    """Of moments the mean, its cells folded, shifted and scaled by channel."""
    means = np.random.default_rng(1).standard_normal((2, 4, 6)).astype("<f4")
    bits = (np.concatenate([means, means]).view("<u4") >> 16).astype("<u2")
    kept = (bits[:2].astype("<u4") << 16).view("<f4")
    field = Field(name="latent.npy", dtype="bfloat16", shape=(4, 4, 6))
    scale, shift = [0.5 + n for n in range(8)], [n / 4 for n in range(8)]
    options = {"layout": layout([field]), "latents": "moments", "patch": 2}
    found = latent_of(latent_sample("a", bits), {**options, "scale": scale, "shift": shift})
    assert found.shape == (8, 2, 3)
    for channel, row, column in np.ndindex(8, 2, 3):
        cell = kept[channel // 4, 2 * row + channel % 4 // 2, 2 * column + channel % 2]
        wanted = (cell - shift[channel]) * scale[channel]
        assert found[channel, row, column] == pytest.approx(wanted, rel=1e-5)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec=None), max_size=40))
def test_any_text_stays_text(text: str) -> None:
    html = fill('<p title="{{ text }}">{{ text }}</p>', text=text)
    element = parsed(html).one("p")
    clean = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", UNREADABLE, text)
    assert element.text == clean
    assert element.attributes["title"] == clean
    html.encode()


def test_what_looks_like_html_is_text(page: Page) -> None:
    """Nothing is put into the page as it is, but its own style and script."""
    assert SCRIPT in page.text
    assert "<script>document" not in page.html
    assert len(page.root.every("script")) == 1
    template = (files("wdsprep.reporting") / "page.html").read_text()
    assert re.findall(r"\{\{ (\w+)\|safe|(Markup|autoescape)", template) == [
        ("style", ""),
        ("script", ""),
    ]


def test_the_command_prints_one_line(
    made: Made, tmp_path: Path, command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = command("report", made.images, "--samples", 1)
    size = f"{Path('report.html').stat().st_size / 1000:.1f} kB"
    assert printed.out == f"report.html: {size}, 2 samples shown: open it in a browser\n"
    words = ("report", made.images, "-o", "a/b.htm", "--json", "--samples", 0)
    assert command(*words).facts["samples"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "report.html"]


def test_only_a_report_is_replaced_without_asking(made: Made, tmp_path: Path) -> None:
    """An earlier one, whole or cut, or an empty file; what else is there is looked at first."""
    out = tmp_path / "page.html"
    out.touch()
    size = report(made.images, output=out, samples=0).nbytes
    assert report(made.images, output=out, samples=0).nbytes == size
    out.write_bytes(b"<!DOCTYPE html><title>my thesis</title>")
    with pytest.raises(UsageError, match=r"is not a report or was .*: give another -o, or --yes"):
        report(made.images, output=out)
    assert b"my thesis" in out.read_bytes()
    agreeing = JobListener(confirm=lambda output: output == str(out))
    assert report(made.images, output=out, samples=0, listener=agreeing).nbytes == size
    out.write_bytes(b"precious")
    report(made.images, output=out, samples=0, yes=True)
    assert out.stat().st_size == size


def test_what_cannot_be_reported_is_refused(made: Made, tmp_path: Path) -> None:
    images, out = str(made.images), str(tmp_path / "x.html")
    for places, output, error, match in (
        ([str(tmp_path)], out, NotFoundError, "holds no dataset"),
        ([images, f"{images}/../images"], out, UsageError, "are both datasets of images"),
        ([images], str(tmp_path / "x"), UsageError, r"ends in \.html"),
        ([images], "https://host.invalid/x.html", UsageError, "a web address is only read"),
        ([images], f"{images}/x.html", UsageError, "is inside the dataset"),
    ):
        with pytest.raises(error, match=match):
            report(*places, output=output)
    with pytest.raises(UsageError, match="give 0 or more"):
        report(images, output=out, samples=-1)
    (tmp_path / "file").touch()
    said: list[str] = []
    listener = JobListener(on_message=said.append)
    with pytest.raises(StoreError, match="is not a folder, and none can be made there: choose"):
        report(images, output=tmp_path / "file/x.html", listener=listener)
    assert not said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_signed_urls_end_at_their_paths_on_the_page(made: Made, tmp_path: Path) -> None:
    signed = "https://host/a.jpg?sig=SECRET"
    facts = {"url": signed, "meta": {"from": f"{signed}&more"}, "width": 1, "height": 1}
    reject = Reject(key="0", source="t#0", code=Code.NOT_AN_IMAGE, detail="HTTP 404", url=signed)
    images = copytree(made.images, tmp_path / "images")
    (images / "rejects/000003.jsonl").write_text(reject.to_json())
    page = repr(fact_pairs(facts)) + made.report(images, name="signed", samples=0).text
    assert page.count("https://host/a.jpg") == 3
    assert "SECRET" not in page


def test_a_report_says_first_what_it_will_do_and_then_its_steps(made: Made, tmp_path: Path) -> None:
    heard: list[str] = []
    listener = JobListener(on_message=heard.append, on_step=heard.append)
    datasets = (str(made.images), str(made.latents))
    options = {"output": tmp_path / "r.html", "samples": 3, "listener": listener}
    report(*datasets, **options)  # type: ignore[arg-type]
    shown = " and ".join(datasets)
    assert heard[0] == (
        f"{shown}: 6 samples to show, up to 6 latents to decode with tiny: without a GPU this can "
        "take minutes (--model none leaves it out)"
    )
    assert f"14 of 14 samples read: {made.images}" in heard
    steps = [line for line in heard if line.endswith(" of 6 samples drawn")]
    assert [int(line[0]) for line in steps] == [1, 2, 3, 4, 5, 6]
    assert heard.index("loading the decoder of tiny") < heard.index(steps[0])
    heard.clear()
    report(*datasets, model="none", **options)  # type: ignore[arg-type]
    assert heard[0] == f"{shown}: 6 samples to show"


def test_what_became_of_images_in_roles_stands_beside_the_target(tmp_path: Path) -> None:
    """Latents in false colours and decoded, masks and pixels as they are, also without targets."""
    sources = [picture(scaled(size, 1.5), 10 + n) for n, size in enumerate(PAIR_SIZES)]
    masks = [mask(n, size) for n, size in enumerate(PAIR_SIZES)]
    roles = {"target": targets(), "source": sources, "mask": masks}
    images, both, alone = pack_images(tmp_path, roles), tmp_path / "both", tmp_path / "alone"
    encode_here(images, both, roles="target,source,mask")
    rules = ("source=pixels", "mask=full")
    encode_here(images, alone, roles="source,mask", role_size=rules, text="none")
    (tar,) = both.glob("*/000000.tar")
    damaged = tar.read_bytes().replace(b"'descr': '|u1'", b"'descr': '|u9'", 1)
    tar.write_bytes(damaged)
    report(images, both, alone, output=tmp_path / "page.html")
    cards = Page(tmp_path / "page.html").cards
    decoded, coloured = "what the VAE's decoder makes of the", "in false colours"
    whole = ["the image", "the source", "the mask"]
    whole += ["the part that was encoded, at 64 \N{MULTIPLICATION SIGN} 64 pixels"]
    whole += [f"its latent for 64 pixels {coloured}", f"{decoded} latent"]
    whole += [f"the latent of the source {coloured}", f"{decoded} source"]
    whole += ["the mask as it was encoded"]
    whole += ["the source as it was encoded", "the mask as it was encoded"]
    first, *others = (
        [image.attributes["alt"].partition(": ")[2] for image in card.every("img")]
        for card in cards.values()
    )
    assert others == [whole] * 4
    assert first == [*whole[:-3], *whole[-2:]]
    assert "mask.npy has" in next(iter(cards.values())).text
