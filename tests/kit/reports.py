"""Datasets to report on, and what a page holds, read as a browser's parser would."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from tests.kit.latent_sets import field as array_field
from tests.kit.latent_sets import members, publish, write_unit
from tests.kit.packs import jpeg, manifest_of, pack, write_files
from wdsprep.dataset.file_names import receipt_name
from wdsprep.dataset.npy_arrays import layout
from wdsprep.dataset.tar.read import file_tape, read_samples
from wdsprep.reporting.report import WrittenReport, report
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes

SCRIPT = '<script>document.title="stolen"</script> & "quoted" </title><!-- <b>bold</b> \u202e'
SIZES = ((64, 80), (100, 90), (200, 136))  # two of bucket 64, one of 128
VOID = {"meta", "link", "img", "input"}


def source_of_pictures(root: Path, *, count: int = 14, more: Sequence[str] = ()) -> Path:
    """Pictures with captions, some of which look like HTML; one is cut short, one is none."""
    captions = (SCRIPT, *more)
    files: dict[str, bytes | str] = {"zzz.jpg": "no image\n"}
    for number in range(count):
        stem = f"photo-{number:04d}"
        data = jpeg(number, SIZES[number % 3])
        files[f"{stem}.jpg"] = data[:-2000] if number == 4 else data
        text = captions[number] if number < len(captions) else f"the photo number {number}"
        files[f"{stem}.txt"] = text
    return write_files(root, files)


def pack_pictures(source: Path, images: Path) -> Path:
    """In slices of 4, in the buckets 64 and 128; a picture that is cut short is not noticed."""
    options = ("--buckets", "64,128", "--samples-per-shard", "4", "--check", "header")
    return pack(source, images, *options)


@dataclass(frozen=True, kw_only=True)
class Made:
    """Images, latents of all of them and of the larger ones, and the reports on them."""

    root: Path

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def latents(self) -> Path:
        return self.root / "latents"

    def report(self, *datasets: Path | str, name: str = "report", **options: object) -> "Page":
        output = self.root / f"{name}.html"
        urls = [str(dataset) for dataset in datasets] or [str(self.images), str(self.latents)]
        written = report(*urls, output=str(output), **options)  # type: ignore[arg-type]
        assert written == WrittenReport(
            output=str(output), nbytes=output.stat().st_size, samples=written.samples
        )
        return Page(output)


def fake_latents(images: Path, latents: Path) -> Path:
    """Latents of all the images in `images`, normal noise, made without a model."""
    store = open_store(str(latents))
    wanted = [array_field("latent", (4, 8, 8))]
    options = {"latents": "sample", "layout": layout(wanted), "resolution": 64, "text": "none"}
    settings = {**options, "scale": 1.0, "shift": 0.0, "weights": ""}
    receipts = []
    for shard in manifest_of(images).shards:
        with file_tape(images / shard.name) as tape:
            keys = [sample.key for sample in read_samples(tape, shard.name)]
        samples = ((n, key, members(key, wanted)) for n, key in enumerate(keys))
        unit = shard.name.removesuffix(".tar")
        receipts.append(write_unit(store, unit, settings, samples, input=shard.digest))
        write_bytes(store, receipt_name(unit), receipts[-1].to_bytes())
    publish(store, settings, receipts, wanted, complete=False)
    return latents


def make(root: Path, *, more: Sequence[str] = ()) -> Made:
    made = Made(root=root)
    pack_pictures(source_of_pictures(root / "photos", more=more), made.images)
    from tests.kit.encodes import encode_here  # loads torch

    encode_here(made.images, made.latents)
    return made


# --- the page


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: "list[Element | str]" = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def every(self, tag: str = "", /, **wanted: str) -> "list[Element]":
        """Those below with this tag and these attributes, in the order of the page."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                same = all(child.attributes.get(n.rstrip("_")) == v for n, v in wanted.items())
                found += [child] if tag in ("", child.tag) and same else []
                found += child.every(tag, **wanted)
        return found

    def one(self, tag: str = "", /, **wanted: str) -> "Element":
        (found,) = self.every(tag, **wanted)
        return found


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attributes: "list[tuple[str, str | None]]") -> None:
        made = Element(tag, {name: value or "" for name, value in attributes})
        self.open[-1].children.append(made)
        if tag not in VOID:
            self.open.append(made)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parsed(html: str) -> Element:
    parser = _Parser()
    parser.feed(html)
    parser.close()
    assert len(parser.open) == 1, f"{parser.open[-1].tag} is not closed"
    return parser.open[0]


class Page:
    """A report as it lies on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.html = path.read_text("utf-8")
        self.root = parsed(self.html)

    @property
    def url(self) -> str:
        return self.path.as_uri()

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", self.root.one("body").text)

    def rows(self, caption: str) -> list[list[str]]:
        """The cells of a table, row by row, without its head."""
        tables = [t for t in self.root.every("table") if t.one("caption").text == caption]
        assert len(tables) == 1, f"{len(tables)} tables {caption!r}"
        rows = tables[0].one("tbody").every("tr")
        return [[c.text for c in row.children if isinstance(c, Element)] for row in rows]

    def section(self, name: str) -> "Element | None":
        found = self.root.every("section", id=name)
        return found[0] if found else None

    @property
    def cards(self) -> dict[str, Element]:
        return {card.one("h4").text: card for card in self.root.every("li", class_="card")}
