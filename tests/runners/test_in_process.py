"""Where work is done: in this process, or in processes of its own."""

import pytest

from wdsprep.checks.options import VerifyOptions
from wdsprep.runners.base import Runner
from wdsprep.runners.in_process import HERE_NBYTES, InProcessRunner, runner_for


def runner(*, workers: int, nbytes: int, is_safe: bool) -> Runner:
    options = VerifyOptions(workers=workers, runner="local")
    return runner_for(options, 4, nbytes, told=lambda _text: None, name="verify", is_safe=is_safe)


@pytest.mark.parametrize("is_safe", [True, False])
def test_little_work_is_done_in_this_process(is_safe: bool) -> None:
    found = runner(workers=2, nbytes=HERE_NBYTES, is_safe=is_safe)
    assert isinstance(found, InProcessRunner)


def test_one_worker_of_safe_work_needs_no_process_of_its_own() -> None:
    much = HERE_NBYTES + 1
    assert isinstance(runner(workers=1, nbytes=much, is_safe=True), InProcessRunner)
    assert not isinstance(runner(workers=2, nbytes=much, is_safe=True), InProcessRunner)
    assert not isinstance(runner(workers=1, nbytes=much, is_safe=False), InProcessRunner)
