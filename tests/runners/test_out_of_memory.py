"""A worker that the kernel killed for lack of memory is told from one that a user killed."""

from pathlib import Path

from ray.exceptions import OutOfMemoryError, RayActorError

from wdsprep.runners.out_of_memory import OUT_OF_MEMORY, PERHAPS, KillsCounted, find_counters
from wdsprep.runners.ray.lost_workers import death_reason


def test_a_kill_that_the_kernel_has_counted_since_was_for_lack_of_memory(tmp_path: Path) -> None:
    counted = tmp_path / "memory.events"
    counted.write_text("oom 1\noom_kill 3\noom_group_kill 0\n")
    kills = KillsCounted([tmp_path / "no", counted])
    assert kills.reason() == PERHAPS
    counted.write_text("oom 2\noom_kill 4\noom_group_kill 0\n")
    assert [kills.reason(), kills.reason()] == [OUT_OF_MEMORY, PERHAPS]


def test_the_counter_of_this_machine_is_found() -> None:
    assert any("oom_kill " in path.read_text() for path in find_counters() if path.is_file())


def test_what_ray_says_of_memory_is_said_in_one_sentence() -> None:
    low = "1 worker(s) were killed due to the node running low on memory. Refer to the docs"
    assert death_reason(OutOfMemoryError(low)) == OUT_OF_MEMORY
    dead = RayActorError(error_msg="Worker exit detail: it ended. Some common causes: OOM killer")
    assert death_reason(dead).startswith(
        "worker died: it ended: it may have lacked memory: fewer --work"
    )
