"""Captions in place of the samples' own: where a dataset has them from, and what a worker finds.

`CaptionSource` follows from the options of a user for one dataset. `table` reads a table of
captions, and `laid_out` joins it with the samples of each unit.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wdsprep.dataset.samples import Sample
from wdsprep.encoding.image_shards import ImageShard
from wdsprep.sources.captions import caption_at

OWN = "caption"
"""The name of the samples' own captions, and of captions that replace them."""
CAPTION = "{caption}"
"""The part of a place that is replaced by the name of the dataset's captions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionSource:
    """The source of the captions of a dataset.

    They are the samples' own unless a `field` of their json is given, or the `digest` of a table.
    `name` is the name by which a loader selects the captions.
    """

    name: str = OWN
    field: str = ""
    by: str = ""
    digest: str = ""

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings of a dataset that say where its captions come from.

        Settings with their default values are left out.
        """
        said = {
            "caption_field": self.field,
            "caption_name": self.name if self.name != OWN else "",
            "captions": self.digest,
            "captions_by": self.by,
        }
        return {name: value for name, value in said.items() if value}


class CaptionedDataset(NamedTuple):
    """A dataset with captions of a table: all its image shards, and those that it lacks.

    A shard stands for itself by its name and its input.
    """

    place: str
    shards: Sequence[ImageShard]
    pending: Collection[tuple[str, str]]


class Captions:
    """A search for the captions of a shard's samples; this one leaves samples their own."""

    def find(self, key: str, sample: Sample) -> str | None:
        """Return the caption that was found for a sample, or None if it keeps its own.

        Samples are asked for in their order.
        """
        del key, sample
        return None


class FieldCaptions(Captions):
    def __init__(self, path: str) -> None:
        self._path = path

    def find(self, key: str, sample: Sample) -> str | None:
        del key
        return caption_at(sample.facts, self._path)


def replace_surrogates(text: str) -> str:
    """Return a text with lone surrogates replaced, as it is stored."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
