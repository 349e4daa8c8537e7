"""An album, packed once for the tests of a file."""

from pathlib import Path

import pytest

from tests.kit.packs import TWENTY, jpeg, pack, photos, write_files


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """130 photos and some that are none: seven slices of twenty."""
    root = photos(tmp_path_factory.mktemp("album"), 130)
    return write_files(root, {"1/bad.jpg": b"<html>", "2/lone.txt": "x", "2/cut.jpg": jpeg(5)[:99]})


@pytest.fixture(scope="module")
def packed_album(album: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(album, tmp_path_factory.mktemp("packed") / "out", *TWENTY)
