"""The work of `import`: a latent shard, rejects and last a receipt are made of one file."""

import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.draft import Draft
from wdsprep.dataset.manifest import Receipt
from wdsprep.dataset.npy_arrays import LATENT, MASK
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.samples import facts_bytes
from wdsprep.dataset.settings import Settings
from wdsprep.dataset.shapes import fields_in_shape, shape_name, shapes_of
from wdsprep.dataset.stored_dataset import find_receipt
from wdsprep.dataset.unit_locks import Edition
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.importing.column_arrays import keep_tokens, npy_of
from wdsprep.importing.column_names import ImportPlan
from wdsprep.importing.import_plan import arrays_in, size_of, sizes_in_roles
from wdsprep.importing.latent_caches import LatentCache, Row
from wdsprep.runners.base import PROGRESS_S
from wdsprep.runners.run import RunProgress
from wdsprep.sources.base import make_or_refuse
from wdsprep.sources.captions import captions_of, plain_facts
from wdsprep.text import shown

if TYPE_CHECKING:
    from wdsprep.encoding.latent_shard import LatentShard


def import_file(
    shard: ImageShard,
    *,
    cache: LatentCache,
    plan: ImportPlan,
    edition: Edition,
    settings: Settings,
    empty: Mapping[str, bytes],
) -> Generator[RunProgress, None, Receipt]:
    """Import one file: write its shard and rejects, and its receipt last. Yield progress.

    Return the receipt. A file that has one already is not imported again. `empty` has the arrays of
    the empty caption by the name of their member, if the user gives them.
    """
    from wdsprep.encoding.latent_shard import LatentShard, write_empty  # torch: for workers alone

    if done := find_receipt(edition.store, shard.name, shard.input, settings):
        return done
    digests = write_empty(edition, plan.fields, lambda field: empty[field.name]) if empty else {}
    with (
        Draft(edition, shard.name) as draft,
        closing(LatentShard(draft, shard, settings)) as output,
    ):
        reported, keys = time.monotonic(), set[str]()
        for row in islice(cache.rows(shard.item, plan.names), shard.item.take or None):
            reject = make_or_refuse(row[1], partial(_add, output, plan, row, keys))
            if reject is not None:
                output.rejects.add(replace(reject, key=row[0]))
            if time.monotonic() - reported > PROGRESS_S:
                reported = time.monotonic()
                yield output.progress
        yield output.progress
        return output.finish(digests)


def _add(output: "LatentShard", plan: ImportPlan, row: Row, keys: set[str]) -> Reject | None:
    """Add the sample of a row to a shard, and its key to `keys`, which are those in the shard.

    Return the reject of a row that could not be read. Raise RejectedError if the sample does not
    fit.
    """
    key, source, values = row
    if isinstance(values, Reject):
        return values
    if key in keys:
        place = f"another sample of {shown(output.shard.item.name)}"
        raise RejectedError(Code.BAD_KEY, f"{place} has the key {shown(key)}")
    settings, arrays = output.settings, arrays_in(plan, values)
    size, sizes = size_of(arrays.get(LATENT), settings), shapes_of(settings)
    shape = shape_name(size) if sizes else ""
    if sizes and size not in sizes:
        raise RejectedError(Code.OTHER_SHAPE, f"latents of {shape}, which is not in --shapes")
    in_roles = sizes_in_roles(arrays, settings)
    members: list[tuple[str, bytes]] = []
    for field in fields_in_shape(settings, size if shape else None, in_roles):
        array = arrays[field.name]
        if field.is_variable and MASK in arrays:
            array = keep_tokens(array, arrays[MASK])
        members.append((field.name, npy_of(field, array)))
    facts = plain_facts({name: value for name, value in values.items() if name not in plan.names})
    captions = captions_of(facts, settings.get("caption_col", ""))
    caption = captions[0] if captions else ""
    said: dict[str, Any] = {
        "caption": caption,
        "key": key,
        "meta": facts,
        "source": source,
        **{f"{name}_width": width for name, (width, _) in in_roles.items()},
        **{f"{name}_height": height for name, (_, height) in in_roles.items()},
    }
    if any(size):
        said["crop"] = [0, 0, *size]
    if len(captions) > 1:
        said["captions"] = captions
    members += [("json", facts_bytes(said)), ("txt", caption.encode("utf-8", "replace"))]
    output.add_members(key, members, said, shape=shape)
    keys.add(key)
    return None
