"""The hub's own libraries read a card; captions are text on it; it replaces nobody's words."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import DatasetCard, DatasetCardData
from markdown_it import MarkdownIt

import wdsprep
from tests.kit.command_lines import CommandLine
from tests.kit.latent_sets import write_latents
from tests.kit.packs import jpeg, manifest_of, pack, samples_of, write_files
from tests.kit.reports import SCRIPT, fake_latents
from wdsprep.dataset.file_names import MANIFEST
from wdsprep.errors import UsageError
from wdsprep.runners.job import JobListener

HOSTILE = (
    "![x](https://example.org/a.png) [link](javascript:alert(1)) https://example.org",
    "`` ` ```\n\n# heading\n\n<img src=x onerror=alert(1)>\n---\nlicense: mit",
    "| a | b |\n| - | - |\n\n```\nfence\n<!-- written by wdsprep card, 0 -->",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, some in other formats and with other facts, and latents of them."""
    home = tmp_path_factory.mktemp("card")
    files: dict[str, bytes | str] = {}
    for number in range(12):
        kind = ("JPEG", "PNG", "WEBP")[max(0, number - 9)]
        files[f"{number:02d}.{kind.lower()}"] = jpeg(number, (64 + 9 * number, 80), kind=kind)
        facts: dict[str, Any] = {"score": number} if number > 8 else {"more": {"of": "text"}}
        caption = (SCRIPT, *HOSTILE)[number] if number < 4 else f"the photo number {number}"
        files[f"{number:02d}.json"] = json.dumps(facts | {"caption": caption})
    pack(write_files(home / "photos", files), home / "images", "--buckets", "64")
    fake_latents(home / "images", home / "latents-64")
    return home


def test_the_hubs_library_reads_what_the_card_says_of_the_datasets(home: Path) -> None:
    card = wdsprep.card(home / "images", home / "latents-64", repo="me/cats", license="cc0-1.0")
    data = DatasetCard(card.text).data
    assert isinstance(data, DatasetCardData)
    assert (data.license, data.pretty_name) == ("cc0-1.0", "cats")
    assert (data.size_categories, data.task_categories) == (["n<1K"], ["text-to-image"])
    images, latents = data.configs  # type: ignore[attr-defined]
    assert (images["config_name"], latents["config_name"]) == ("images", "latents-64")
    assert latents["data_files"] == [{"split": "train", "path": ["latents-64/64/**/*.tar"]}]
    assert "    images: images, complete: 12 samples in 1 shard, " in card.text
    assert "latent.npy <f2 (4, 8, 8)" in card.text
    where = "--repo-type dataset"
    assert card.uploads == (
        f"hf upload me/cats {home}/images images {where}",
        f"hf upload me/cats {home}/latents-64 latents-64 {where}",
    )
    out = home / "cats.md"
    written = wdsprep.card(home / "images", home / "latents-64", repo="me/cats", output=out)
    assert written.uploads == (*card.uploads, f"hf upload me/cats {out} README.md {where}")
    assert DatasetCard(wdsprep.card(home / "images").text).data.license is None


def test_what_captions_hold_is_text_on_the_card(home: Path) -> None:
    text = wdsprep.card(home / "images", samples=12).text
    tokens = MarkdownIt("gfm-like", {"html": True, "linkify": False}).parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    kinds = {child.type for child in inline} | {token.type for token in tokens}
    assert not kinds & {"html_inline", "image", "link_open"}
    shown = [child.content for child in inline if child.type == "code_inline"]
    for caption in (SCRIPT, *HOSTILE):
        line = " ".join(caption.split()).replace("\u202e", r"\u202e")
        assert line in [each.strip() for each in shown]
    assert [t.content.strip() for t in tokens if t.type == "html_block"] == [text.splitlines()[-1]]
    assert DatasetCard(text).data.license is None


def test_settings_are_text_on_the_card_and_the_path_of_a_model_stays_private(
    tmp_path: Path,
) -> None:
    more = {"caption_field": "a`\n```\n# heading <b>", "resolution": 64}
    url = write_latents(str(tmp_path / "latents"), (3,), more=more)
    manifest = replace(manifest_of(Path(url)), extra={"model": "/home/me/my-model"})
    Path(url, MANIFEST).write_bytes(manifest.to_bytes())
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(text := wdsprep.card(url).text)
    assert "model my-model;" in text
    assert "/home" not in text.replace(url, "")
    (block,) = [token.content for token in tokens if token.type == "code_block"]
    assert "caption-field a` ``` # heading <b>" in " ".join(block.split())


@pytest.mark.system
def test_datasets_reads_the_folder_by_the_lines_of_the_card(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sample, though only later ones are PNG and WebP, and have other facts."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    out = home / "README.md"
    card = wdsprep.card(home / "images", home / "latents-64", output=out, yes=True)
    first, second = (
        block.partition("```")[0].replace("OWNER/NAME", str(home)).replace("NAME", str(home))
        for block in card.text.split("```python\n")[1:]
    )
    scope: dict[str, Any] = {}
    exec(first, scope)
    rows = list(scope["dataset"])
    assert [row["__key__"] for row in rows] == [s["__key__"] for s in samples_of(home / "images")]
    assert rows[1]["txt"] == HOSTILE[0]
    assert [next(n for n in ("jpg", "png", "webp") if row[n]) for row in rows[8:]] == [
        *("jpg", "jpg", "png", "webp")
    ]
    assert rows[11]["webp"].size == (rows[11]["json"]["width"], rows[11]["json"]["height"])
    exec(first.replace('"images"', '"latents-64"'), scope)
    assert sum(1 for _ in scope["dataset"]) == 12
    exec(second, scope)
    assert scope["batch"]["latent"].shape == (2, 4, 8, 8)


def test_a_card_is_written_again_and_what_somebody_wrote_is_kept(
    home: Path, tmp_path: Path
) -> None:
    images = shutil.copytree(home / "images", tmp_path / "images")
    out = images / "README.md"
    wdsprep.card(images, output=out)
    written = wdsprep.card(images, output=out, repo="me/cats")
    assert written.uploads == (f"hf upload me/cats {images} . --repo-type dataset",)
    assert out.read_text() == written.text
    (images / ".gitattributes").touch()
    assert not wdsprep.verify(images).findings
    mine = written.text.replace("# license: put here under which", "license: mit  #")
    for theirs in (mine, "my own words"):
        out.write_text(theirs)
        with pytest.raises(UsageError, match="or was changed since"):
            wdsprep.card(images, output=out)
        assert out.read_text() == theirs
    asked = JobListener(confirm=lambda output: output == str(out))
    assert wdsprep.card(images, output=out, listener=asked).text == out.read_text()
    for name in ("256/README.md", "a.md"):
        with pytest.raises(UsageError, match="is inside"):
            wdsprep.card(images, output=images / name)


def test_the_card_alone_is_what_the_command_prints(home: Path, command: CommandLine) -> None:
    printed = command("card", home / "images", "--samples", 0)
    assert printed.out == wdsprep.card(home / "images", samples=0).text
    assert printed.err.startswith("next: hf upload OWNER/NAME ")
    assert "## Samples" not in printed.out
    command("card", home / "images", "--repo", "cats", code=2)
    said = command("card", home / "images", "--license", "cc-by-40", code=2).err
    assert "--license 'cc-by-40' (did you mean cc-by-4.0?): give a name of the hub" in said
