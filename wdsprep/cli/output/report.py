"""The output of `wdsprep report`: the plan, progress, and where the page is."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click

from wdsprep.cli.output.shared import CommandOutput
from wdsprep.reporting.report import ReportListener, WrittenReport
from wdsprep.text import human_bytes, one_line, plural


class ReportOutput(CommandOutput[WrittenReport]):
    """The output of `report`: the plan, a progress line, and where the page is."""

    waits = False

    def __init__(self, options: Mapping[str, Any], *, as_json: bool) -> None:
        super().__init__(options, as_json=as_json)
        self.listener = ReportListener(
            told=self.line.say, heard=self.line.show, asked=ask_to_replace
        )

    def facts(self, written: WrittenReport) -> Iterator[dict[str, Any]]:
        yield {"nbytes": written.nbytes, "report": written.output, "samples": written.samples}

    def summary(self, written: WrittenReport) -> Iterator[str]:
        shown = f"{human_bytes(written.nbytes)}, {plural(written.samples, 'sample')} shown"
        yield f"{written.output}: {shown}: open it in a browser"


def ask_to_replace(output: str, kind: str = "not a report") -> bool:
    """Ask whether to replace a file, and return the answer; false if nobody can answer.

    `kind` says in the question what the file is.
    """
    question = one_line(f"{output} exists already and is {kind}: replace it?")
    try:
        return sys.stdin.isatty() and click.confirm(question, err=True)
    except click.Abort:  # no answer, or Ctrl-C
        return False
