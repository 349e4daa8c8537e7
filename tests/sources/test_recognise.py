"""What a folder is taken for, and how a user says it where that is not clear."""

from pathlib import Path

import pytest

from tests.kit.packs import jpeg, packing_here, tar_bytes, write_files, write_table
from wdsprep.cli import main
from wdsprep.errors import SourceError, UsageError
from wdsprep.packing.options import PackOptions
from wdsprep.sources.base import Columns
from wdsprep.sources.recognise import recognise


def names(url: Path | str, wanted: str) -> list[str]:
    source = recognise(str(url), columns=Columns(), rows_per_item=9, input_format=wanted)
    return [item.name for item in source.items()]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    root = tmp_path / "in"
    write_table(root / "t.parquet", [{"image": jpeg(3)}])
    tar = tar_bytes([("b.jpg", jpeg(2))])
    return write_files(root, {"a.jpg": jpeg(1), "b.tar": tar, "u.csv": "url\nhttp://e.org/1\n"})


def test_of_a_folder_with_images_and_tars_the_user_says_which_are_meant(mixed: Path) -> None:
    with pytest.raises(SourceError, match=r"images \(a\.jpg\) and tars \(b\.tar\): say which"):
        names(mixed, "auto")
    assert names(mixed, "images") == ["a.jpg"]
    assert names(mixed, "tars") == ["b.tar"]
    assert names(mixed, "parquet") == ["t.parquet[0:1]"]
    assert names(mixed, "csv") == ["u.csv[0:1]"]
    with pytest.raises(SourceError, match="no table of tsv is in"):
        names(mixed, "tsv")
    with pytest.raises(UsageError, match=r"'json' \(did you mean jsonl\?\): give one of auto"):
        PackOptions(str(mixed), input_format="json")


def test_a_format_holds_for_patterns_too_and_images_are_in_a_folder(mixed: Path) -> None:
    assert names(f"{mixed}/*", "parquet") == names(f"{mixed}/t.parquet", "parquet")
    with pytest.raises(UsageError, match="is not a folder, as --input-format images needs"):
        names(f"{mixed}/*.tar", "images")


def test_encode_says_of_such_folders_what_its_user_can_do(
    mixed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--resolution", "64", "--model", "tiny"]
    assert main(["encode", str(mixed), str(mixed.parent / "out"), *words]) == 1
    said = capfd.readouterr().err
    assert f'run "wdsprep pack {mixed} IMAGES" first' in said
    assert f"or give tars, such as '{mixed}/*.tar'" in said
    assert "--input-format" not in said


def test_what_is_packed_already_is_refused_unless_its_tars_are_meant(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path, {"in/a.jpg": jpeg(1), "in/t.csv": "a\n1\n"})
    source, out, more = (str(tmp_path / name) for name in ("in", "out", "more"))
    with packing_here():
        assert main(["pack", source, out, "--buckets", "32"]) == 0
        assert "1 .csv (--input-format csv packs those; a list of" in capfd.readouterr().out
        assert main(["pack", out, more, "--buckets", "32"]) == 2
        assert f'{out} is packed already: "wdsprep encode {out}' in capfd.readouterr().err
        assert main(["pack", out, more, "--buckets", "32", "--input-format", "tars"]) == 0


@pytest.mark.parametrize("text", ["a photo of a cat\n", ""])
def test_a_caption_is_no_list_of_urls(tmp_path: Path, text: str) -> None:
    write_files(tmp_path, {"a.jpg": jpeg(1), "a.txt": text, "u.txt": "http://e.org/1.jpg\n"})
    with pytest.raises(SourceError, match=r"a\.txt is not a list of URLs, .* the folder"):
        names(tmp_path / "a.txt", "auto")
    assert names(tmp_path / "u.txt", "auto") == ["u.txt[0:1]"]


@pytest.mark.parametrize("name", ["a.jpg", "*.jpg"])
def test_of_images_their_folder_is_asked_for(tmp_path: Path, name: str) -> None:
    write_files(tmp_path, {"a.jpg": jpeg(1)})
    with pytest.raises(UsageError, match="is not a folder: give the one that the files are in"):
        names(tmp_path / name, "auto")
