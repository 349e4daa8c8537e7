"""A latent shard being written: arrays of fixed shape first in each sample, then json and txt.

Samples come in the order of the image shard. In a dataset with several shapes, samples of one shape
stand together: all wait until the last has come, and are then written shape by shape. They wait on
a local disk (in TMPDIR), in a file without a name, and each takes some hundred bytes of memory. The
table beside the shard says which samples of the image shard it has. A shard of text alone is one
whose fields are those of captions.
"""

import pickle
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from wdsprep.dataset.coarse_histograms import count_sample
from wdsprep.dataset.draft import Draft, DraftShard
from wdsprep.dataset.file_names import empty_name, latent_shard, rejects_name
from wdsprep.dataset.manifest import Receipt
from wdsprep.dataset.npy_arrays import OF_SIZES, Field, fields_of, is_of_text, text_fields
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.sample_table import ROW, table_columns
from wdsprep.dataset.samples import facts_bytes
from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.dataset.settings import Settings, counted_as
from wdsprep.dataset.shapes import fields_in_shape, shape_name, shapes_of
from wdsprep.dataset.tar.write import Data, nbytes_of, pieces_of
from wdsprep.dataset.unit_locks import Edition
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.encoding.sample_chain import EncodedSample
from wdsprep.encoding.two_passes import TextPass
from wdsprep.errors import ExistsError, NotFoundError, TarError
from wdsprep.runners.run import RunProgress, share_done
from wdsprep.store.base import write_bytes
from wdsprep.store.spool import Place, Spool

Files = Mapping[str, str]
Members = Sequence[tuple[str, Data]]
"""The members of a sample, with their names and in their order."""


def spool_sample(spool: Spool, key: str, members: Members, facts: Mapping[str, Any]) -> Place:
    """Keep a finished sample on disk until its shard is written, and return its place there."""
    whole = [(name, b"".join(pieces_of(data))) for name, data in members]
    return spool.put(pickle.dumps((key, whole, facts), protocol=5))


def unspool_sample(spool: Spool, place: Place) -> tuple[str, Members, dict[str, Any]]:
    """Return the key, the members and the facts of a sample that `spool_sample` has kept."""
    key, members, facts = pickle.loads(spool.get(place))  # noqa: S301  ours
    return key, members, facts


class LatentShard:
    """A latent shard that is being written, with its rejects."""

    def __init__(self, draft: Draft, shard: ImageShard, settings: Settings) -> None:
        """Begin a latent shard for an image shard, in a dataset of these settings."""
        self._draft, self.shard, self.settings = draft, shard, settings
        self.fields = fields_of(settings["layout"])
        self._in_sizes: dict[tuple[Any, ...], tuple[Field, ...]] = {}
        """The arrays of a sample, by the sizes of its crops."""
        names = map(shape_name, shapes_of(settings))
        self._waiting: dict[str, list[Place]] = {name: [] for name in names}
        """The samples of each shape."""
        self._spool = Spool()
        self._tar: DraftShard | None = None
        self.texts: TextPass | None = None
        """The encoded captions that wait for the images; None if captions come with these."""
        self.rejects = draft.rejects
        self.samples = self.nbytes = 0
        self.counts: Counter[str] = Counter()

    @property
    def progress(self) -> RunProgress:
        return self.progress_with(self.samples, self.nbytes, self.rejects.counts)

    def progress_with(self, samples: int, nbytes: int, rejects: Mapping[str, int]) -> RunProgress:
        """Return the progress of a shard with these samples and rejects by code so far."""
        item = self.shard.item
        share = share_done(samples + sum(rejects.values()), item.take or item.samples)
        return RunProgress(samples=samples, nbytes=nbytes, share=share, rejects=dict(rejects))

    def refuse(self, reject: Reject) -> None:
        self.rejects.add(reject)

    def add(self, encoded: EncodedSample) -> None:
        encoded = self.texts.join(encoded) if self.texts else encoded
        describe = text_facts_of if is_of_text(self.fields) else facts_of
        facts = describe(encoded, is_packed=not self.shard.is_foreign)
        size = encoded.crop.size if self._waiting else None
        sizes = (size, *encoded.role_sizes.items())
        if not (fields := self._in_sizes.get(sizes)):
            fields = fields_in_shape(self.settings, size, encoded.role_sizes)
            self._in_sizes[sizes] = fields
        members = members_of(fields, facts, encoded)
        self.add_members(encoded.key, members, facts, shape=shape_name(size) if size else "")

    def add_members(
        self, key: str, members: Members, facts: Mapping[str, Any], *, shape: str = ""
    ) -> None:
        """Add a sample to the shard, given its members and the object in its json.

        Raise RejectedError if the sample was removed from this dataset, by its source, or if a tar
        cannot hold its key.
        """
        if self._draft.removed and self._draft.removed.has("source", facts.get("source", "")):
            raise RejectedError(Code.REMOVED)
        tar, row = self._open_tar(), {**facts, ROW: self._inputs}
        try:
            if shape:
                tar.reserve(key, [name for name, _ in members])
                self._waiting[shape].append(spool_sample(self._spool, key, members, row))
            else:
                tar.add(key, members, facts=row)
        except TarError as error:
            raise RejectedError(Code.BAD_KEY, str(error)) from error
        self.samples += 1
        self.nbytes += sum([nbytes_of(data) for _, data in members])
        count_sample(self.counts, counted_as("latents", self.settings), facts, shape)

    @property
    def _inputs(self) -> int:
        """Return the number of samples that have been added so far, rejects included."""
        return self.samples + self.rejects.counts.total()

    def _open_tar(self) -> DraftShard:
        """Return the tar of the shard, which is created for the first sample."""
        if self._tar is None:
            name = latent_shard(self.shard.name, self.settings)
            self._tar = self._draft.shard(name, table_columns("latents", self.settings))
        return self._tar

    def finish(self, files: Files) -> Receipt:
        """Write the samples that wait, complete the shard, and return its receipt.

        `files` are the digests of further files that the receipt lists, such as those of the empty
        caption.
        """
        for place in chain.from_iterable(self._waiting.values()):
            key, members, row = unspool_sample(self._spool, place)
            self._open_tar().add(key, members, facts=row)
        receipt = Receipt(
            dataset="latents",
            unit=self.shard.name,
            generation=0,
            settings=self.settings,
            input=self.shard.input,
            inputs=self._inputs,
            shards=(self._tar.finish(),) if self._tar else (),
            rejects=dict(self.rejects.counts),
            counts=dict(self.counts),
            files={rejects_name(self.shard.name): self.rejects.digest, **files},
        )
        return self._draft.finish(receipt, {})

    def close(self) -> None:
        self._spool.close()


def members_of(
    fields: Sequence[Field], facts: Mapping[str, Any], encoded: EncodedSample
) -> list[tuple[str, Data]]:
    """Return the members of a latent sample with this json, with their names and in their order."""
    arrays = arrays_of(fields, facts, encoded)
    members: list[tuple[str, Data]] = [
        (field.name, npy_of(field, arrays[field.name])) for field in fields
    ]
    members.append(("json", facts_bytes(facts)))
    members.append(("txt", facts["caption"].encode("utf-8", "replace")))
    return members


def arrays_of(
    fields: Sequence[Field], facts: Mapping[str, Any], encoded: EncodedSample
) -> dict[str, Tensor]:
    """Return the arrays of a sample: those that models made, and those made from image sizes."""
    sizes = [field.name for field in fields if field.name in OF_SIZES]
    return {**encoded.arrays, **{name: _size_array(name, facts) for name in sizes}}


def _size_array(name: str, facts: Mapping[str, Any]) -> Tensor:
    """Return the array that tells a denoiser the sizes of an image: heights before widths."""
    left, top, right, bottom = facts["crop"]
    original = [facts["original_height"], facts["original_width"]]
    crop, target = [top, left], [bottom - top, right - left]
    numbers = {
        "time_ids.npy": original + crop + target,
        "original_size.npy": original,
        "target_size.npy": target,
        "crop_coords.npy": crop,
    }
    return torch.frombuffer(array("i", numbers[name]), dtype=torch.int32)


def npy_of(field: Field, array: Tensor) -> tuple[bytes, memoryview]:
    """Return the npy header and the bytes of an array, without copying them.

    NumPy has no bfloat16, so the bits of its numbers are written.
    """
    header = field.header_for(len(array)) if field.is_variable else field.header
    bits = array.view(torch.int16) if array.dtype == torch.bfloat16 else array
    return header, bits.contiguous().numpy().data.cast("B")


def facts_of(encoded: EncodedSample, *, is_packed: bool) -> dict[str, Any]:
    """Return the json of a latent sample, as a dict.

    The crop is left, top, right, bottom in the scaled image. If `is_packed`, pack made the image
    sample, and its json tells the source and the source's size.
    """
    crop = encoded.crop
    fit, known = crop.fit, encoded.sample.facts if is_packed else {}
    return {
        **text_facts_of(encoded, is_packed=is_packed),
        "crop": [fit.left, fit.top, fit.left + fit.width, fit.top + fit.height],
        "height": crop.height,
        "original_height": known.get("original_height", crop.height),
        "original_width": known.get("original_width", crop.width),
        "scaled_height": fit.scaled_height,
        "scaled_width": fit.scaled_width,
        "width": crop.width,
        **({"upscaled": round(crop.scale, 4)} if crop.width and crop.scale > 1 else {}),
        **{f"{name}_width": width for name, (width, _) in encoded.role_sizes.items()},
        **{f"{name}_height": height for name, (_, height) in encoded.role_sizes.items()},
    }


def text_facts_of(encoded: EncodedSample, *, is_packed: bool) -> dict[str, Any]:
    """Return the json of a sample of text alone, as a dict. It says nothing of the image.

    If `is_packed`, pack made the image sample, and the source is taken from its json.
    """
    sample, tokens = encoded.sample, encoded.tokens
    known = sample.facts if is_packed else {}
    return {
        "caption": sample.caption,
        "cut": tokens.cut,
        "key": encoded.key,
        "source": known.get("source", sample.source),
        "tokens": tokens.count,
        **({"repeats": known["repeats"]} if "repeats" in known else {}),
    }


def write_empty(
    edition: Edition, fields: Sequence[Field], made: Callable[[Field], bytes]
) -> dict[str, str]:
    """Write the arrays of the empty caption, for classifier-free guidance, where they are missing.

    `made` makes the bytes of a field's file, and is called only if that is missing. Return the
    digest of each stored file by its name.
    """
    digests, store = {}, edition.store
    for field in text_fields(fields):
        name = empty_name(field.name)
        try:
            data = store.read(name)
        except NotFoundError:
            data = made(field)
            with edition.holding(name):
                try:
                    write_bytes(store, name, data, exclusive=True)
                except ExistsError:
                    data = store.read(name)
        digests[name] = hex_digest(data)
    return digests
