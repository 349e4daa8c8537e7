"""`card`: the README of datasets for the Hugging Face hub, which people and the hub's viewer read.

A card begins with YAML: what the hub sorts datasets by, and which tars are which dataset, so that
the viewer and `datasets.load_dataset` find them among receipts and rejects. The rest is what a
reader wants to know first. It states nothing that is not in the datasets: the licence is for the
publisher to state. It has no pictures, since the shards have them and the viewer shows them;
captions are written as code, in which neither Markdown nor HTML means anything.

The last line has a digest of all lines before it. So a card that somebody has edited is recognised,
and is not replaced without a question.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from wdsprep.dataset.file_names import CARD
from wdsprep.dataset.npy_arrays import fields_of
from wdsprep.dataset.shapes import batch_that_fits
from wdsprep.dataset.thread_map import read_each
from wdsprep.errors import NotFoundError, UsageError
from wdsprep.options import Place, takes_datasets
from wdsprep.reporting.datasets import ReportDataset, check_folder, open_each
from wdsprep.reporting.options import REPO, CardOptions
from wdsprep.reporting.samples import ReadSample, pick, read_sample
from wdsprep.store import split_url
from wdsprep.store.base import local_path, write_bytes
from wdsprep.store.schemes import place_scheme, root_and_name
from wdsprep.text import human_bytes, one_line, plural

LONGEST = 300
LICENCE = "license: put here under which licence it is, such as cc-by-4.0"
MARK = "<!-- written by wdsprep card, {} -->\n"
_MARKED = re.compile(r"(.*)<!-- written by wdsprep card, ([0-9a-f]+) -->\n", re.DOTALL)
MOST_NBYTES = 1 << 20
SHARES = (0.05, 0.5, 0.95)
IMAGE_FACTS = {
    "bucket": "int64",
    "height": "int64",
    "source": "string",
    "source_height": "int64",
    "source_width": "int64",
    "width": "int64",
}
"""The fields that the json of every image has; others differ between samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A dataset card, where it was written, and the commands that upload it with its datasets.

    `output` is empty if the card was not written to a file.
    """

    text: str = field(repr=False)
    output: str
    uploads: tuple[str, ...]


@takes_datasets(CardOptions)
def card(datasets: Sequence[Place], options: CardOptions) -> Card:
    """Make the card of `datasets` for the dataset `repo` of the Hugging Face hub.

    The card is written to `output` if that is given.

        card = wdsprep.card("shards/images", output="shards/images/README.md")
        card.text, card.uploads  # what it says, and how to upload the datasets

    One dataset becomes the repository itself; each of several becomes a folder there with its
    own name. Datasets that are in `repo` already stay where they are. By default `repo` is the
    repository of the hub that all datasets are in, if there is one. `license` is one of the hub's
    names, such as cc-by-4.0; without it the card leaves a place for one. The card shows the
    captions of `samples` of each dataset, picked by `seed`. An earlier card is replaced if nobody
    changed it; `yes` replaces any other file too.
    """
    output, listener = os.fspath(options.output), options.heard_by
    repo, license = options.repo, options.license
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UsageError(f"--repo {repo}: give the owner and the name, such as {REPO}")
    if not re.fullmatch(r"[a-z0-9.+-]*", license):
        raise UsageError(f"--license {license}: give a name of the hub, such as cc-by-4.0 or other")
    given = open_each([os.fspath(dataset) for dataset in datasets])
    if not given:
        raise UsageError("nothing to make a card of: give the path or URL of a dataset")
    if repo == REPO:
        repo = _common_repo(given) or repo
    placed = _place_datasets(given, repo)
    if output:
        _check_output(output, given, replaces=lambda: options.yes or listener.asked(output))
    text = _add_mark("".join(_card_parts(placed, repo, license, options.samples, options.seed)))
    if output:
        store, name = split_url(output)
        write_bytes(store, name, text.encode())
        store.publish([name])
    return Card(text=text, output=output, uploads=tuple(_uploads(placed, repo, output)))


# --- where it goes
@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedDataset:
    """A dataset with its name and its folder in the repository of the card."""

    given: ReportDataset
    name: str
    folder: str

    @property
    def path(self) -> str:
        """Return the start of the paths of its files in the repository."""
        return f"{self.folder}/" if self.folder else ""


def _hub_place(url: str) -> tuple[str, str]:
    """Return the repository and the folder of a place on the hub; empty texts for other places."""
    if place_scheme(url) != "hf":
        return "", ""
    root, folder = root_and_name(url)
    return root.removeprefix("hf://datasets/").partition("@")[0], folder


def _common_repo(given: Sequence[ReportDataset]) -> str:
    """Return the one repository that all datasets are in, or "" if there is none."""
    found = {_hub_place(one.store.url)[0] for one in given}
    return found.pop() if len(found) == 1 else ""


def _place_datasets(given: Sequence[ReportDataset], repo: str) -> list[PlacedDataset]:
    names = [_config_name(one) for one in given]
    for name in names:
        if names.count(name) > 1:
            both = " and ".join(one.shown for one in given if _config_name(one) == name)
            raise UsageError(f"{both} have the same name, {name}: rename one of them")
    folders = [*names] if len(given) > 1 else [""]
    for number, (there, folder) in enumerate(_hub_place(one.store.url) for one in given):
        if there == repo:
            folders[number] = folder
    three = zip(given, names, folders, strict=True)
    return [PlacedDataset(given=one, name=name, folder=folder) for one, name, folder in three]


def _config_name(given: ReportDataset) -> str:
    """Return the last part of a dataset's URL, in characters that the hub accepts."""
    last = given.store.url.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.-]", "-", last, flags=re.ASCII) or "default"


def _check_output(
    output: str, given: Sequence[ReportDataset], *, replaces: Callable[[], bool]
) -> None:
    if not output.lower().endswith(".md"):
        raise UsageError(f"-o {output}: give the card a name that ends in .md, as {CARD}")
    check_folder(output, given, "card", besides=(CARD,))
    store, name = split_url(output)
    try:
        there = store.read(name, nbytes=MOST_NBYTES)
    except NotFoundError:
        return
    if there and not _is_ours(there.decode("utf-8", "replace")) and not replaces():
        raise UsageError(
            f"{output} exists already, and is not a card or was changed since: give another -o, or "
            "--yes to replace it"
        )


def _add_mark(text: str) -> str:
    return text + MARK.format(_digest(text))


def _is_ours(text: str) -> bool:
    found = _MARKED.fullmatch(text)
    return found is not None and _digest(found[1]) == found[2]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _uploads(placed: Sequence[PlacedDataset], repo: str, output: str) -> Iterator[str]:
    def upload(place: str, there: str) -> str:
        words = ["hf", "upload", repo, _on_disk(place), there, "--repo-type", "dataset"]
        return shlex.join(words)

    for one in placed:
        if _hub_place(one.given.store.url)[0] != repo:
            yield upload(one.given.shown, one.folder or ".")
    if not output:
        return
    is_in_one = len(placed) == 1 and not placed[0].folder and _is_card_of(output, placed[0].given)
    if not is_in_one and _hub_place(output) != (repo, CARD):
        yield upload(output, CARD)


def _on_disk(place: str) -> str:
    """Return the path for `hf upload`.

    For a remote dataset it stands for a copy that the user has to make.
    """
    return place if local_path(place) is not None else f"COPY-OF-{place.rpartition('/')[2]}"


def _is_card_of(output: str, given: ReportDataset) -> bool:
    if not output:
        return False
    store, name = split_url(output)
    return (store.url, name) == (given.store.url, CARD)


# --- what it says
def _card_parts(
    placed: Sequence[PlacedDataset], repo: str, license: str, samples: int, seed: int
) -> Iterator[str]:
    yield from ("---\n", *_yaml_header(placed, repo, license), "---\n\n")
    yield f"# {repo.partition('/')[2]}\n\n"
    yield "Shards of captioned images, and what models made of them, for training diffusion\n"
    yield "models: WebDataset tars, made with wdsprep.\n\n"
    rows = [(span(one.name), *_table_row(one.given)) for one in placed]
    yield from table(("dataset", "what", "samples", "shards", "size"), rows)
    for one in placed:
        yield from _dataset_section(one)
    yield from _load_section(placed, repo)
    yield from FORMAT
    if samples:
        yield "\n## Samples\n"
    for one in placed if samples else ():
        yield from _sample_lines(one, samples, seed)
    yield "\n"


def _yaml_header(placed: Sequence[PlacedDataset], repo: str, license: str) -> Iterator[str]:
    """Yield the YAML at the start of the card.

    JSON is YAML, so texts are quoted as in JSON.
    """
    yield f"license: {json.dumps(license)}\n" if license else f"# {LICENCE}\n"
    yield f"pretty_name: {json.dumps(repo.partition('/')[2])}\n"
    yield "task_categories:\n- text-to-image\n"
    most = max(one.given.manifest.samples for one in placed)
    yield f"size_categories:\n- {size_category(most)}\n"
    yield "tags:\n- webdataset\n- wdsprep\n"
    yield "configs:\n"
    for number, one in enumerate(placed):
        yield f"- config_name: {json.dumps(one.name)}\n"
        yield "  default: true\n" if not number else ""
        yield "  data_files:\n  - split: train\n    path:\n"
        for bucket in one.given.buckets:
            yield f"    - {json.dumps(f'{one.path}{_escape_glob(bucket)}/**/*.tar')}\n"
    images = [one for one in placed if one.given.manifest.dataset == "images"]
    if images:
        yield "dataset_info:\n"
    for one in images:
        yield f"- config_name: {json.dumps(one.name)}\n{IMAGE_FEATURES}"


IMAGE_FEATURES = "".join(
    [
        "  features:\n",
        *(f"  - name: {name}\n    dtype: image\n" for name in ("jpg", "png", "webp")),
        "  - name: txt\n    dtype: string\n",
        "  - name: json\n    struct:\n",
        *(f"    - name: {name}\n      dtype: {kind}\n" for name, kind in IMAGE_FACTS.items()),
        *(f"  - name: {name}\n    dtype: string\n" for name in ("__key__", "__url__")),
    ]
)
"""The features of image samples. A reader that guesses features from the first samples expects only
the image format, and the fields of json, that it meets there."""


def _escape_glob(folder: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", folder)


def size_category(samples: int) -> str:
    """Return the hub's name for a number of samples, such as 10K<n<100K."""
    edges = (*(f"{n}{unit}" for unit in "KMB" for n in (1, 10, 100)), "1T")
    least = 1000
    if samples < least:
        return "n<1K"
    for low, high in pairwise(edges):
        least *= 10
        if samples < least:
            return f"{low}<n<{high}"
    return "n>1T"


def span(text: object, *, in_table: bool = False) -> str:
    """Return a text as Markdown code on one line.

    The fence has more backticks than any row of backticks in the text, so nothing ends the code.
    """
    line = one_line(" ".join(str(text).split())) or " "
    longest = max(map(len, re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    line = line.replace("|", r"\|") if in_table else line
    return f"{fence} {line} {fence}" if longest else f"{fence}{line}{fence}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    for row in (heads, ["---"] * len(heads), *rows):
        yield f"| {' | '.join(row)} |\n"


def _table_row(given: ReportDataset) -> tuple[str, ...]:
    facts = given.overview
    what = given.label if given.manifest.dataset == "latents" else "images"
    what += "" if facts["complete"] else ", not complete"
    return what, f"{facts['samples']:,}", f"{facts['shards']:,}", human_bytes(facts["nbytes"])


def _dataset_section(one: PlacedDataset) -> Iterator[str]:
    given = one.given
    yield f"\n## {span(one.name)}\n\n"
    if given.manifest.dataset == "images":
        yield from _image_facts(given)
    else:
        yield from _latent_facts(given)


def _image_facts(given: ReportDataset) -> Iterator[str]:
    facts = given.overview
    yield "Images with captions. A bucket has those whose shorter side is at least its number of\n"
    yield "pixels, and below the next one's.\n\n"
    rows = [
        (bucket, f"{row['samples']:,}", f"{row['shards']:,}", human_bytes(row["nbytes"]))
        for bucket, row in facts["buckets"].items()
    ]
    yield from table(("bucket", "samples", "shards", "size"), rows)
    yield "\n"
    for resolution, phase in facts["phases"].items():
        yield f"- for training at {resolution}: {plural(phase['samples'], 'sample')}\n"
    for what, name in (("side", "pixels of the shorter side"), ("caption", "characters")):
        ranges = facts["quantiles"].get(what, {}).items()
        parts = [
            f"{float(share):.0%} at most {most:,}"
            for share, (_, most) in ranges
            if float(share) in SHARES
        ]
        yield f"- {name}: {', '.join(parts)}\n" if parts else ""


SETTINGS = {
    "resolution": "resolution in pixels",
    "latents": "kept of the VAE's distribution",
    "scale": "latents are (z - shift) * scale, with scale",
    "shift": "and shift",
    "text": "kept of captions",
    "dtype": "computed in",
    "seed": "seed of the noise",
    "max_crop": "most that is cut off an image",
    "upscale": "most that an image is scaled up",
    "decode": "decoding of large JPEGs",
    "caption_field": "captions from the field",
    "weights": "digest of the weights",
}
DIGITS = 16


def _latent_facts(given: ReportDataset) -> Iterator[str]:
    manifest = given.manifest
    model = str(manifest.extra.get("model", "unknown"))
    if model.startswith(("/", ".", "~")):  # the path on a machine is private
        model = model.rstrip("/").rpartition("/")[2]
    rows = [("model", span(model, in_table=True))]
    for name, told in SETTINGS.items():
        value = manifest.settings.get(name, "")
        if value != "" and not (name == "resolution" and given.manifest.is_of_text):
            value = str(value)[:DIGITS] if name == "weights" else value
            rows.append((told, span(value, in_table=True)))
    yield from table(("setting", "value"), rows)
    yield "\n"
    members = [(span(each.name), span(each)) for each in fields_of(manifest.settings["layout"])]
    yield from table(("array", "type and shape"), members)
    if shapes := given.overview["shapes"]:
        yield "\nImages have these shapes, and their latents are in proportion:\n\n"
        shapes = [(name, f"{count:,}") for name, count in shapes.items()]
        yield from table(("shape", "samples"), shapes)


def _load_section(placed: Sequence[PlacedDataset], repo: str) -> Iterator[str]:
    names = [one.name for one in placed]
    yield f"""
## Load

With `datasets`; the second argument is one of {", ".join(map(span, names))}:

```python
import datasets
dataset = datasets.load_dataset("{repo}", "{names[0]}", split="train", streaming=True)
print(next(iter(dataset)))
```
"""
    trained = [one for one in placed if one.given.manifest.dataset == "latents"]
    if trained:
        folder = repo.partition("/")[2]
        place = f"{folder}/{trained[0].folder}".rstrip("/")
        first = trained[0].given.manifest
        batch = batch_that_fits(first.settings, first.counts, first.samples)
        yield f"""
With `wdsprep`, in an order that a seed decides, on any number of GPUs; first
`hf download {repo} --repo-type dataset --local-dir {folder}`:

```python
import wdsprep
for batch in wdsprep.load("{place}", global_batch={batch}):
    print({{name: getattr(value, "shape", value) for name, value in batch.items()}})
```
"""


FORMAT = """
## Format

- A shard is a plain tar; the files of a sample follow one another and begin with its key.
- An image sample is `KEY.jpg`, `.png` or `.webp`, then `KEY.json` (facts), `KEY.txt` (caption).
- A latent sample is a `.npy` for each array above, then `KEY.json` and `KEY.txt`.
- Arrays of `bfloat16` are stored as unsigned 16-bit numbers: the upper half of a float32.
- Latents and images of one key belong together; shards of both have the same names.
- `NAME.tar.idx` has where each sample begins: little-endian 64-bit offsets, and the end.
- `wdsprep.json` is the manifest: settings, and the digest, bytes and samples of each shard.
- `receipts/` say what came of each unit of work; the manifest can be made from them.
- `rejects/` are lines of JSON: what is in no shard, each with a code and the reason.
- `empty.*.npy` are the embeddings of no caption, for classifier-free guidance.
""".splitlines(keepends=True)


def _sample_lines(one: PlacedDataset, samples: int, seed: int) -> Iterator[str]:
    given = one.given
    places = pick(given.manifest.shards, samples, f"card {seed}")
    store = given.store
    found = read_each(lambda place: read_sample(store, place), places, store.readers)
    yield f"\nOf {span(one.name)}:\n\n"
    for sample in found:
        yield f"- {_sample_line(sample)}\n"


def _sample_line(sample: ReadSample) -> str:
    if sample.problem:
        return f"sample {sample.place.number:,} of {span(sample.place.shard.name)} cannot be read"
    caption = sample.caption
    caption = caption if len(caption) <= LONGEST else f"{caption[:LONGEST]}…"
    sides = [sample.facts.get(name) for name in ("width", "height")]
    size = f", {sides[0]} x {sides[1]}" if all(type(side) is int for side in sides) else ""
    return f"{span(sample.key)}{size}: {span(caption) if caption.strip() else 'no caption'}"
