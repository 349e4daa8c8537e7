"""The environments of the others, made the first time that they are needed.

Those that need torch share ours, which is the largest of all packages. Those that do without it are
kept from it: they would import it at their start, for nothing.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tools.benches import ROOT

PACKAGES = {
    "fetch": ("img2dataset",),
    "load": ("mosaicml-streaming>=0.13", "litdata>=0.2.69"),
    "profile": ("py-spy",),
}
SHARES_TORCH = ("load",)


def program(kind: str, name: str) -> Path:
    """A program of one of the environments."""
    home, wanted = ROOT / ".venv" / f"peers-{kind}", " ".join(PACKAGES[kind])
    made = home / "made"
    if not made.exists() or made.read_text() != wanted:
        print(f"bench: installing {wanted} into {home}", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        if kind in SHARES_TORCH:
            theirs = sysconfig.get_path("purelib", vars={"base": str(home)})
            Path(theirs, "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [home / "bin/python", "-m", "pip", "install", "--quiet", *PACKAGES[kind]]
        subprocess.run(pip, check=True)
        made.write_text(wanted)
    return home / "bin" / name
