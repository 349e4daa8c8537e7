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
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wdsprep.dataset.file_names import CARD
from wdsprep.dataset.samples import STORED_FORMATS, roles_of
from wdsprep.dataset.shapes import batch_that_fits
from wdsprep.errors import UsageError
from wdsprep.options import Place, takes_datasets
from wdsprep.reporting.datasets import ReportDataset, check_output, open_each, pick, read_samples
from wdsprep.reporting.options import REPO, CardOptions
from wdsprep.reporting.overview import overview_lines
from wdsprep.store import split_url
from wdsprep.store.base import local_path, write_bytes
from wdsprep.store.schemes import place_scheme, root_and_name
from wdsprep.text import one_line

LONGEST = 300
LICENCE = "license: put here under which licence it is, such as cc-by-4.0"
MARK = "<!-- written by wdsprep card, {} -->\n"
_MARKED = re.compile(r"(.*)<!-- written by wdsprep card, ([0-9a-f]+) -->\n", re.DOTALL)
IMAGE_FACTS = {
    "bucket": "int64",
    "height": "int64",
    "original_height": "int64",
    "original_width": "int64",
    "source": "string",
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
    output, repo, license = os.fspath(options.output), options.repo, options.license
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UsageError(f"--repo {repo}: give the owner and the name, such as {REPO}")
    opened = open_each([os.fspath(dataset) for dataset in datasets])
    if not opened:
        raise UsageError("nothing to make a card of: give the path or URL of a dataset")
    if repo == REPO:
        repos = {_hub_place(dataset.store.url)[0] for dataset in opened}
        repo = (repos.pop() if len(repos) == 1 else "") or repo
    placed = _place_datasets(opened, repo)
    if output:
        check_output(options, opened, "card", is_ours=_is_ours, endings=(".md",), besides=(CARD,))
    text = "".join(_card_parts(placed, repo, license, options.samples, options.seed))
    text += MARK.format(_digest(text))
    if output:
        store, name = split_url(output)
        write_bytes(store, name, text.encode())
    return Card(text=text, output=output, uploads=tuple(_uploads(placed, repo, output)))


# --- where it goes
def _hub_place(url: str) -> tuple[str, str]:
    """Return the repository and the folder of a place on the hub; empty texts for other places."""
    if place_scheme(url) != "hf":
        return "", ""
    root, folder = root_and_name(url)
    return root.removeprefix("hf://datasets/").partition("@")[0], folder


def _place_datasets(datasets: Sequence[ReportDataset], repo: str) -> list[ReportDataset]:
    placed: list[ReportDataset] = []
    for dataset in datasets:
        last = dataset.store.url.rstrip("/").rpartition("/")[2]
        name = re.sub(r"[^\w.-]", "-", last, flags=re.ASCII) or "default"  # as the hub accepts it
        for other in placed:
            if other.name == name:
                both = f"{other.shown} and {dataset.shown}"
                raise UsageError(f"{both} have the same name, {name}: rename one of them")
        repo_there, folder = _hub_place(dataset.store.url)
        if repo_there != repo:
            folder = name if len(datasets) > 1 else ""
        placed.append(replace(dataset, name=name, folder=folder))
    return placed


def _is_ours(data: bytes) -> bool:
    """Return whether a file is a card that nobody has changed."""
    card = _MARKED.fullmatch(data.decode("utf-8", "replace"))
    return card is not None and _digest(card[1]) == card[2]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _uploads(placed: Sequence[ReportDataset], repo: str, output: str) -> Iterator[str]:
    """Yield the commands that upload what is not in the repository.

    Of a remote dataset a copy is uploaded, which the user has to make.
    """

    def upload(place: str, path: str) -> str:
        source = place if local_path(place) is not None else f"COPY-OF-{place.rpartition('/')[2]}"
        return shlex.join(["hf", "upload", repo, source, path, "--repo-type", "dataset"])

    for dataset in placed:
        if _hub_place(dataset.store.url)[0] != repo:
            yield upload(dataset.shown, dataset.folder or ".")
    if not output:
        return
    store, name = split_url(output)
    first = placed[0]
    is_of_first = (store.url, name) == (first.store.url, CARD)
    goes_along = len(placed) == 1 and not first.folder and is_of_first
    if not goes_along and _hub_place(output) != (repo, CARD):
        yield upload(output, CARD)


# --- what it says
def _card_parts(
    placed: Sequence[ReportDataset], repo: str, license: str, samples: int, seed: int
) -> Iterator[str]:
    from huggingface_hub import DatasetCardData  # takes a moment

    yield "---\n" if license else f"---\n# {LICENCE}\n"
    yield DatasetCardData(**_header(placed, repo, license)).to_yaml()
    yield f"\n---\n\n# {repo.partition('/')[2]}\n\n"
    yield "Shards of captioned images, and what models made of them, for training diffusion\n"
    yield "models: WebDataset tars, made with wdsprep.\n"
    for dataset in placed:
        yield f"\n## {span(dataset.name)}\n\n"
        facts = {**dataset.overview, "extra": dict(dataset.manifest.extra)}
        model = str(facts["extra"].get("model", ""))
        if model.startswith(("/", ".", "~")):  # the path on a machine is private
            facts["extra"]["model"] = model.rstrip("/").rpartition("/")[2]
        for line in overview_lines(dataset.name, facts):
            yield f"    {one_line(line)}".rstrip() + "\n"
    yield from _load_section(placed, repo)
    yield from FORMAT
    if samples:
        yield "\n## Samples\n"
    for dataset in placed if samples else ():
        yield from _sample_lines(dataset, samples, seed)
    yield "\n"


def _header(placed: Sequence[ReportDataset], repo: str, license: str) -> dict[str, Any]:
    """Return what the YAML at the start of the card states for the hub and its viewer."""
    configs: list[dict[str, Any]] = []
    for dataset in placed:
        path = f"{dataset.folder}/" if dataset.folder else ""
        kind = "parquet" if dataset.manifest.is_scored else "tar"
        # what else is a pattern
        folders = [re.sub(r"([*?\[])", r"[\1]", bucket) for bucket in dataset.buckets]
        tars = [f"{path}{folder}/**/*.{kind}" for folder in folders]
        files = [{"split": "train", "path": tars}]
        configs.append({"config_name": dataset.name, "data_files": files})
    configs[0]["default"] = True
    features = [
        {"config_name": dataset.name, "features": _features(roles_of(dataset.manifest.settings))}
        for dataset in placed
        if dataset.is_of_images
    ]
    return {
        **({"license": license} if license else {}),
        "pretty_name": repo.partition("/")[2],
        "task_categories": ["text-to-image"],
        "size_categories": [size_category(max(dataset.manifest.samples for dataset in placed))],
        "tags": ["webdataset", "wdsprep"],
        "configs": configs,
        **({"dataset_info": features} if features else {}),
    }


def _features(roles: Sequence[str]) -> list[dict[str, Any]]:
    """Return the features of image samples: of the first image in each role, too.

    A reader that guesses features from the first samples expects only the image format, and the
    fields of json, that it meets there.
    """
    prefixes = ("", *(f"{role}." for role in roles))
    images = [f"{prefix}{kind}" for prefix in prefixes for kind in STORED_FORMATS]
    facts = [{"name": name, "dtype": kind} for name, kind in IMAGE_FACTS.items()]
    return [
        *({"name": name, "dtype": "image"} for name in images),
        {"name": "json", "struct": facts},
        *({"name": name, "dtype": "string"} for name in ("txt", "__key__", "__url__")),
    ]


def size_category(samples: int) -> str:
    """Return the hub's name for a number of samples, such as 10K<n<100K."""
    edges = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
    at = sum(samples >= 10 ** (3 + place) for place in range(len(edges)))
    if not at:
        return "n<1K"
    return f"{edges[at - 1]}<n<{edges[at]}" if at < len(edges) else "n>1T"


def span(text: object) -> str:
    """Return a text as Markdown code on one line.

    The fence has more backticks than any row of backticks in the text, so nothing ends the code.
    """
    line = one_line(" ".join(str(text).split())) or " "
    longest = max(map(len, re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {line} {fence}" if longest else f"{fence}{line}{fence}"


def _load_section(placed: Sequence[ReportDataset], repo: str) -> Iterator[str]:
    names = [dataset.name for dataset in placed]
    yield f"""
## Load

With `datasets`; the second argument is one of {", ".join(map(span, names))}:

```python
import datasets
dataset = datasets.load_dataset("{repo}", "{names[0]}", split="train", streaming=True)
print(next(iter(dataset)))
```
"""
    trained = [dataset for dataset in placed if dataset.manifest.kind in ("latents", "text")]
    if trained:
        folder = repo.partition("/")[2]
        place = f"{folder}/{trained[0].folder}".rstrip("/")
        first = trained[0].manifest
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

- A bucket has images whose shorter side is at least its number of pixels, and below the next one's.
- A shard is a plain tar; the files of a sample follow one another and begin with its key.
- An image sample is `KEY.jpg`, `.png` or `.webp`, then `KEY.json` (facts), `KEY.txt` (caption).
- A latent sample is a `.npy` for each array named above, then `KEY.json` and `KEY.txt`.
- `NAME.parquet` beside a tar has a row for each sample; scores are in such tables alone.
- Arrays of `bfloat16` are stored as unsigned 16-bit numbers: the upper half of a float32.
- Latents and images of one key belong together; shards of both have the same names.
- `NAME.tar.idx` has where each sample begins: little-endian 64-bit offsets, and the end.
- `wdsprep.json` is the manifest: settings, and the digest, bytes and samples of each shard.
- `receipts/` say what came of each unit of work; the manifest can be made from them.
- `rejects/` are lines of JSON: what is in no shard, each with a code and the reason.
- `empty.*.npy` are the embeddings of no caption, for classifier-free guidance.
""".splitlines(keepends=True)


def _sample_lines(dataset: ReportDataset, samples: int, seed: int) -> Iterator[str]:
    places = pick(dataset.manifest.shards, samples, f"card {seed}")
    yield f"\nOf {span(dataset.name)}:\n\n"
    for sample in read_samples(dataset, places):
        if sample.problem:
            place = f"sample {sample.place.number:,} of {span(sample.place.shard.name)}"
            yield f"- {place} cannot be read\n"
            continue
        caption = sample.caption
        caption = caption if len(caption) <= LONGEST else f"{caption[:LONGEST]}…"
        sides = [sample.facts.get(name) for name in ("width", "height")]
        size = f", {sides[0]} x {sides[1]}" if all(type(side) is int for side in sides) else ""
        said = span(caption) if caption.strip() else "no caption"
        yield f"- {span(sample.key)}{size}: {said}\n"
