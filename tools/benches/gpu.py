"""What a lent GPU settles in twelve minutes: a plan of steps, each with a time limit of its own.

    .venv/bin/python tools/bench gpu [--json FILE] [--only STEP] [--small]

The steps of `PLAN` run in their order, what is right before what is fast, in one process, so that
imports are paid once. Each leaves its line of JSON as soon as it ends. A step that fails, or takes
longer than its limit, costs its own line alone: the process is ended, since a CUDA context may be
broken, and another does the rest. What a step has found until then is in its line. At the end a
summary says what each step settles. Exit code 1 if a step did not end well.

Neither network nor Ray is needed. Networks have their real shapes and random weights. `--small`
tries all of it on a CPU with tiny networks: its figures say nothing of speed.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from tools.benches import call, gpu_steps


@dataclass(frozen=True)
class Step:
    """A step of the plan: a function of that name in a module, which is ended after `limit_s`.

    `settles` says what is known when its figures are there.
    """

    name: str
    limit_s: float
    settles: str
    module: str = gpu_steps.__name__


PLAN = (
    Step("versions", 30, "which card, driver and libraries all figures are of"),
    Step(
        "bits", 90, "whether noise is the CPU's, and whether repetition or companions change bits"
    ),
    Step("whole", 90, "how fast a run is, whether its bits return, whether a large batch settles"),
    Step("broken", 110, "whether a run ends well though the GPU of one of two workers breaks"),
    Step("turns", 50, "whether networks that take turns on a GPU give its memory back"),
    Step("vae", 60, "which layout and precision of a VAE is fast, and which is close"),
    Step("profile", 40, "why the device waits: gaps, synchronisations, pageable copies, launching"),
    Step("score", 70, "how fast CLIP and SigLIP are in their real shapes"),
    Step("compiled", 90, "what --compile costs at the start, and gives after it, for two shapes"),
    Step("large_text", 110, "how fast a T5-XXL is by batch, and which batch keeps a GPU busy"),
)
SMALL_SLOWNESS = 5
"""How many times its limit a step may take with `--small`, where a CPU does it."""


@dataclass
class Result:
    """The outcome of a step, which is one line of JSON."""

    step: str
    seconds: float = 0.0
    error: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


class StepProcess:
    """A process that does steps, one after the other, and sends what it finds through a pipe."""

    def __init__(self, home: Path, *, small: bool) -> None:
        self._received, sent = os.pipe()
        self._log = home / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                call(gpu_steps.serve, home, small, sent),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[sent],
                start_new_session=True,  # workers of `encode` end with it
            )
        os.close(sent)
        self._rest = b""

    def do(self, step: Step) -> Result:
        """Do a step within its limit, and return its result. The process may be gone then."""
        began, result = time.monotonic(), Result(step.name)
        if self._process.stdin is not None:
            self._process.stdin.write(f"{step.module}:{step.name}\n".encode())
            self._process.stdin.flush()
        for message in self._messages(began + step.limit_s):
            if "figure" in message:
                result.figures[message["figure"]] = message["value"]
            else:
                result.error = message["error"]
                break
        else:
            is_late = time.monotonic() >= began + step.limit_s
            result.error = f"not done after {step.limit_s:g} s" if is_late else self._last_words()
        result.seconds = round(time.monotonic() - began, 2)
        return result

    def _messages(self, until: float) -> Iterator[dict[str, Any]]:
        """Yield messages until a moment, or until the process has ended."""
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                yield json.loads(line)
                continue
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._received], [], [], left)[0]:
                return
            if not (data := os.read(self._received, 1 << 16)):
                return
            self._rest += data

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        said = next((line for line in reversed(lines) if line.strip()), "nothing was said")
        return f"its process ended with {self._process.wait()}: {said}"

    def close(self) -> None:
        """End the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        os.close(self._received)


def run(
    home: Path, plan: Sequence[Step] = PLAN, *, small: bool = False, lines: TextIO | None = None
) -> list[Result]:
    """Do the steps of a plan, and return their results; each is written to `lines` at once."""
    results: list[Result] = []
    process: StepProcess | None = None
    try:
        for step in plan:
            process = process or StepProcess(home, small=small)
            results.append(process.do(step))
            line = json.dumps(vars(results[-1]))
            print(line, flush=True)
            if lines is not None:
                print(line, file=lines, flush=True)
            if results[-1].error:
                process.close()
                process = None
    finally:
        if process is not None:
            process.close()
    return results


def summary(plan: Sequence[Step], results: Sequence[Result]) -> Iterator[str]:
    """Yield lines that say what each step settles, and by which figures."""
    for step, result in zip(plan, results, strict=True):
        state = f"FAILED: {result.error}" if result.error else "settled"
        yield f"{step.name} ({result.seconds:.0f} of {step.limit_s:g} s) {state}: {step.settles}"
        yield from (f"    {name}: {value}" for name, value in result.figures.items())


def main(home: Path, *, only: str, small: bool, json_file: Path | None) -> int:
    """Do the steps whose names contain `only`, and return the exit code."""
    slowness = SMALL_SLOWNESS if small else 1
    plan = [replace(s, limit_s=slowness * s.limit_s) for s in PLAN if only in s.name]
    if not plan:
        names = ", ".join(step.name for step in PLAN)
        print(f"bench: no step has {only!r} in its name: take a part of {names}", file=sys.stderr)
        return 2
    if json_file is None:
        results = run(home, plan, small=small)
    else:
        with closing(json_file.open("w")) as lines:
            results = run(home, plan, small=small, lines=lines)
    print("", *summary(plan, results), sep="\n")
    return int(any(result.error for result in results))
