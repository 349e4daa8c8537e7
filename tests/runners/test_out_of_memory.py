"""A worker that the kernel killed for lack of memory is told from one that a user killed."""

from pathlib import Path

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from wdsprep.runners import out_of_memory
from wdsprep.runners.out_of_memory import OUT_OF_MEMORY, PERHAPS, KillsCounted
from wdsprep.runners.ray.runner import _death_reason


def test_a_kill_that_the_kernel_has_counted_since_was_for_lack_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = tmp_path / "memory.events"
    monkeypatch.setattr(out_of_memory, "_own_groups", lambda: iter([tmp_path / "no", counted]))
    counted.write_text("oom 1\noom_kill 3\noom_group_kill 0\n")
    kills = KillsCounted()
    assert kills.reason() == PERHAPS
    counted.write_text("oom 2\noom_kill 4\noom_group_kill 0\n")
    assert [kills.reason(), kills.reason()] == [OUT_OF_MEMORY, PERHAPS]


def test_the_counter_of_this_machine_is_found() -> None:
    found = [*out_of_memory._own_groups(), out_of_memory.OF_THE_MACHINE]
    assert any("oom_kill " in path.read_text() for path in found if path.is_file())


def test_what_ray_says_of_memory_is_said_in_one_sentence() -> None:
    low = "1 worker(s) were killed due to the node running low on memory. Refer to the docs"
    assert _death_reason(OutOfMemoryError(low)) == OUT_OF_MEMORY
    dead = RayActorError(error_msg="Worker exit detail: it ended. Some common causes: OOM killer")
    assert _death_reason(dead).startswith(
        "worker died: it ended: it may have lacked memory: fewer --work"
    )
