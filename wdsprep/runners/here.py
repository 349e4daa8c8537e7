"""Work that little can be left of: on as many workers as it has units for, or in this process."""

from collections.abc import Callable, Generator, Iterable

from wdsprep.cpus import usable_cpus
from wdsprep.runners import make_runner
from wdsprep.runners.base import CrewOptions, Event, Finished, Runner, Step, Unit, Work, settled

HERE_NBYTES = 64 << 20  # less than this is read in the time that worker processes take to start


class InThisProcess:
    """A runner that does one unit after another in this process."""

    def run(self, work: Work, units: Iterable[Unit]) -> Generator[Event, None, None]:
        call = work.open()
        for unit in units:
            steps = call(unit)
            while True:
                try:
                    yield Step(unit=unit, value=next(steps))
                except StopIteration as end:
                    yield Finished(unit=unit, result=end.value)
                    break


def runner_for(
    options: CrewOptions, units: int, nbytes: int, *, told: Callable[[str], None], name: str
) -> Runner:
    """No more workers than units, and none where these are of few bytes."""
    if nbytes <= HERE_NBYTES:
        return InThisProcess()
    runner = settled(options, told).runner
    most = options.least or (usable_cpus() if runner == "local" else 0)
    return make_runner(
        runner,
        workers=min(most, units),
        max_workers=options.most,
        max_attempts=options.max_attempts,
        address=options.ray_address,
        name=name,
    )
