"""A call from Python shows how far it is, also in a notebook."""

import sys
import types
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

import wdsprep
from tests.kit.command_lines import python
from tests.kit.encodes import in_this_process
from tests.kit.packs import packing_here, photos
from tests.kit.terminals import Screen, draw_at_once
from wdsprep.cli import main
from wdsprep.errors import UsageError
from wdsprep.runners.base import Event, Step
from wdsprep.runners.job import JobListener, JobStatus
from wdsprep.runners.options import ListenedOptions
from wdsprep.runners.progress import JobProgress
from wdsprep.runners.run import Run
from wdsprep.terminal import CLEAR, TERMINAL

FUNCTIONS = (wdsprep.pack, wdsprep.encode, wdsprep.import_, wdsprep.select, wdsprep.remove)
OTHERS = (wdsprep.duplicates, wdsprep.verify, wdsprep.repair, wdsprep.export, wdsprep.report)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is drawn as soon as it is known."""
    draw_at_once(monkeypatch)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("JPY_PARENT_PID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    TERMINAL.stop_ticking()
    TERMINAL.clear()


def packed(tmp_path: Path, **options: Any) -> Any:
    source = photos(tmp_path / "photos", 3)
    return wdsprep.pack(source, tmp_path / "images", buckets=(32,), workers=1, **options)


@pytest.mark.parametrize("function", [*FUNCTIONS, *OTHERS, wdsprep.card])
def test_each_function_with_a_listener_takes_progress(function: Any) -> None:
    options = function.__signature__.parameters
    assert options["progress"].default is True
    assert "listener" in options
    with pytest.raises(UsageError, match="progress 'no': give True or False"):
        ListenedOptions(progress="no")  # type: ignore[arg-type]


@pytest.mark.usefixtures("at_once")
def test_a_call_at_a_terminal_draws_one_line_and_takes_it_away(tmp_path: Path) -> None:
    with redirect_stderr(Screen()) as screen, packing_here():
        packed(tmp_path)
    drawn = screen.getvalue().split(CLEAR)
    assert any("slice 0 of 1" in one or "slice 1 of 1" in one for one in drawn)
    assert drawn[-1] == ""
    assert not any("\n" in one for one in drawn if "slice" in one)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("quiet", [{"progress": False}, {"listener": JobListener()}])
def test_a_call_that_is_quiet_draws_nothing(tmp_path: Path, quiet: dict[str, Any]) -> None:
    with redirect_stderr(Screen()) as screen, packing_here():
        packed(tmp_path, **quiet)
    assert screen.getvalue() == ""


@pytest.mark.system
def test_in_a_pipe_a_short_call_prints_nothing_and_a_child_process_neither(tmp_path: Path) -> None:
    code = (
        "import multiprocessing, sys, wdsprep\n"
        "from wdsprep import terminal\n"
        "def work(every):\n"
        "    terminal.PIPE_S = every\n"
        "    wdsprep.pack(sys.argv[1], f'{sys.argv[2]}-{every}', workers=1)\n"
        "if __name__ == '__main__':\n"
        "    work(30)\n"
        "    print('here', file=sys.stderr)\n"
        "    child = multiprocessing.get_context('fork').Process(target=work, args=(0,))\n"
        "    child.start(); child.join(); assert child.exitcode == 0\n"
        "    print('now', file=sys.stderr)\n"
        "    work(0.0)\n"
    )
    source = photos(tmp_path / "photos", 3)
    done = python(code, source, tmp_path / "images")
    first, rest = done.stderr.split("here\n")
    child, last = rest.split("now\n")
    assert (first, child) == ("", "")
    assert "slice" in last
    assert not done.stdout


@pytest.mark.usefixtures("at_once")
def test_a_notebook_has_one_output_that_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            assert raw
            shown.append(data["text/plain"])

    def display(data: dict[str, str], **_: object) -> Handle:
        shown.append(data["text/plain"])
        return Handle()

    shell = types.SimpleNamespace(kernel=object())
    parts = {"IPython": {"get_ipython": lambda: shell}, "IPython.display": {"display": display}}
    for name, inside in parts.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**inside))
    with packing_here():
        packed(tmp_path)
    assert any("slice" in one for one in shown)
    assert shown[-1] == ""
    assert "slice" not in "".join(capsys.readouterr())


def test_samples_are_counted_where_their_number_is_known(tmp_path: Path) -> None:
    statuses: list[JobStatus] = []
    source = photos(tmp_path / "photos", 5)
    (source / "broken.jpg").write_bytes(b"no image")
    listener = JobListener(on_status=lambda status: statuses.append(status()))
    how = {"buckets": (32,), "samples_per_shard": 2, "workers": 1, "listener": listener}
    for limit in (4, 0):
        with packing_here():
            wdsprep.pack(source, tmp_path / "images", limit=limit, **how)
        assert statuses[-1].samples_of == (4 if limit else 2)
    options = {"resolution": 32, "model": "tiny", "listener": listener}
    with in_this_process():
        wdsprep.encode(tmp_path / "images", tmp_path / "latents", **options)
    assert (statuses[-1].samples, statuses[-1].samples_of) == (5, 5)

    class Encoding(JobProgress):
        counted = "image"

    status = JobStatus(samples=3, samples_of=20, units=2, rejects={"too_small": 1})
    first, _, *others = Encoding(waits=False).parts(status)
    assert (first, others) == ("4 of 20 images", ["shard 0 of 2", "rejects: too_small 1"])


def test_an_interrupt_says_what_is_kept_and_what_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first slice is finished, the second is not: its worker, this process, stops with it."""
    heard: list[JobStatus] = []
    take = Run.take

    def interrupt_second(run: Run, event: Event) -> None:
        take(run, event)
        heard.append(run.status())
        if isinstance(event, Step) and heard[-1].units_done == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "take", interrupt_second)
    words = ["pack", str(photos(tmp_path / "photos", 8)), str(tmp_path / "images")]
    words += ["--buckets", "32", "--samples-per-shard", "5", "--workers", "1"]
    with packing_here():
        assert main(words) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert heard[-1].unfinished == 3
    assert last == (
        "wdsprep: interrupted: 1 of 2 slices are kept, and the work on 3 images of others is lost: "
        "run the same command to go on from here"
    )
    monkeypatch.setattr(Run, "take", take)
    with packing_here():
        assert main(words) == 0
    assert "3 images packed in" in capsys.readouterr().out
    assert TERMINAL.left_off() == ("", True)
    nothing = JobProgress(waits=False).left_off(JobStatus(units=1, unfinished=9))
    assert nothing == ("no shard was finished, and the work on 9 samples is lost", False)
