"""A real headless Chromium for tests, driven over a pipe by its DevTools protocol.

It speaks JSON, each message ended by a NUL, on the file descriptors 3 and 4: no port, no driver and
no package is needed.
"""

import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium-headless-shell", "chromium")
TIMEOUT_S = 60.0
HINT = "no Chromium is installed: apt-get install chromium-headless-shell"


def find_chromium() -> str:
    """Its path; skip the test, but fail in CI, where there is none."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail(HINT, pytrace=False)
        pytest.skip(HINT)
    return found


class Chromium:
    """One browser with one page. `asked` is every URL that the page has asked for."""

    def __init__(self, profile: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()  # what we read from, what it reads from
        self._in, self._out = ours[0], theirs[1]
        words = [
            find_chromium(),
            "--headless",
            "--no-sandbox",  # root has none
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        ]
        self._process = subprocess.Popen(
            words,
            close_fds=False,  # none of Python's own is inherited
            preexec_fn=partial(_take, theirs[0], ours[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs[0])
        os.close(ours[1])
        self._numbers, self._held = itertools.count(1), b""
        self._session = ""
        self.asked: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._out)
        self._process.kill()
        self._process.wait(timeout=TIMEOUT_S)
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._hear(answer)
        assert "error" not in answer, f"{method}: {answer}"
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        """Load a page to its end."""
        self.asked.clear()
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._hear(self._next())

    def evaluate(self, code: str) -> Any:
        """The value of an expression in the page."""
        done = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """The window's size, and whether its user likes it dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 16) if ready else b""
            assert data, f"Chromium says no more (exit code {self._process.poll()})"
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Network.requestWillBeSent":
            self.asked.append(event["params"]["request"]["url"])
        self._loaded |= event.get("method") == "Page.loadEventFired"


def _take(from_us: int, to_us: int) -> None:
    """In the new process: the pipes go where Chromium looks for them."""
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (from_us, to_us)]
    for fd, copy in zip((3, 4), copies, strict=True):
        os.dup2(copy, fd)


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Chromium]:
    with contextlib.closing(Chromium(profile)) as browser:
        yield browser
