"""`wdsprep demo`: run commands on drawn pictures, with no download and no GPU.

Each step is a command as a user would type it, which is printed and then run. A second run goes on
where the first one stopped, as the commands do, and keeps the pictures. With `overwrite` it draws
them again, and each command starts over; files of others among them stay, as they do with the
commands.

The pictures are a folder of downloads: many sizes and formats, captions, and broken files.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from random import Random

from PIL import Image, ImageColor, ImageDraw

from wdsprep.errors import UsageError, WorkError

# --- the pictures
PictureSize = tuple[int, int]
PICTURES = 60
FOLDERS = ("holiday", "scans", "web")
SIDES = (260, 280, 300, 340, 384, 440, 480, 520, 640)
SHAPES = (1.0, 1.0, 1.33, 1.5, 0.75, 0.67, 1.78)
SMALL: PictureSize = (160, 120)
LONG: PictureSize = (1600, 90)
COLOURS = ["black", "blue", "green", "grey", "orange", "pink", "purple", "red", "white", "yellow"]
CORNERS = {"disc": 60, "triangle": 3, "square": 4, "hexagon": 6}
PLACES = ((0.25, 0.3), (0.75, 0.3), (0.3, 0.7), (0.7, 0.75), (0.5, 0.5))


def draw(seed: object, size: PictureSize) -> tuple[Image.Image, str]:
    """Draw some shapes on clouds, as seed and size decide; return them with a caption."""
    random = Random(f"{seed}")  # noqa: S311 (a picture, no secret)
    ground, *colours = random.sample(COLOURS, random.randint(2, 4))
    clouds = Image.frombytes("L", (5, 4), random.randbytes(20)).resize(size)
    shade = tuple(value * 2 // 3 for value in ImageColor.getrgb(ground))
    image = Image.composite(Image.new("RGB", size, ground), Image.new("RGB", size, shade), clouds)
    shapes = []
    for colour, (x, y) in zip(colours, random.sample(PLACES, len(colours)), strict=True):
        name = random.choice(list(CORNERS))
        radius = random.uniform(0.1, 0.25) * min(size)
        around = (x * size[0], y * size[1], radius)
        ImageDraw.Draw(image).regular_polygon(
            around, CORNERS[name], random.randrange(360), fill=colour
        )
        shapes.append(f"{_article(colour)} {name}")
    return image, f"{' and '.join(shapes)} on {_article(ground)} background"


def _article(colour: str) -> str:
    return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour}"


def write_pictures(
    folder: Path, count: int = PICTURES, sides: Sequence[int] = SIDES
) -> tuple[int, int]:
    """Write the pictures of the demo with captions; return how many are good, how many broken.

    They go into new subfolders. Pictures that are too small or too long, and those whose caption
    cannot be decoded, count as broken.
    """
    random = Random("demo")  # noqa: S311 (pictures, no secret)
    for name in FOLDERS:
        (folder / name).mkdir()
    for number in range(count):
        side, shape = random.choice(sides), random.choice(SHAPES)
        size = (round(side * shape), side) if shape >= 1 else (side, round(side / shape))
        image, caption = draw(f"demo {number}", size)
        kind = list(KINDS)[number // 2 % len(KINDS)] if number % 2 else "jpg"
        stem = folder / FOLDERS[number % len(FOLDERS)] / f"{number:04}-{kind}"
        suffix, encode = KINDS[kind]
        stem.with_suffix(suffix).write_bytes(encode(image))
        # captions come mostly as text, sometimes as json or not at all
        if number % 20 == 7:
            facts = {"caption": caption, "artist": "wdsprep", "number": number}
            stem.with_suffix(".json").write_text(json.dumps(facts))
        elif number % 40 != 13:
            stem.with_suffix(".txt").write_text(f"{caption}\n", encoding="utf-8")
    return count, _write_broken(folder / "web")


# --- one picture in each of the ways that pictures come
def _encode(image: Image.Image, kind: str, **options: object) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


KINDS: dict[str, tuple[str, Callable[[Image.Image], bytes]]] = {
    "jpg": (".jpg", lambda image: _encode(image, "JPEG", quality=90)),
    "png": (".png", lambda image: _encode(image, "PNG")),
    "webp": (".webp", lambda image: _encode(image, "WEBP", quality=90, method=2)),
    "cmyk": (".jpg", lambda image: _encode(image.convert("CMYK"), "JPEG", quality=90)),
    "gif": (".gif", lambda image: _encode(image, "GIF")),
    "grey": (".jpg", lambda image: _encode(image.convert("L"), "JPEG", quality=90)),
    "tiff": (".tif", lambda image: _encode(image, "TIFF", compression="tiff_lzw")),
    "progressive": (".jpg", lambda image: _encode(image, "JPEG", quality=80, progressive=True)),
}
"""The extension of each kind of picture, and what encodes it."""


# --- what goes wrong in downloads
def _write_broken(folder: Path) -> int:
    whole, whole_caption = draw("broken", (400, 300))
    small, banner = (draw(seed, size)[0] for seed, size in (("small", SMALL), ("banner", LONG)))
    (_, jpg), (_, png) = KINDS["jpg"], KINDS["png"]
    page, sound = b"<!DOCTYPE html><html><body>404</body></html>", jpg(whole)
    broken = {f"cut-{quarters}.jpg": sound[: len(sound) * quarters // 4] for quarters in (1, 2, 3)}
    broken |= {"cut.png": png(whole)[:5000], "empty.jpg": b"", "banner.jpg": jpg(banner)}
    broken |= {f"moved-{number}.jpg": page for number in range(3)}
    broken |= {f"small-{number}.jpg": jpg(small) for number in range(3)}
    broken |= {f"foreign-{number}.jpg": sound for number in range(2)}
    for name, data in broken.items():
        (folder / name).write_bytes(data)
        caption = "un été à la mer" if name.startswith("foreign") else whole_caption
        encoding = "latin-1" if name.startswith("foreign") else "utf-8"
        (folder / name).with_suffix(".txt").write_text(f"{caption}\n", encoding=encoding)
    return len(broken)


# --- the steps
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


STEPS = (
    (
        "Check the pictures and pack them into tar shards, by resolution",
        "wdsprep pack {0}/downloads {0}/images",
    ),
    (
        "Encode them in one pass: those large enough for 256 pixels, and for 512",
        "wdsprep encode {0}/images {0}/latents-{{resolution}} --resolution 256,512 --model tiny",
    ),
    (
        "Check every byte, and that images and latents match",
        "wdsprep verify {0}/images {0}/latents-256 {0}/latents-512",
    ),
    ("Load batches, as a trainer does", "python {0}/load.py"),
    (
        "Put all of it on one page: what came in, what was rejected, what latents look like",
        "wdsprep report {0}/images {0}/latents-256 {0}/latents-512 -o {0}/report.html",
    ),
)
"""The title and the command of each step. A command of wdsprep runs in this process."""
OVERWRITING = ("pack", "encode")


def demo(
    folder: str,
    *,
    overwrite: bool = False,
    run: Callable[[list[str]], int],
    say: Callable[[str], None],
) -> int:
    """Run the demo in `folder`, and return its exit code.

    `run` runs a command of wdsprep and returns its exit code; `say` prints a text.
    """
    home = Path(folder)
    try:
        _begin(home, say, overwrite=overwrite)
    except OSError as error:
        raise WorkError(
            f"{home} cannot hold the pictures ({error}): give another folder"
        ) from error
    for title, command in STEPS:
        program, *arguments = (word.format(folder) for word in command.split())
        arguments += ["--overwrite"] * (overwrite and arguments[0] in OVERWRITING)
        say(f"\n# {title}\n$ {shlex.join([program, *arguments])}")
        if program == "wdsprep":
            code = run(arguments)
        else:
            code = subprocess.run([sys.executable, *arguments], check=False).returncode  # noqa: S603
        if code:
            say(f"\nthe demo stops here: the command above returned exit code {code}")
            return code
    say("\n" + AFTERWARDS.format(folder=folder))
    return 0


def _begin(home: Path, say: Callable[[str], None], *, overwrite: bool) -> None:
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
    good, broken = write_pictures(begun)
    if downloads.exists():  # what others put there stays
        shutil.copytree(begun, downloads, copy_function=os.replace, dirs_exist_ok=True)
        shutil.rmtree(begun)
    else:
        begun.rename(downloads)
    say(f"{downloads}: {good} pictures drawn, and {broken} broken ones put among them")
