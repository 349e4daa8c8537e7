"""Types of what manifests and receipts say, which `json_records` checks where they are read.

Settings are here by their names and types, as the rooms above write them. One that is not here is
of a newer version, or of a test, and nothing reads it.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Literal, TypedDict

from wdsprep.dataset.json_records import (
    Count,
    Hex,
    Length,
    Nbytes,
    Text,
    ValueRule,
    Whole,
    WrongValueError,
    between,
    check_record,
    check_values,
    matching,
)
from wdsprep.dataset.npy_arrays import DTYPES, FLIPPED, LATENT, Field, fields_of, is_of_text
from wdsprep.dataset.score_columns import is_scored
from wdsprep.dataset.shapes import fields_by_shape, shapes_of
from wdsprep.errors import DamageError, FormatError, UsageError
from wdsprep.limits import MAX_ARRAY_NBYTES
from wdsprep.text import brief


def _have_edges(names: Any) -> bool:
    """Return whether each name of a count that has a `<`, as `side<512`, ends in a number."""
    edges = (name.partition("<") for name in names)
    return all(not sign or (edge.isdecimal() and len(edge) < 20) for _, sign, edge in edges)


CountName = Annotated[Text, ValueRule("the name of a count", _have_edges)]
Pixels = Annotated[int, between(1, 1 << 53, "a number of pixels")]


def _rises(values: Any) -> bool:
    return all(each and all(a < b for a, b in pairwise(each)) for each in values)


def _differ(values: Any) -> bool:
    return all(each and len({*map(str, each)}) == len(each) for each in values)


class _ImageNeeds(TypedDict):
    buckets: Annotated[list[Length], ValueRule("rising sizes", _rises)]


class ImageSettings(_ImageNeeds, total=False):
    """The settings of a dataset of images that were packed or selected."""

    source: Text
    allow_s3: bool
    caption_col: Text
    caption_ext: list[Text]
    check: Text
    compute_hash: Text
    filter: Text
    image_col: Text
    max_area: Pixels
    max_aspect_ratio: float
    max_bytes: Nbytes
    max_caption: Nbytes
    max_shard_size: Nbytes
    max_side: Nbytes
    min_caption: Nbytes
    min_size: Nbytes
    opt_outs: bool
    reencode: Text
    repeats_from_folders: bool
    robots: bool
    samples_per_shard: Nbytes
    save_additional_columns: list[Text]
    url_col: Text
    verify_hash: Text
    count: Whole | None
    join: Text
    keys: Text
    of: list[Text] | Text
    part: Text
    prefix: bool
    seed: Whole
    split: list[list[Text]]
    where: Text


class _LayoutNeeds(TypedDict):
    dtype: Text
    name: Annotated[str, matching(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.npy", "the name of an array")]
    offset: Nbytes
    shape: list[Length]


class LayoutLine(_LayoutNeeds, total=False):
    variable: bool


class _LatentNeeds(TypedDict):
    layout: list[LayoutLine]


class ScoredModel(TypedDict, total=False):
    columns: list[Text]
    dtype: Text
    embedding: Text
    heads: dict[Text, Hex]
    processor: Text
    weights: Text


class ScoreSettings(TypedDict):
    """The settings of scores: their columns and the models that made them."""

    columns: dict[Text, Annotated[str, matching("number|whole|text", "what a column holds")]]
    language: Text
    models: list[ScoredModel]


class LatentSettings(_LatentNeeds, total=False):
    """The settings of latents or text that were encoded or imported."""

    latents: Text
    resolution: Length
    text: Text
    caption_col: Text
    caption_field: Text
    caption_name: Text
    captions: Hex
    captions_by: Text
    columns: dict[Text, Text]
    compile: bool
    crop: Text
    dtype: Text
    empty: Text
    flip: bool
    max_area: Pixels
    max_bytes: Nbytes
    max_crop: float
    upscale: Annotated[float, between(1, 17, "how much images are scaled up")]
    patch: Annotated[int, between(1, 64, "a size of patches")]
    pipeline: Text
    scale: float | list[float]
    scores: ScoreSettings
    seed: Whole
    shapes: Annotated[list[tuple[Length, Length]], ValueRule("different shapes", _differ)]
    shift: float | list[float]
    source: Text
    template: Text
    text_arguments: dict[Text, Any]
    weights: Text


class TrialFacts(TypedDict, total=False):
    busy: float
    device: Text
    each: float
    launching: float


class Extra(TypedDict, total=False):
    """Facts about a run beside the settings. `model` may be a folder whose name is not UTF-8."""

    left_out: dict[Text, Count]
    limit: Annotated[int, between(0, 1 << 63, "a count")]
    model: str
    selection: Text
    trial: TrialFacts


class ReceiptHead(TypedDict):
    dataset: Literal["images", "latents"]
    settings: dict[str, Any]


class ManifestHead(ReceiptHead):
    complete: bool
    extra: Extra
    generations: Annotated[list[Nbytes], ValueRule("rising numbers of units", _rises)]


class Stated(dict[str, Any]):
    """Settings or facts as a file has them. A name that the file lacks is a DamageError.

    Which names exist depends on the dataset.
    """

    def __init__(self, found: Mapping[str, Any], what: str) -> None:
        super().__init__(found)
        self.what = what

    def __missing__(self, name: str) -> Any:
        raise DamageError(self.what, f"it says no {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Stated, (dict(self), self.what)


def check_storable(dataset: str, settings: Mapping[str, Any]) -> None:
    """Check that files of a dataset can hold these settings, before anything is written."""
    try:
        check_values(_SETTINGS[dataset], [{"settings": json.loads(json.dumps(settings))}])
    except WrongValueError as error:
        option = error.path.removeprefix("settings.").replace("_", "-")
        raise UsageError(f"--{option} {brief(error.value)}: give {error.wanted}") from None


def checked_settings(dataset: str, found: Mapping[str, Any], what: str) -> Stated:
    """Check the settings that a file has, and return them.

    Raise DamageError for settings that no dataset can have.
    """
    check_record(_SETTINGS[dataset], {"settings": found}, what)
    settings = Stated(found, what)
    try:
        if dataset == "latents":
            _check_layout(settings)
    except DamageError:
        raise
    except FormatError as error:
        raise DamageError(what, f"settings have {error}") from None
    return settings


class _OfImages(TypedDict):
    settings: ImageSettings


class _OfLatents(TypedDict):
    settings: LatentSettings


_SETTINGS = {"images": _OfImages, "latents": _OfLatents}


def _check_layout(settings: Mapping[str, Any]) -> None:
    fields = fields_of(settings["layout"])
    names = {field.name for field in fields}
    if not (fields or is_scored(settings)) or len(names) < len(fields):
        raise FormatError("a layout of no arrays, or with one twice")
    if shapes_of(settings) and is_of_text(fields):
        raise FormatError("shapes, and no latents")
    for field in fields:
        if field.name in (LATENT, FLIPPED):
            _check_latents(field, settings)
    in_shapes = fields_by_shape(settings) if LATENT in names else {}
    for field in (*fields, *(each for some in in_shapes.values() for each in some)):
        if prod(field.shape) * DTYPES[field.dtype] > MAX_ARRAY_NBYTES:
            raise FormatError(f"{field.name} of {field}, which is too large for a sample")


def _check_latents(field: Field, settings: Mapping[str, Any]) -> None:
    """Check that a field of latents has the channels that its patch, shift and scale need."""
    patch = settings.get("patch", 1)
    lists = [name for name in ("scale", "shift") if isinstance(settings.get(name), list)]
    is_moments = settings.get("latents") == "moments"
    if not (lists or is_moments or patch > 1 or "shapes" in settings):
        return
    if field.is_variable or len(field.shape) != 3:
        raise FormatError(f"{field.name} of {field}, which are not latents")
    channels, high, wide = field.shape
    if is_moments:
        if channels % 2 or high % patch or wide % patch:
            raise FormatError(f"{field.name} of {field}, which are not a mean and a log-variance")
        channels = channels // 2 * patch**2
    elif channels % patch**2:
        raise FormatError(f"{field.name} of {field}, which have no patches of {patch}")
    for name in lists:
        if len(settings[name]) != channels:
            raise FormatError(f"a {name} for {len(settings[name])} channels, of {channels}")
