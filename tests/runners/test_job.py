"""A job: what failed, where it stands and Ctrl-C mean the same in every command."""

import json
import os
import re
import shutil
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import wdsprep
from tests.kit.joined_sets import LATENTS, Images, write_part
from tests.kit.packs import pack, photos, tree
from wdsprep.cli import main
from wdsprep.errors import BusyError, FormatError
from wdsprep.runners.base import BrokenWorkerError, Event, Finished, HopelessError, Unit, Work
from wdsprep.runners.job import JobListener, JobStatus
from wdsprep.runners.make_runner import InProcessRunner, Job
from wdsprep.runners.options import WorkerOptions


# --- the job alone
@dataclass(frozen=True)
class Piece:
    nbytes: int

    @property
    def name(self) -> str:
        return str(self.nbytes)


@dataclass
class Halves:
    """Tells half of a unit on the way. Those in `fails` raise, as often as there are errors."""

    fails: dict[int, list[Exception]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def do(self, unit: Piece) -> Generator[int, None, int]:
        self.log.append(f"begun {unit.nbytes}")
        try:
            yield unit.nbytes // 2
            if self.fails.get(unit.nbytes):
                raise self.fails[unit.nbytes].pop(0)
        finally:
            self.log.append(f"ended {unit.nbytes}")
        return unit.nbytes * 10


PIECES = [Piece(20), Piece(40), Piece(10)]


def job_of(work: Halves, **heard: Any) -> Job[Piece]:
    options = WorkerOptions(runner="local", listener=JobListener(**heard))
    return Job(options, work.do, PIECES, name="halves")


def test_the_largest_goes_first_and_each_event_is_told_with_where_the_job_stands() -> None:
    told: list[JobStatus] = []
    job = job_of(Halves(), on_status=lambda status: told.append(status()))
    assert [(unit.nbytes, result) for unit, result in job.results()] == [
        (40, 400),
        (20, 200),
        (10, 100),
    ]
    assert [status.nbytes for status in told] == [20, 40, 50, 60, 65, 70]
    assert [status.units_done for status in told] == [0, 1, 1, 2, 2, 3]
    assert {(status.nbytes_of, status.units) for status in told} == {(70, 3)}
    assert [told[0].share_done, told[-1].share_done] == [20 / 70, 1]


def test_closing_a_job_ends_what_is_under_way() -> None:
    def interrupt(_status: object) -> None:
        raise KeyboardInterrupt

    work = Halves()
    with pytest.raises(KeyboardInterrupt), closing(job_of(work, on_status=interrupt)) as job:
        next(job.results())
    assert work.log == ["begun 40", "ended 40"]


# --- failures in this process cost what they cost among workers
@pytest.mark.parametrize(
    ("errors", "attempts", "reason"),
    [
        ([OSError("a")] * 2, 0, ""),
        ([BusyError("in the way")] * 2, 0, ""),
        ([ValueError("a\nb")] * 3, 3, "ValueError: a b"),
        ([HopelessError("it is not there")], 1, "it is not there"),
        ([BrokenWorkerError("gone")] * 2, 0, ""),
    ],
)
def test_a_unit_is_tried_as_often_here_as_among_workers(
    errors: list[Exception], attempts: int, reason: str
) -> None:
    work = Halves({20: list(errors)})
    job = job_of(work)
    done = [unit.nbytes for unit, _ in job.results()]
    assert sorted(done) == ([10, 40] if attempts else [10, 20, 40])
    failed = [(attempts, reason)] * bool(attempts)
    assert [(unit.attempts, unit.reason) for unit in job.quarantined] == failed
    assert work.log.count("begun 20") == (attempts or 3)
    assert job.status() == JobStatus(nbytes=70, nbytes_of=70, units_done=3, units=3, share_done=1.0)


def test_what_ends_the_run_among_workers_ends_it_here() -> None:
    with pytest.raises(FormatError, match="damaged: run"):
        list(job_of(Halves({20: [FormatError("x is damaged: run y")]})).results())


# --- in every command
@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images and latents, of three shards or more."""
    root = tmp_path_factory.mktemp("sets")
    pack(photos(root / "in", 12), root / "images", "--samples-per-shard", "4")
    write_part(str(root / "latents"), images=Images(sizes=(5, 4, 6)), fields=LATENTS)
    return root


COMMANDS = {
    "verify": ["verify", "images"],
    "duplicates": ["duplicates", "images", "--hashes", "out", "-o", "list"],
    "export": ["export", "latents", "out", "--to", "mds"],
    "select": ["select", "images", "out", "--samples-per-shard", "4"],
}


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the second unit of each job fail at each attempt, in this process.

    Return the names of units as they are begun.
    """
    seen: list[str] = []
    real = InProcessRunner.run

    def run(
        self: InProcessRunner, work: Work, units: Iterable[Unit]
    ) -> Generator[Event, None, None]:
        call = work()

        def do(unit: Unit) -> Generator[Any, None, Any]:
            seen.append(unit.name)
            if unit.name in seen[1:2]:
                raise OSError("the disk is gone")
            return (yield from call(unit))

        return real(self, lambda: do, units)

    monkeypatch.setattr(InProcessRunner, "run", run)
    return seen


@pytest.mark.parametrize("command", COMMANDS)
def test_the_rest_is_done_and_what_failed_is_named_with_the_next_step(
    command: str,
    sets: Path,
    tmp_path: Path,
    failing: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 3 where a result is of what could be done, an error where it is of all."""
    words = placed(command, sets, tmp_path)
    code = main([*words, "--json"])
    said = capsys.readouterr()
    name = failing[1]
    assert len(failing) == len(set(failing)) + 2  # one three times
    assert len(set(failing)) > 2
    if command in ("duplicates", "export"):
        assert (code, said.out) == (1, "")
        line = said.err.splitlines()[-1]
        assert "1 shard could not be" in line
        assert f"such as {name} (OSError: the disk is gone): run the same command again" in line
    else:
        assert code == 3
        facts = json.loads(said.out)
        if command == "select":
            assert facts["quarantined"] == [name]
        else:
            assert [finding["kind"] for finding in facts["findings"]] == ["unchecked"]
    monkeypatch.undo()
    check_goes_on(command, sets, tmp_path)


MOVE = "not a file: move it away, then run the same command again"
OBSTRUCTED = {
    "verify": (3, "stands in its place: move it out of the dataset"),
    "select": (3, MOVE),
    "duplicates": (1, f"1 shard could not be .*{MOVE}"),
    "export": (1, f"1 shard could not be .*{MOVE}"),
}


@pytest.mark.parametrize(
    ("command", "kind"),
    [*((name, "folder") for name in (*COMMANDS, "encode")), ("verify", "pipe"), ("encode", "pipe")],
)
def test_what_stands_in_the_place_of_a_shard_is_the_trouble_of_that_shard(
    command: str, kind: str, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "latents" if command == "export" else "images"
    shutil.copytree(sets, tmp_path / "sets")
    tars = sorted((tmp_path / "sets" / source).rglob("*.tar"))
    tars[1].unlink()
    tars[1].mkdir() if kind == "folder" else os.mkfifo(tars[1])
    if command == "encode":
        options = {"resolution": 32, "model": "tiny", "workers": 1}
        with patch("wdsprep.encoding.run_plan.make_runner", lambda *_, **__: InProcessRunner()):
            encoded = wdsprep.encode(tmp_path / "sets/images", tmp_path / "out", **options)
        (failed,) = encoded.quarantined
        assert len(encoded.manifest.shards) == len(tars) - 1
        assert failed.reason.endswith(MOVE)
        return
    code, words = OBSTRUCTED[command]
    assert main(placed(command, tmp_path / "sets", tmp_path)) == code
    assert re.search(words, "".join(capsys.readouterr()))


def check_goes_on(command: str, sets: Path, root: Path) -> None:
    """The same command does what is left, and gives what an undisturbed run gives."""
    (root / "fresh").mkdir()
    for place in (root, root / "fresh"):
        assert main([*placed(command, sets, place), "-q"]) == 0
    if command != "verify":
        assert tree(root / "out") == tree(root / "fresh/out")


def placed(command: str, sets: Path, root: Path) -> list[str]:
    places = {"images": sets / "images", "latents": sets / "latents"}
    places |= {name: root / name for name in ("out", "list")}
    return [str(places.get(word, word)) for word in COMMANDS[command]]


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_is_one_line_and_the_same_command_goes_on(
    command: str,
    sets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = InProcessRunner.run

    def run(
        self: InProcessRunner, work: Work, units: Iterable[Unit]
    ) -> Generator[Event, None, None]:
        for event in real(self, work, units):
            if isinstance(event, Finished):
                raise KeyboardInterrupt
            yield event

    words = placed(command, sets, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(InProcessRunner, "run", run)
        assert main(words) == 130
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    again = "the same command to go on from here"
    if command == "verify":  # which keeps nothing to go on from
        again = "the same command again"
    kept = re.search(r": (\d+ of \d+ \w+ are kept|no \w+ was finished), and the work on", last)
    if kept and kept[1].startswith("no "):
        again = "the same command again"
    assert last.startswith("wdsprep: interrupted: ")
    assert last.endswith(f": run {again}")
    assert not list(tmp_path.rglob("*.tmp*"))
    check_goes_on(command, sets, tmp_path)
