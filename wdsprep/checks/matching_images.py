"""Check that latents were made of these images.

Both have the same shards, with the same keys in the same order, apart from rejects.

Billions of keys fit into no memory. Keys rise in a packed shard, and so in a latent shard or in
each of its shapes: the keys of a latent shard and of its rejects, sorted together, must be those of
the image shard, and a digest of them is enough.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from wdsprep.checks.dataset_check import DatasetSurvey
from wdsprep.checks.findings import Kind
from wdsprep.dataset.buckets import buckets_encoded
from wdsprep.dataset.digests import hex_digest
from wdsprep.dataset.file_names import latent_shard, latent_unit
from wdsprep.dataset.receipts import Shard, image_shard_digest
from wdsprep.dataset.removed_samples import NONE_REMOVED, removed_from
from wdsprep.errors import DamageError
from wdsprep.text import plural


def keys_digest(keys: Iterable[str]) -> str:
    return hex_digest("\n".join(keys).encode("utf-8", "surrogateescape"))


def find_images(latents: DatasetSurvey, others: Sequence[DatasetSurvey]) -> DatasetSurvey | None:
    """Return the image dataset that latents were made of, or None if there is no image dataset.

    It is the one whose shards most of the latents were made of.
    """
    inputs = {image_shard_digest(receipt.input) for receipt in latents.receipts}

    def shared(images: DatasetSurvey) -> int:
        return sum(s.digest in inputs for r in images.receipts for s in r.shards)

    return max((o for o in others if o.place.dataset == "images"), key=shared, default=None)


def find_limited_shards(latents: DatasetSurvey) -> dict[str, int]:
    """Return the image shards of which only the first samples were encoded, and how many."""
    cut = (receipt.input.partition(":")[2] for receipt in latents.receipts)
    return {
        latent_shard(receipt.unit): int(number)
        for receipt, number in zip(latents.receipts, cut, strict=True)
        if number
    }


def check_pairs(latents: DatasetSurvey, images: DatasetSurvey) -> None:
    """Compare the receipts of latents with those of images, and add findings to the latents."""
    there = {shard.name: shard for receipt in images.receipts for shard in receipt.shards}
    removed = NONE_REMOVED
    with suppress(DamageError):  # of which the images have a finding
        removed = removed_from(images.edition.store)
    for receipt in latents.receipts:
        name, inputs = latent_shard(receipt.unit), receipt.inputs
        shard, shown = there.get(name), images.place.shown
        successor = removed.follow(image_shard_digest(receipt.input))
        if successor and successor.digest == (shard.digest if shard else ""):
            lost = plural(len(successor.rows), "sample has", "samples have")
            what = f"{lost} been removed from the {name} of {shown} since"
            _find(latents, receipt.unit, Kind.BEHIND, what)
        elif shard is None:
            _find(latents, receipt.unit, Kind.CHANGED, f"{shown} has no shard {name}")
        elif image_shard_digest(receipt.input) != shard.digest:
            what = f"it was not made of the {name} that {shown} has now"
            _find(latents, receipt.unit, Kind.CHANGED, what)
        elif inputs != (samples := int(receipt.input.partition(":")[2] or shard.samples)):
            what = f"its shard and rejects have {inputs:,} of {plural(samples, 'sample')}"
            _find(latents, receipt.unit, Kind.UNMATCHED, what)
    if latents.receipts:
        _check_all_encoded(latents, images, there)


def _check_all_encoded(
    latents: DatasetSurvey, images: DatasetSurvey, there: Mapping[str, Shard]
) -> None:
    """Add a finding for each image shard without latents, if the latents are complete.

    `there` has the image shards by name. Those in buckets that are not encoded need no latents.
    """
    buckets = images.receipts[0].settings["buckets"] if images.receipts else ()
    made = {receipt.unit for receipt in latents.receipts}
    if latents.manifest:
        made.update(latents.manifest.ledger.units())
    encoded = buckets_encoded(latents.receipts[0].settings, buckets)
    for name, shard in there.items():
        if shard.bucket in encoded and latent_unit(name) not in made and latents.is_complete:
            _find(latents, latent_unit(name), Kind.CHANGED, f"nothing was made of {name}")


def check_keys(latents: DatasetSurvey, made: Mapping[str, str], images: Mapping[str, str]) -> None:
    """Compare the keys of latents with those of images, and add findings to the latents.

    `made` and `images` have digests of the keys, by the input that a latent receipt states.
    """
    for receipt in latents.receipts:
        ours, theirs = made.get(receipt.input), images.get(receipt.input)
        if ours and theirs and ours != theirs:
            what = (
                "the keys of its shard and its rejects, or their order, are not the image shard's"
            )
            _find(latents, receipt.unit, Kind.UNMATCHED, what)


def _find(latents: DatasetSurvey, unit: str, kind: Kind, what: str) -> None:
    latents.add_finding(latent_shard(unit), kind, what, unit)
