"""Whatever is changed in a file, it is one line or rejects: a case of each kind of `tools/fuzz`."""

from pathlib import Path

import pytest

from tests.kit.command_lines import python
from tests.kit.fuzz.fuzzing import cases_of, fuzz
from tests.kit.fuzz.judge import wrong_words
from tests.kit.fuzz.kinds import KINDS
from tests.kit.paths import ROOT

pytestmark = pytest.mark.system
SEED = 40


def test_a_changed_file_of_each_kind_is_one_line_or_rejects(foreign_sets: Path) -> None:
    """In little memory and time, and nothing else is touched."""
    told: list[str] = []
    with fuzz(SEED, foreign=str(foreign_sets), told=told.append) as going:
        faults = going.play(cases_of([kind.name for kind in KINDS], len(KINDS)))
        table = going.table()
    assert not faults, "\n".join([*told, table])
    assert sum(tally.taken for tally in going.tallies.values()) > len(KINDS)


def test_the_judge_of_the_fuzz_hears_what_is_wrong() -> None:
    assert not wrong_words(0, "")
    assert not wrong_words(1, "2 of 3\nwdsprep: a.tar is cut: fetch it again\n")
    for code, said in (
        (1, "wdsprep: a bug: KeyError: 'x'"),
        (1, "Traceback (most recent call last):\nwdsprep: it failed"),
        (1, "wdsprep: out of memory: give the command more"),
        (1, ""),
        (2, "wdsprep: one\nwdsprep: two"),
        (1, f"wdsprep: {'x' * 5000}"),
        (130, "wdsprep: interrupted"),
    ):
        assert wrong_words(code, said), said


RUNS = """
import os, sys, time
from pathlib import Path
from tests.kit.fuzz import judge
from tests.kit.fuzz.cases import Run
judge.LONGEST_S, judge.MOST_NBYTES = 3, 50_000_000
watch, outside = judge.Watch(Path(sys.argv[1], "inside")), Path(sys.argv[1], "outside")
for act in (
    lambda: 0,
    lambda: Path(sys.argv[1], "inside/a").write_text("x") * 0,
    lambda: outside.write_text("x") * 0,
    lambda: os.rename(outside, f"{outside}s") or 0,
    lambda: open("/etc/passwd").close() or 0,
    lambda: len(bytes(range(256)) * 400_000) * 0,
    lambda: time.sleep(5) or 0,
    lambda: 1 // 0,
):
    print(*judge.judged(Run("act", act), watch).wrong)
"""


def test_the_judge_of_the_fuzz_sees_what_runs_touch_and_take(tmp_path: Path) -> None:
    """In a process of its own, since its hook stays."""
    (tmp_path / "inside").mkdir()
    said = python(RUNS, tmp_path, cwd=ROOT).stdout
    nothing, inside, written, renamed, read, large, long, *trace = said.splitlines()
    assert (nothing, inside) == ("", "")
    assert written == f"it touched {tmp_path}/outside"
    assert renamed == f"it touched {tmp_path}/outside it touched {tmp_path}/outsides"
    assert read == "it read /etc/passwd"
    assert large.startswith("it took 0.1 GB")
    assert long == "it did not end in 3 s"
    assert "ZeroDivisionError: integer division or modulo by zero" in trace
