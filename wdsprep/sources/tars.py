"""WebDataset tars, one tar a slice: a folder of them, a glob, a brace pattern, or a single one.

What img2dataset writes is one case: its json lies in the tar, and the Parquet table beside it says
the same again, which is read only where a sample has no json of its own.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wdsprep.errors import NotFoundError, SourceError
from wdsprep.samples import Code, RejectedError, Sample
from wdsprep.sources import Columns, Item, Refusal, alone, opened, shown
from wdsprep.sources.captions import captions_of, decode_facts, decode_text, led_by, plain_facts
from wdsprep.sources.folder import IMAGES
from wdsprep.sources.patterns import Pattern
from wdsprep.store import Entry, Watch, stream
from wdsprep.tar.read import BadSampleError, TarSample, scan, stream_tape

UNREADABLE = ""
"""Where a row of the table beside a tar is kept of which not even the key can be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TarsSource:
    """The tars below `url` whose names match `pattern`, a glob with braces."""

    url: str
    pattern: str
    columns: Columns
    kind: str = "tars"

    def items(self) -> Iterator[Item]:
        wanted = Pattern(self.pattern)
        tables: dict[str, Entry] = {}
        found = 0
        for entry in opened(self.url).list(wanted.start):
            if entry.name.endswith(".parquet"):
                tables[entry.name[: -len("parquet")] + "tar"] = entry  # a.parquet before a.tar
            elif wanted.takes(entry.name):
                found += 1
                beside = tables.pop(entry.name, None)
                files = (entry, beside) if beside else (entry,)
                parts = tuple((e.name, e.nbytes, e.stamp) for e in files)
                yield Item(name=entry.name, parts=parts, samples=0)
        wanted.check_met(self.url, "tar")
        if not found:
            raise SourceError(f"no tar matches {self.url}/{self.pattern}")

    def count(self, item: Item, /) -> int:
        """By reading the tar: only a limit asks for it."""
        return sum(1 for _ in self.read(item))

    def read(self, item: Item, /) -> Iterator[Sample | Refusal]:
        return (row for _key, row in self.read_keyed(item))

    def read_keyed(
        self, item: Item, *, watch: Watch | None = None
    ) -> Iterator[tuple[str, Sample | Refusal]]:
        """The same with the key that each has in the tar; `watch` sees all its bytes in order."""
        table = item.parts[1][0] if len(item.parts) > 1 else ""
        try:
            with stream(opened(self.url), item.name, watch=watch) as tar:
                for found in scan(stream_tape(tar)):
                    for row in self.rows(found, item.name, table):
                        yield found.key, row
        except NotFoundError:
            detail = "the tar was listed, then gone"
            yield "", Refusal(source=shown(item.name), code=Code.VANISHED, detail=detail)

    def rows(
        self, found: TarSample | BadSampleError, tar: str, table: str = ""
    ) -> Iterator[Sample | Refusal]:
        """What a group of members is: a sample, a refusal, or nothing where it is other files."""
        source = shown(f"{tar}/{found.key}" if found.key else tar)
        if row := alone(source, lambda: self._sample(found, source, table)):
            yield row

    def _sample(self, found: TarSample | BadSampleError, source: str, table: str) -> Sample | None:
        if isinstance(found, BadSampleError):
            raise RejectedError(Code.named(f"tar_{found.code}"), str(found))
        fields = found.fields
        image = fields.get(self.columns.image) if self.columns.image else _image(fields)
        if image is None:
            if not {"txt", "json"} & fields.keys():
                return None  # some other file in the tar
            raise RejectedError(Code.NO_IMAGE, f"the sample has only {', '.join(sorted(fields))}")
        facts = self._facts(found, table)
        captions = captions_of(facts, self.columns.caption)
        if "txt" in fields and not self.columns.caption:
            captions = led_by(decode_text(fields["txt"], "txt"), captions)
        return Sample(source=source, image=image, captions=captions, facts=facts)

    def _facts(self, found: TarSample, table: str) -> dict[str, Any]:
        if "json" in found.fields:
            return decode_facts(found.fields["json"], "json")
        rows = _sidecar(self.url, table) if table else {}
        row = rows.get(found.key) or rows.get(UNREADABLE, {})
        if isinstance(row, RejectedError):
            raise RejectedError(*row.args)
        return plain_facts(row)


def _image(fields: Mapping[str, bytes]) -> bytes | None:
    """The first field that is an image by its name."""
    return next((data for name, data in fields.items() if name.rpartition(".")[2] in IMAGES), None)


@functools.lru_cache(maxsize=2)
def _sidecar(url: str, table: str) -> dict[str, dict[str, Any] | RejectedError]:
    """The rows of the Parquet table beside a tar, by key; that of one which has none is unknown."""
    from wdsprep.sources.parquet import read_rows

    rows = read_rows(opened(url), table)
    return {_key(row): row for row in rows if isinstance(row, RejectedError) or "key" in row}


def _key(row: dict[str, Any] | RejectedError) -> str:
    return UNREADABLE if isinstance(row, RejectedError) else str(row["key"])
