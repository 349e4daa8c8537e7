"""Fixtures that give a test the folder of a small pipeline, made once a session, and quick sums.

It stands beside `tests.kit.families`, not in it: pytest imports it at each start, and that package
imports torch and diffusers, which takes seconds.
"""

from collections.abc import Callable, Iterator
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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So small are these networks that threads of torch wait for each other most of the time: with
    two on a busy machine the tests of families take five times as long."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
