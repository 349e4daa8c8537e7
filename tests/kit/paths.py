"""Where the files of this checkout are, and how another process finds `tests.kit`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""`python -m tests.kit.NAME` runs from here."""
TOOLS = ROOT / "tools"
EXAMPLES = TOOLS / "examples"
README = ROOT / "README.md"
FIND_TESTS = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
"""What a program in a string begins with."""
