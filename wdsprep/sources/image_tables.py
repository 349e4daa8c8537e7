"""Tables with the images' bytes in a column: Parquet, Arrow and MDS.

Parquet is as Ray and Hugging Face write it, Arrow is what `datasets` saves, and MDS is that of
MosaicML streaming.

An item is a run of row groups of a Parquet file, or one of the other files as a whole.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pyarrow as pa

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import RoleImage, Sample
from wdsprep.errors import SourceError, UsageError
from wdsprep.images.formats import png_of_pixels
from wdsprep.sources.base import (
    Columns,
    Item,
    Tables,
    Told,
    check_names,
    ignore_left_out,
    name_images,
    naming_role,
)
from wdsprep.sources.captions import captions_of, first_of, plain_facts
from wdsprep.sources.patterns import table_files
from wdsprep.sources.tables import TableRow
from wdsprep.sources.tables.arrow import arrow_batches, arrow_files, arrow_schema
from wdsprep.sources.tables.mds import IMAGES as MDS_IMAGES
from wdsprep.sources.tables.mds import (
    SCALARS,
    TEXTS,
    MdsShard,
    fields_in,
    read_index,
    read_samples,
    shards_there,
    value_of,
)
from wdsprep.sources.tables.parquet import is_bytes, open_parquet, rows_in
from wdsprep.store import shared_store
from wdsprep.store.base import Entry
from wdsprep.text import list_columns, shown

BATCH_ROWS = 32
COUNTED_ROWS = 1 << 20
IMAGE_NAMES = ("image", "jpg", "jpeg", "png", "webp", "bytes", "image_bytes", "data", "content")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSource(Tables):
    """The Parquet files with images below `url` that match `pattern`; all if it is empty."""

    pattern: str
    rows_per_item: int
    form: str = "Parquet"

    def files(self, left_out: Told = ignore_left_out) -> Iterator[Entry]:
        return table_files(self.url, self.pattern, frozenset({"parquet"}), left_out)

    def items(self, left_out: Told = ignore_left_out) -> Iterator[Item]:
        for entry in self.files(left_out):
            with open_parquet(shared_store(self.url), entry.name) as file:
                image_of_schema(self, file.schema, entry.name)
                for first, last, rows in file.runs(self.rows_per_item):
                    yield Item(
                        name=f"{entry.name}[{first}:{last}]",
                        parts=((entry.name, entry.nbytes, entry.stamp),),
                        extra=f"{first}:{last}",
                        samples=rows,
                    )

    def first_columns(self) -> tuple[str, Sequence[str]]:
        first = next(self.files())
        with open_parquet(shared_store(self.url), first.name) as file:
            return image_of_schema(self, file.schema, first.name), file.schema.names

    def makers(self, item: Item) -> Iterator[tuple[str, Callable[[], Sample]]]:
        name = item.parts[0][0]
        first, last = map(int, item.extra.split(":"))
        with open_parquet(shared_store(self.url), name) as file:
            batches = file.batches(BATCH_ROWS, groups=range(first, last))
            image = image_of_schema(self, file.schema, name)
            yield from _makers(self, name, batches, image, first=sum(file.groups[:first]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrowSource(Tables):
    """The Arrow files that `datasets` has saved below `url`: all splits, by name."""

    form: str = "Arrow"

    def items(self, left_out: Told = ignore_left_out) -> Iterator[Item]:
        for entry in arrow_files(self.url, left_out):
            image_of_schema(self, arrow_schema(self.url, entry.name), entry.name)
            parts = ((entry.name, entry.nbytes, entry.stamp),)
            yield Item(name=entry.name, parts=parts, samples=0)

    def first_columns(self) -> tuple[str, Sequence[str]]:
        first = next(arrow_files(self.url)).name
        schema = arrow_schema(self.url, first)
        return image_of_schema(self, schema, first), schema.names

    def count(self, item: Item, /) -> int:
        return sum(batch.num_rows for batch in arrow_batches(self.url, item.name, COUNTED_ROWS))

    def makers(self, item: Item) -> Iterator[tuple[str, Callable[[], Sample]]]:
        image = image_of_schema(self, arrow_schema(self.url, item.name), item.name)
        return _makers(self, item.name, arrow_batches(self.url, item.name, BATCH_ROWS), image)


def _makers(
    tables: Tables, name: str, batches: Iterable[pa.RecordBatch], image: str, *, first: int = 0
) -> Iterator[tuple[str, Callable[[], Sample]]]:
    """Yield the name of each row in batches of a file, and a function that makes its sample."""
    rows = (row for batch in batches for row in rows_in(batch))
    for number, row in enumerate(rows, first):
        source = f"{shown(name)}#{number}"
        yield source, partial(sample_of, row, image, tables.columns, source)


@dataclass(frozen=True, kw_only=True, slots=True)
class MdsSource(Tables):
    """The MDS shards of images that indexes below `url` name."""

    form: str = "MDS"

    def items(self, left_out: Told = ignore_left_out) -> Iterator[Item]:  # noqa: ARG002  an index names all
        for shard, entry in shards_there(self.url):
            self._image(shard)
            yield Item(
                name=shard.raw.name,
                parts=((entry.name, entry.nbytes, entry.stamp),),
                extra=shard.index,
                samples=shard.samples,
            )

    def first_columns(self) -> tuple[str, Sequence[str]]:
        first, _ = next(shards_there(self.url))
        return self._image(first), [*first.encodings]

    def _image(self, shard: MdsShard) -> str:
        there = shard.encodings
        held = {name for name, encoding in there.items() if encoding in MDS_IMAGES}
        likely = [n for n in there if n in held and (there[n] != "bytes" or n in IMAGE_NAMES)]
        hint = "import latents with wdsprep import"
        return _find_image(self, shard.index, there, likely=likely, held=held, hint=hint)

    def makers(self, item: Item) -> Iterator[tuple[str, Callable[[], Sample]]]:
        shard = read_index(self.url, item.extra)[item.name]
        image = self._image(shard)
        for number, data in enumerate(read_samples(self.url, shard, item.parts[0][0])):
            source = f"{shown(item.name)}#{number}"
            yield source, partial(self._sample, shard, data, image, source)

    def _sample(self, shard: MdsShard, sample: bytes, image: str, source: str) -> Sample:
        """Make a Sample from the bytes of a sample of an MDS shard.

        `image` is the column of images, and `source` the sample's name. Texts, numbers and JSON
        of other columns become facts; values of other types are dropped. An empty value stands for
        no image in a role, as MDS has no nulls.
        """
        said, fields = shard.encodings, fields_in(shard, sample)
        facts = {*TEXTS, *SCALARS, "json"}
        row = {n: value_of(said[n], data, n) for n, data in fields.items() if said[n] in facts}
        for name in (image, *self.columns.in_roles(said)):
            data = fields[name]
            row[name] = png_of_pixels(data) if said[name] == "pil" and data else data
            if not data and name != image:
                row[name] = None
        return sample_of(row, image, self.columns, source)


ImageTables = TableSource | ArrowSource | MdsSource


def sample_of(row: TableRow, image: str, columns: Columns, source: str) -> Sample:
    """Make a Sample named `source` from a row, whose column `image` holds the image.

    The images are taken out of the row. Raise RejectedError if the row has no bytes of an image, or
    is such an error itself.
    """
    if isinstance(row, RejectedError):
        raise row
    data = _bytes_of(image, row.pop(image))
    if data is None:
        raise RejectedError(Code.NO_IMAGE, f"column {image} is null")
    images: list[RoleImage] = []
    for role in columns.roles:
        with naming_role(role.name):
            in_role = [_bytes_of(role.where, value) for value in role.values(row)]
        for name in role.columns(row):
            del row[name]
        images += (RoleImage(*named) for named in name_images(role, in_role))
    check_names(image.name for image in images)
    facts = plain_facts(row)
    return Sample(
        source=source,
        image=data,
        captions=captions_of(facts, columns.caption),
        facts=facts,
        images=tuple(images),
    )


def _bytes_of(column: str, value: Any) -> bytes | None:
    """Return the bytes in a value of a column of images, or None if the value is null.

    Raise RejectedError for a path without bytes.
    """
    if not isinstance(value, Mapping):
        return cast("bytes | None", value)
    if value.get("bytes") is None and (path := value.get("path")):
        where = f"column {column} has the path {shown(str(path))} and no bytes"
        raise RejectedError(Code.NO_IMAGE, where)
    return cast("bytes | None", value.get("bytes"))


def image_of_schema(tables: Tables, schema: pa.Schema, name: str) -> str:
    """Return the name of the column of images: the one the user named, or one found in `schema`.

    Errors call the file `name`.
    """
    in_roles = tables.columns.in_roles(schema.names)
    kinds = {field.name: field.type for field in schema}
    for role in in_roles:
        if isinstance(kinds[role], pa.ListType | pa.LargeListType):
            kinds[role] = kinds[role].value_type
    held = [name for name, kind in kinds.items() if holds_bytes(kind)]
    encodings = {field.name: str(field.type) for field in schema}
    hint = "--url-col where a column holds the images' URLs"
    return _find_image(tables, name, encodings, likely=held, held={*held}, hint=hint)


def _find_image(
    tables: Tables,
    name: str,
    encodings: Mapping[str, str],
    *,
    likely: Sequence[str],
    held: Collection[str],
    hint: str,
) -> str:
    """Return the column of images: the one that the user named, or else the first that is likely.

    `held` are the columns with bytes of images. Raise an error that lists the columns if there is
    none, if one that the user named is missing or no such column, or if several are as likely.
    """
    columns = tables.columns
    columns.check([*encodings], name)
    in_roles = columns.in_roles(encodings)
    likely = [name for name in likely if name not in in_roles]
    image = columns.image or likely_image(likely)
    wrong = next((name for name in (image, *in_roles) if name and name not in held), "")
    is_clear = columns.image or image in IMAGE_NAMES or len(likely) == 1
    if image and not wrong and is_clear:
        return image
    listed = list_columns([f"{name} ({encoding})" for name, encoding in encodings.items()])
    what, there = f"{tables.url}/{name}", f"it has {listed}"
    if image and not wrong:
        raise UsageError(
            f"{what} has images in {list_columns(likely)}: give the one to train on by "
            "--image-col, and further ones by --role NAME=COLUMN"
        )
    if wrong:
        raise UsageError(f"{what}: column {wrong!r} holds no image bytes: {there}")
    raise SourceError(f"{what} has no column of image bytes: {there}; give --image-col, or {hint}")


def holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return "bytes" in [field.name for field in kind] and holds_bytes(kind.field("bytes").type)
    return is_bytes(kind)


def likely_image(held: Sequence[str]) -> str:
    """Return the column of bytes that most likely holds images, or "" if there is none."""
    return first_of(IMAGE_NAMES, held) or next(iter(held), "")
