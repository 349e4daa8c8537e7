"""Make a runner: of processes on this machine, or of actors on a Ray cluster."""

from wdsprep.errors import UsageError
from wdsprep.runners.base import Runner, RunnerSettings
from wdsprep.runners.options import check_span
from wdsprep.text import brief


def make_runner(kind: str, settings: RunnerSettings) -> Runner:
    """Return the runner of a kind, `local` or `ray`."""
    check_span(kind, settings.workers, settings.max_workers)
    if kind == "local":
        from wdsprep.runners.local import LocalRunner

        return LocalRunner(settings=settings)
    if kind == "ray":
        from wdsprep.runners.ray.runner import RayRunner

        return RayRunner(settings=settings)
    raise UsageError(f"there is no runner {brief(kind)}: choose local or ray")
