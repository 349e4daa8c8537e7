"""What `wdsprep report` says on the way and at the end."""

import json
from collections.abc import Sequence
from typing import Any

from wdsprep.progress import ProgressLine, human_bytes, plural
from wdsprep.report import write_report
from wdsprep.terminal import printed


def report(datasets: Sequence[str], output: str, *, as_json: bool, **options: Any) -> str:
    """Write the report as the command line asks; what came of it, as text."""
    line = ProgressLine()
    written = write_report(datasets, output, heard=line.show, **options)
    line.clear()
    if as_json:
        facts = {"nbytes": written.nbytes, "report": output, "samples": written.samples}
        return json.dumps(facts, sort_keys=True)
    shown = plural(written.samples, "sample")
    size = human_bytes(written.nbytes)
    return printed([f"{output}: {size}, {shown} shown: open it in a browser"])
