"""The notebook of the examples: its cells run in their order, and end with a page of pictures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.paths import EXAMPLES, FIND_TESTS

NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
CODES = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
LOOKED_AT = """
assert packed.manifest.complete and encoded.manifest.complete
assert packed.manifest.samples == encoded.manifest.samples == 12
assert len(batches) == 3
page = Path("report.html").read_text()
assert page.count("data:image/") > 24  # the photos, and what the latents decode to
assert "a disc of the colour" in page
"""
DISPLAY = """
import sys
import types
sys.modules["IPython"] = ipython = types.ModuleType("IPython")
ipython.get_ipython = lambda: None
sys.modules["IPython.display"] = display = types.ModuleType("IPython.display")
display.IFrame = lambda path, **size: print("shown:", path)
"""
"""The part of IPython that a notebook has by itself."""


@pytest.mark.system
def test_its_cells_run_in_their_order(tmp_path: Path) -> None:
    """In one program, as a kernel runs them."""
    program = f"{FIND_TESTS}\n" + "\n\n".join([DISPLAY, *CODES, LOOKED_AT])
    (tmp_path / "cells.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "cells.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a disc of the colour") == 3
    assert "shown: report.html" in done.stdout


def test_it_is_kept_without_what_it_printed() -> None:
    codes = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert len(codes) == len(CODES) > 3
    assert not any(cell["outputs"] or cell["execution_count"] for cell in codes)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
