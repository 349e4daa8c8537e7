"""Cases in processes that may end or hang, and a table of how they went."""

import contextlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.kit.fuzz.child import play_all
from tests.kit.paths import ROOT

PATIENCE_S = 400.0
"""Without a word of a process: a run ends itself sooner, unless it hangs in a library."""
AT_ONCE = 60
"""Cases of a process, so that what one leaves there does not add up."""
SENTINELS = ("home", "tmp", "cwd", "beside")
ROW = "{:<24} {:>7} {:>7} {:>7} {:>8} {:>9} {:>7}"
HEADS = ("kind", "files", "runs", "taken", "longest", "peak MB", "faults")
Case = tuple[str, int]


@dataclass(kw_only=True)
class Tally:
    """How the cases of one kind went."""

    files: int = 0
    runs: int = 0
    taken: int = 0
    longest_s: float = 0.0
    peak_mb: float = 0.0
    faults: int = 0


@dataclass(kw_only=True)
class Fuzz:
    """One fuzz: where it lies, and how it went so far."""

    root: Path
    seed: int
    told: Callable[[str], Any] = print
    tallies: dict[str, Tally] = field(default_factory=dict)

    def play(self, cases: Sequence[Case]) -> int:
        """Go through cases, a process for some of them; return how many went wrong."""
        for first in range(0, len(cases), AT_ONCE):
            left = list(cases[first : first + AT_ONCE])
            while left:
                left = left[self._some(left) :]
        return sum(tally.faults for tally in self.tallies.values())

    def _some(self, cases: Sequence[Case]) -> int:
        """Go through cases in one process, until it ends; return how many are over."""
        over, run, (ours, its) = 0, "nothing", multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("spawn").Process(
            target=play_all, args=(its, cases, self.seed, self.root)
        )
        with patch.dict(os.environ, self._environment()):
            child.start()
        its.close()
        with contextlib.suppress(EOFError):
            while ours.poll(PATIENCE_S):
                said = ours.recv()
                run = said.get("run", run)
                if "runs" in said:
                    self._note(said)
                    over += 1
            child.kill()
        child.join()
        if over < len(cases):
            name, number = cases[over]
            words = (self.root / "stderr").read_text().strip()[-600:]
            wrong = f"{run}: the process ended with {child.exitcode}: {words}"
            self._note({"kind": name, "number": number, "file": "", "runs": [], "wrong": [wrong]})
            over += 1
        shutil.rmtree(self.root / "cases", ignore_errors=True)
        return over

    def _environment(self) -> dict[str, str]:
        places = {"HOME": "home", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache"}
        places["TORCHINDUCTOR_CACHE_DIR"] = "cache"  # torch makes it as parts of it are imported
        settings = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        return settings | {name: str(self.root / at) for name, at in places.items()}

    def _note(self, said: dict[str, Any]) -> None:
        tally = self.tallies.setdefault(said["kind"], Tally())
        tally.files += 1
        for _name, code, seconds, nbytes in said["runs"]:
            tally.runs += 1
            tally.taken += code in (0, 3)
            tally.longest_s = max(tally.longest_s, round(seconds, 1))
            tally.peak_mb = max(tally.peak_mb, nbytes // 10**6)
        if said["wrong"]:
            tally.faults += 1
            again = f"--kind {said['kind']} --seed {self.seed} --first {said['number']} --files 1"
            self.told(f"tools/fuzz {again}    {said['file']}")
            for wrong in said["wrong"]:
                self.told(f"    {wrong}")

    def table(self) -> str:
        rows = [ROW.format(name, *vars(tally).values()) for name, tally in self.tallies.items()]
        return "\n".join([ROW.format(*HEADS), *rows])


@contextlib.contextmanager
def fuzz(seed: int, *, foreign: str = "", told: Callable[[str], Any] = print) -> Iterator[Fuzz]:
    """Make what is to be changed, in a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        root = Path(folder).resolve()
        for name in (*SENTINELS, "sound"):
            (root / name).mkdir()
            (root / name / "sentinel").write_text("nobody has to touch this")
        sound = root / "sound"
        words = [sys.executable, "-W", "ignore", "-m"]
        if foreign:
            (sound / "foreign").symlink_to(Path(foreign).resolve())
        else:
            _make([*words, "tests.kit.foreign_sets", str(sound / "foreign")])
        _make([*words, "tests.kit.fuzz.datasets", str(sound / "datasets")])
        yield Fuzz(root=root, seed=seed, told=told)


def _make(words: Sequence[str]) -> None:
    subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def cases_of(kinds: Iterable[str], files: int, first: int = 0) -> list[Case]:
    """Spread so many cases over kinds, as evenly as can be."""
    names = list(kinds)
    return [
        (name, first + number)
        for at, name in enumerate(names)
        for number in range(files // len(names) + (at < files % len(names)))
    ]
