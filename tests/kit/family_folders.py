"""Fixtures that give a test the folder of a small pipeline; it is made once a session.

It stands beside `tests.kit.families`, not in it: pytest imports it at each start, and that package
imports torch and diffusers, which takes seconds.
"""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`family("Sana")`: its folder. Tests leave it as it is."""
    root = tmp_path_factory.mktemp("families")

    def made(name: str) -> Path:
        from tests.kit.families import small

        folder = root / name
        return folder if folder.is_dir() else small(name, folder)

    return made
