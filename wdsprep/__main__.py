"""The console script and `python -m wdsprep`.

Ctrl-C and SIGTERM are answered in one line, even this early, and are never lost. File names are
UTF-8, whatever the locale says of a terminal.
"""

import os
import signal
import sys
import threading


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _resend_interrupt(lost: "sys.UnraisableHookArgs") -> None:
    """Send an interrupt again if Python has dropped it.

    Python drops an exception that is raised in a destructor or in the callback of a weak reference,
    and importing runs many of these. The interrupt is sent again 0.1 s later: sooner, it might hit
    this function.
    """
    if issubclass(lost.exc_type, KeyboardInterrupt):
        main_thread = threading.get_ident()
        threading.Timer(0.1, signal.pthread_kill, [main_thread, signal.SIGTERM]).start()
    else:
        sys.__unraisablehook__(lost)


def _restart_in_utf8() -> None:
    """Start Python again in its UTF-8 mode if the encoding of the locale is another one.

    Workers inherit the mode. So a file has the same name in lists of inputs, whoever packs it.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606  ourselves


def main() -> int:
    _restart_in_utf8()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # runners/stuck_workers says why
    signal.signal(signal.SIGTERM, _interrupt)
    sys.unraisablehook = _resend_interrupt
    try:
        from wdsprep.cli import main as command
    except KeyboardInterrupt:  # nothing has begun
        sys.stderr.write("\rwdsprep: interrupted: run the same command again\n")
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
