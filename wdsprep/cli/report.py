"""What `wdsprep report` says: what it is about to do, how far it is, and where the page is."""

import json
import sys

import click

from wdsprep.cli.output import Kept, ProgressLine
from wdsprep.reporting import ReportListener, WrittenReport
from wdsprep.text import human_bytes, one_line, plural


class ReportShow:
    """Asks before it replaces a file that is no report, where somebody can answer."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._line = ProgressLine()
        self.listener = ReportListener(told=self._line.say, heard=self._line.show, asked=asked)

    def result(self, written: WrittenReport) -> list[str]:
        self._line.clear()
        if self._as_json:
            facts = {"nbytes": written.nbytes, "report": written.output, "samples": written.samples}
            return [Kept(json.dumps(facts, sort_keys=True))]
        shown = f"{human_bytes(written.nbytes)}, {plural(written.samples, 'sample')} shown"
        return [f"{written.output}: {shown}: open it in a browser"]


def asked(output: str, kind: str = "no report") -> bool:
    """Whether to replace a file, where somebody can answer."""
    question = one_line(f"{output} is there already and is {kind}: replace it?")
    try:
        return sys.stdin.isatty() and click.confirm(question, err=True)
    except click.Abort:  # no answer, or Ctrl-C
        return False
