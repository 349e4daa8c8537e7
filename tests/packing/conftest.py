"""An album, packed once for the tests of a file, and a site of pictures."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.packs import TWENTY, jpeg, pack, photos, write_files
from tests.kit.sites import Site, open_site
from tests.kit.webserver import WebServer


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """130 photos and some that are none: seven slices of twenty."""
    root = photos(tmp_path_factory.mktemp("album"), 130)
    return write_files(root, {"1/bad.jpg": b"<html>", "2/lone.txt": "x", "2/cut.jpg": jpeg(5)[:99]})


@pytest.fixture(scope="module")
def packed_album(album: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(album, tmp_path_factory.mktemp("packed") / "out", *TWENTY)


@pytest.fixture
def site() -> Iterator[tuple[Site, WebServer]]:
    with open_site() as opened:
        yield opened
