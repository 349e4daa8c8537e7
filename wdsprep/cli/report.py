"""What `wdsprep report` says: what it is about to do, how far it is, and where the page is."""

import sys
from collections.abc import Iterator
from typing import Any

import click

from wdsprep.cli.output import Show
from wdsprep.reporting import ReportListener, WrittenReport
from wdsprep.text import human_bytes, one_line, plural


class ReportShow(Show[WrittenReport]):
    """Asks before it replaces a file that is no report, where somebody can answer."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(as_json=as_json, waits=False)
        self.listener = ReportListener(told=self.line.say, heard=self.line.show, asked=asked)

    def facts(self, written: WrittenReport) -> Iterator[dict[str, Any]]:
        yield {"nbytes": written.nbytes, "report": written.output, "samples": written.samples}

    def summary(self, written: WrittenReport) -> Iterator[str]:
        shown = f"{human_bytes(written.nbytes)}, {plural(written.samples, 'sample')} shown"
        yield f"{written.output}: {shown}: open it in a browser"


def asked(output: str, kind: str = "no report") -> bool:
    """Ask whether to replace a file. The answer is no where nobody can answer."""
    question = one_line(f"{output} is there already and is {kind}: replace it?")
    try:
        return sys.stdin.isatty() and click.confirm(question, err=True)
    except click.Abort:  # no answer, or Ctrl-C
        return False
