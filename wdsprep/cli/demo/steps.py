"""The steps of `wdsprep demo`: run commands on drawn pictures, with no download and no GPU.

Each step is a command as a user would type it, which is printed and then run. The pictures are
those of `wdsprep.cli.demo.pictures`. A second run goes on where the first one stopped, as the
commands do, and keeps the pictures. With `overwrite` it draws them again, and each command starts
over; files of others among them stay, as they do with the commands.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from wdsprep.cli.demo.pictures import write_pictures
from wdsprep.errors import UsageError, WorkError

LOAD = '''\
"""Read the latents of the demo, first by wdsprep.load, then by plain webdataset."""

from pathlib import Path

import webdataset as wds

import wdsprep

here = Path(__file__).parent
loader = wdsprep.load(
    str(here / "latents-256"), global_batch=4, fields=("latent", "emb", "txt", "key")
)
for batch in loader:
    print("wdsprep.load", batch["latent"].shape, batch["emb"].shape, batch["txt"][0])
    if loader.step == 3:
        print("its state, with which a trainer resumes:", loader.state_dict())
        break

dataset = wds.WebDataset(loader.urls(), shardshuffle=False).shuffle(100).decode()
for number, (latent, caption) in enumerate(dataset.to_tuple("latent.npy", "txt")):
    if number == 3:
        break
    print("webdataset", latent.shape, caption)
'''
AFTERWARDS = """\
Open {folder}/report.html in a browser; {folder}/load.py is how a trainer begins. Then try your own:
a folder of images, each with its caption in a .txt beside it

  wdsprep pack FOLDER shards/images
  wdsprep encode shards/images shards/trial --resolution 256 --model tiny --limit 100
  wdsprep encode --resolution 256       # with a real model, for training: on GPUs"""


def demo(
    folder: str,
    *,
    overwrite: bool = False,
    run: Callable[[list[str]], int],
    say: Callable[[str], None],
    draw: Callable[[Path], tuple[int, int]] = write_pictures,
) -> int:
    """Run the demo in `folder`, and return its exit code.

    `run` runs a command of wdsprep and returns its exit code; `say` prints a text; `draw` writes
    the pictures, and returns how many are good and how many broken.
    """
    home = Path(folder)
    try:
        _draw(home, say, draw, overwrite=overwrite)
    except OSError as error:
        raise WorkError(
            f"{home} cannot hold the pictures ({error}): give another folder"
        ) from error
    for title, words in steps(folder, overwrite=overwrite):
        say(f"\n# {title}\n$ {shlex.join(words)}")
        program, *arguments = words
        code = run(arguments) if program == "wdsprep" else _run_python(arguments)
        if code:
            say(f"\nthe demo stops here: the command above returned exit code {code}")
            return code
    say("\n" + AFTERWARDS.format(folder=folder))
    return 0


def steps(folder: str, *, overwrite: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the words of each step, in their order.

    A command whose first word is `wdsprep` runs in this process.
    """
    anew = ["--overwrite"] if overwrite else []
    images, latents = f"{folder}/images", [f"{folder}/latents-{side}" for side in (256, 512)]
    yield (
        "Check the pictures and pack them into tar shards, by resolution",
        ["wdsprep", "pack", f"{folder}/downloads", images, *anew],
    )
    words = ["wdsprep", "encode", images, f"{folder}/latents-{{resolution}}"]
    yield (
        "Encode them in one pass: those large enough for 256 pixels, and for 512",
        [*words, "--resolution", "256,512", "--model", "tiny", *anew],
    )
    yield (
        "Check every byte, and that images and latents match",
        ["wdsprep", "verify", images, *latents],
    )
    yield "Load batches, as a trainer does", ["python", f"{folder}/load.py"]
    yield (
        "Put all of it on one page: what came in, what was rejected, what latents look like",
        ["wdsprep", "report", images, *latents, "-o", f"{folder}/report.html"],
    )


def _draw(
    home: Path,
    say: Callable[[str], None],
    draw: Callable[[Path], tuple[int, int]],
    *,
    overwrite: bool,
) -> None:
    """Draw the pictures and write `load.py`, unless that was done before and `overwrite` is false.

    They are drawn in a folder with another name first, so a folder called `downloads` is complete.
    Raise UsageError if `home` holds other files and no earlier demo.
    """
    downloads, begun = home / "downloads", home / "downloads.part"
    script = home / "load.py"
    is_ours = script.is_file() and script.read_text().startswith(LOAD.partition("\n")[0])
    is_drawn = downloads.is_dir() and is_ours
    if is_drawn and not overwrite:
        say(f"{downloads}: drawn before")
        return
    rest = {begun} | ({script} if is_ours else set())
    if home.is_dir() and not is_drawn and set(home.iterdir()) - rest:
        raise UsageError(f"{home} holds other files: give a new folder for the demo")
    shutil.rmtree(begun, ignore_errors=True)
    begun.mkdir(parents=True)
    script.write_text(LOAD)
    good, broken = draw(begun)
    _move(begun, downloads)
    say(f"{downloads}: {good} pictures drawn, and {broken} broken ones put among them")


def _move(begun: Path, downloads: Path) -> None:
    if not downloads.exists():
        begun.rename(downloads)
        return
    for path in [path for path in begun.rglob("*") if path.is_file()]:
        place = downloads / path.relative_to(begun)
        place.parent.mkdir(exist_ok=True)
        path.replace(place)
    shutil.rmtree(begun)


def _run_python(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, *arguments], check=False).returncode  # noqa: S603
