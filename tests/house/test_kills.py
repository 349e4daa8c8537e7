"""Killed at random moments and resumed, commands leave the bytes of an undisturbed run."""

import random
import sys
from collections.abc import Iterator

import pytest

from tests.kit.kills import JOBS, Kills
from tests.kit.meetings import Stage

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kills]:
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")  # pytest shows it where a test fails
    root = tmp_path_factory.mktemp("kills")
    with Stage(alike=True) as stage:
        yield Kills(stage, root, str(root), seed)


@pytest.mark.parametrize("name", JOBS)
def test_killed_and_resumed_a_command_leaves_the_bytes_of_an_undisturbed_run(
    name: str, kills: Kills
) -> None:
    done = kills.play(name, 2)
    assert done.kills >= 2
    assert done.findings == []
