"""The worker of `import`: it makes a latent shard, rejects and last a receipt of one file."""

import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from wdsprep.dataset.draft import Draft
from wdsprep.dataset.manifest import Receipt
from wdsprep.dataset.npy_arrays import LATENT
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.samples import facts_bytes
from wdsprep.dataset.shapes import fields_in_shape, shape_name, shapes_of
from wdsprep.dataset.stored_dataset import find_receipt
from wdsprep.dataset.unit_locks import Edition
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.encoding.latent_shard import LatentShard, put_empty
from wdsprep.importing.import_plan import ImportJob, arrays_in, members_of, size_of, sizes_in_roles
from wdsprep.importing.latent_caches import Values
from wdsprep.runners.base import PROGRESS_S
from wdsprep.runners.run import RunProgress
from wdsprep.sources.base import make_or_refuse
from wdsprep.sources.captions import captions_of, plain_facts
from wdsprep.store import open_store
from wdsprep.text import shown


class ImportWorker:
    """A worker that imports the files of a cache, one after another."""

    def __init__(self, job: ImportJob) -> None:
        self._job = job
        self._edition = Edition(store=open_store(job.latents), mark=job.edition)
        self._shapes = {*map(shape_name, shapes_of(job.settings))}
        self._keys = set[str]()
        """The keys of the samples of the present file."""
        self._empty: Mapping[str, str] = {}
        if job.empty:
            fields = job.plan.fields
            self._empty = put_empty(self._edition, fields, lambda f: job.empty[f.name])

    def __call__(self, shard: ImageShard) -> Generator[RunProgress, None, Receipt]:
        """Import one file: write its shard and rejects, and its receipt last. Yield progress.

        Return the receipt. A file that has one already is not imported again.
        """
        job, item = self._job, shard.item
        if done := find_receipt(self._edition.store, shard.name, shard.input, job.settings):
            return done
        with (
            Draft(self._edition, shard.name) as draft,
            closing(LatentShard(draft, shard, job.settings)) as output,
        ):
            reported, self._keys = time.monotonic(), set[str]()
            rows = job.cache.rows(item, job.plan.names)
            for key, source, values in islice(rows, item.take or None):
                reject = (
                    values
                    if isinstance(values, Reject)
                    else make_or_refuse(source, partial(self._add, output, key, source, values))
                )
                if reject is not None:
                    output.rejects.add(replace(reject, key=key))
                if time.monotonic() - reported > PROGRESS_S:
                    reported = time.monotonic()
                    yield output.progress
            yield output.progress
            return output.finish(self._empty)

    def _add(self, output: LatentShard, key: str, source: str, values: Values) -> None:
        if key in self._keys:
            place = f"another sample of {shown(output.shard.item.name)}"
            raise RejectedError(Code.BAD_KEY, f"{place} has the key {shown(key)}")
        plan, settings = self._job.plan, self._job.settings
        arrays = arrays_in(plan, values)
        size = size_of(arrays.get(LATENT), settings)
        shape = shape_name(size) if self._shapes else ""
        if shape and shape not in self._shapes:
            raise RejectedError(Code.OTHER_SHAPE, f"latents of {shape}, which is not in --shapes")
        in_roles = sizes_in_roles(arrays, settings)
        fields = fields_in_shape(settings, size if shape else None, in_roles)
        stored = [*members_of(fields, arrays)]
        facts = plain_facts(
            {name: value for name, value in values.items() if name not in plan.names}
        )
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
        texts = ("json", facts_bytes(said)), ("txt", caption.encode("utf-8", "replace"))
        output.add_members(key, [*stored, *texts], said, shape=shape)
        self._keys.add(key)
