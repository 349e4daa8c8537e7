"""Where the files of this checkout are, and how another process finds `tests.kit`."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""`python -m tests.kit.NAME` runs from here."""
TOOLS = ROOT / "tools"
EXAMPLES = TOOLS / "examples"
README = ROOT / "README.md"
LOADING_PAGE = ROOT / "wdsprep/loading/README.md"
FIND_TESTS = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
"""What a program in a string begins with."""


def pages() -> list[Path]:
    """Return the README, and the pages beside the code that it leads to: all that git tracks."""
    command = ["git", "-C", str(ROOT), "ls-files", "README.md", "*/README.md", "wdsprep/*/*.md"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.splitlines()]


def blocks(page: Path, *kinds: str, section: str = "") -> list[tuple[str, str]]:
    """The kind and the text of each block of code of these kinds, in a page or a section of it."""
    text = page.read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```({'|'.join(kinds)})\n(.*?)```", text, re.DOTALL)


def format_recipe(name: str) -> str:
    """The code on the page of the format that defines this function."""
    codes = [code for _kind, code in blocks(ROOT / "shards/README.md", "python")]
    (found,) = (code for code in codes if f"def {name}" in code)
    return found
