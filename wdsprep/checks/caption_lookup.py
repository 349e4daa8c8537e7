"""Check that the lookup of captions that were taken from a table is still as it was written.

A damaged lookup may give other captions than the table, and no other check would notice.
"""

from contextlib import suppress
from typing import TypedDict

from blake3 import blake3

from wdsprep.checks.dataset_check import DatasetSurvey, smallest_unit
from wdsprep.checks.findings import Kind
from wdsprep.dataset.file_names import CAPTION_TABLE, lookup_name
from wdsprep.dataset.json_records import Hex, read_record
from wdsprep.errors import FormatError, NotFoundError
from wdsprep.store import shared_store
from wdsprep.store.base import CHUNK_NBYTES, Store, stream


def check_lookup(found: DatasetSurvey) -> None:
    """Add a finding if the lookup of captions does not have the digest that its table states.

    A lookup that is missing is not a finding: the next run makes it again.
    """
    digest = found.receipts[0].settings.get("captions", "") if found.receipts else ""
    name = lookup_name(digest)
    if not digest or not {name, CAPTION_TABLE} <= found.files.keys():
        return
    store = shared_store(found.place.url)
    if not (wanted := _stated_digest(store, digest)):
        return
    watch = blake3()
    with suppress(NotFoundError):
        with stream(store, name, watch=watch.update) as data:
            while data.read(CHUNK_NBYTES):
                pass
        if watch.hexdigest() != wanted:
            what = f"its BLAKE3 is not what {CAPTION_TABLE} says"
            found.add_finding(name, Kind.DAMAGED, what, smallest_unit(found))


def _stated_digest(store: Store, digest: str) -> str:
    """Return the digest of the lookup's file, as the record of its table states it.

    Return "" if that record is missing or damaged, or does not have the `digest` of the captions.
    """
    with suppress(NotFoundError, FormatError):
        lookup = read_record(_Table, store.read(CAPTION_TABLE), CAPTION_TABLE)["lookup"]
        if lookup["digest"] == digest:
            return str(lookup["file_digest"])
    return ""


class _Lookup(TypedDict):
    digest: Hex
    file_digest: Hex


class _Table(TypedDict):
    lookup: _Lookup
