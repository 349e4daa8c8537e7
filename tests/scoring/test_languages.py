"""Columns of captions, which need no model and no image."""

from pathlib import Path

import pytest

import wdsprep
from tests.kit.packs import jpeg, pack, write_files
from tests.kit.scores import columns_in, score_here
from wdsprep.errors import UsageError
from wdsprep.scoring.languages import RepeatedCaptions, share_of_letters
from wdsprep.scoring.score import example_condition

CAPTIONS = (
    "a dog on a beach",
    "ein Hund am Strand",
    "un chien sur la plage",
    "A  dog on a beach",
    "",
)


def test_share_of_letters_leaves_out_white_space() -> None:
    assert share_of_letters("ab 12") == 0.5
    assert share_of_letters("") == 0.0
    assert share_of_letters("雪 🐕") == 0.5


def test_captions_that_differ_in_case_and_space_alone_are_repeated() -> None:
    repeats = RepeatedCaptions()
    repeats.add(CAPTIONS)
    assert [repeats.of(each) for each in CAPTIONS] == [2, 1, 1, 2, 1]


def test_without_the_library_a_line_says_how_to_get_it(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.scoring.languages.LIBRARY", "no-such-library")
    with pytest.raises(UsageError, match=r"pip install '\.\[language\]'"):
        score_here(images, tmp_path / "scores", language=True)


def test_languages_are_told_without_a_look_at_images(tmp_path: Path) -> None:
    pytest.importorskip("py3langid")
    files: dict[str, bytes | str] = {}
    for number, caption in enumerate(CAPTIONS):
        files |= {f"{number}.jpg": jpeg(number, (64, 64)), f"{number}.txt": caption}
    images = pack(write_files(tmp_path / "in", files), tmp_path / "images", "--buckets", "64")
    outcome = score_here(images, tmp_path / "scores", language=True)
    assert example_condition(str(tmp_path / "scores"), outcome.manifest) == 'language == "en"'
    found = list(columns_in(tmp_path / "scores").values())
    assert [each["language"] for each in found] == ["en", "de", "fr", "en", "und"]
    assert [each["caption_repeats"] for each in found] == [2, 1, 1, 2, 1]
    assert [each["caption_length"] for each in found] == [*map(len, CAPTIONS)]
    assert all(0 < each["language_probability"] <= 1 for each in found[:4])
    assert not wdsprep.verify(str(images), str(tmp_path / "scores")).findings
