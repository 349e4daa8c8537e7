"""The settings that decide the bytes of a dataset: what they may be, and which differ from others.

A setting that has no type here is of a newer version, or of a test, and nothing reads it.

A dataset of scores, whose tables have columns for each sample, is one of latents without latents or
text, as text alone is one without latents. Its arrays, if it has any, are embeddings of images; if
it has none, its shards are tables alone.

What a table of URLs may be fetched from is the exception among settings: a later run may allow more
than the dataset was begun with, and never less. So the settings say what each slice was allowed at
least, and the receipt of a slice that was allowed more counts that (`ALLOWED_MORE`).
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, pairwise
from math import prod
from typing import Annotated, Any, TypeAlias

from wdsprep.dataset.npy_arrays import DTYPES, FLIPPED, LATENT, Field, fields_of, is_of_text
from wdsprep.dataset.samples import ROLE, ROLE_IMAGE
from wdsprep.dataset.sealed_json import (
    Fields,
    Hex,
    Length,
    Nbytes,
    Text,
    Whole,
    WrongValueError,
    between,
    canonical_json,
    check_record,
    check_values,
    matching,
    value_rule,
)
from wdsprep.dataset.shapes import fields_by_shape, shapes_of
from wdsprep.errors import DamageError, FormatError, UsageError
from wdsprep.limits import MAX_ARRAY_NBYTES
from wdsprep.text import brief

Settings = Mapping[str, Any]
SCORES = "scores"
NUMBER, WHOLE, TEXT = "number", "whole", "text"
"""The kinds of values that a column may hold: real numbers, whole ones or texts."""
SCORER = "wdsprep score"
Changes: TypeAlias = Mapping[str, tuple[Any, Any]]
"""The settings that have changed, each with its old and its new value."""
SAID = {"of": "the datasets to select from", "weights": "the weights of the model"}
"""The words for settings whose names say too little."""
DIGEST = re.compile(r"[0-9a-f]{64}")
STRICT = ("opt_outs", "robots")
"""The policies that allow less where they are true."""
POLICIES = ("allow_s3", *STRICT, "max_bytes")
"""The settings that may be loosened."""
ALLOWED_MORE = "allowed_more:"


def are_rising(values: Any) -> bool:
    """Return whether no list is empty and the numbers in each rise."""
    return all(numbers and all(a < b for a, b in pairwise(numbers)) for numbers in values)


def _same_type(kind: Any, names: str) -> dict[str, Any]:
    """Return the types of several settings of one type, from their names with spaces between."""
    return dict.fromkeys(names.split(), kind)


Pixels = Annotated[int, between(1, 1 << 53, "a number of pixels")]
RoleName = Annotated[str, matching(ROLE, "the name of a role")]
ArrayName = Annotated[str, matching(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.npy", "the name of an array")]
IMAGE_SETTINGS = Fields(
    {"buckets": Annotated[list[Length], value_rule("rising sizes", are_rising)]},
    {
        **_same_type(bool, "allow_s3 opt_outs prefix repeats_from_folders robots"),
        **_same_type(Text, "caption_col check compute_hash filter image_col join keys part"),
        **_same_type(Text, "reencode source url_col verify_hash where"),
        **_same_type(list[Text], "caption_ext optional_roles save_additional_columns"),
        **_same_type(Nbytes, "max_bytes max_caption max_shard_size max_side min_caption min_size"),
        "samples_per_shard": Nbytes,
        "count": Whole | None,
        "max_area": Pixels,
        "max_aspect_ratio": float,
        "role_columns": dict[Text, Text],
        "role_limits": dict[Text, dict[Text, float]],
        "roles": list[RoleName],
        "of": list[Text] | Text,
        "seed": Whole,
        "split": list[list[Text]],
    },
)
"""The settings of a dataset of images that were packed or selected."""
LAYOUT_LINE = Fields(
    {"dtype": Text, "name": ArrayName, "offset": Nbytes, "shape": list[Length]},
    {"role": bool, "variable": bool},
)
SCORED_MODEL = Fields(
    {},
    {
        **_same_type(Text, "dtype embedding processor weights"),
        "columns": list[Text],
        "heads": dict[Text, Hex],
    },
)
SCORE_SETTINGS = Fields(
    {
        "columns": dict[Text, Annotated[str, matching("number|whole|text", "what a column holds")]],
        "language": Text,
        "models": list[SCORED_MODEL],  # type: ignore[valid-type]
    },
    {"role": Annotated[str, matching(ROLE_IMAGE, "the name of an image in a role")]},
)
"""The settings of scores: their columns, the models that made them, and of which image."""
LATENT_SETTINGS = Fields(
    {"layout": list[LAYOUT_LINE]},  # type: ignore[valid-type]
    {
        **_same_type(bool, "compile flip"),
        **_same_type(Text, "caption_col caption_field caption_name captions_by crop dtype empty"),
        **_same_type(Text, "latents pipeline source template text weights"),
        **_same_type(Nbytes, "max_area max_bytes"),
        **_same_type(float | list[float], "scale shift"),
        "captions": Hex,
        "columns": dict[Text, Text],
        "max_crop": float,
        "patch": Annotated[int, between(1, 64, "a size of patches")],
        "resolution": Length,
        "role_shapes": dict[Text, list[tuple[Length, Length]]],
        "role_sizes": dict[Text, Text],
        "roles": list[RoleName],
        "scores": SCORE_SETTINGS,
        "seed": Whole,
        "shapes": Annotated[
            list[tuple[Length, Length]],
            value_rule(
                "different shapes",
                lambda values: all(s and len({*map(str, s)}) == len(s) for s in values),
            ),
        ],
        "text_arguments": dict[Text, Any],
        "text_roles": list[RoleName],
        "upscale": Annotated[float, between(1, 17, "how much images are scaled up")],
    },
)
"""The settings of latents or text that were encoded or imported."""
_RECORDS = {
    "images": Fields({"settings": IMAGE_SETTINGS}),
    "latents": Fields({"settings": LATENT_SETTINGS}),
}


class Stated(dict[str, Any]):
    """Settings or facts as a file has them. A name that the file lacks is a DamageError.

    Which names exist depends on the dataset.
    """

    def __init__(self, fields: Mapping[str, Any], what: str) -> None:
        super().__init__(fields)
        self.what = what

    def __missing__(self, name: str) -> Any:
        raise DamageError(self.what, f"it says no {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Stated, (dict(self), self.what)


def check_storable(dataset: str, settings: Mapping[str, Any]) -> None:
    """Check that files of a dataset can hold these settings, before anything is written."""
    try:
        check_values(_RECORDS[dataset], [{"settings": json.loads(json.dumps(settings))}])
    except WrongValueError as error:
        option = error.path.removeprefix("settings.").replace("_", "-")
        raise UsageError(f"--{option} {brief(error.value)}: give {error.wanted}") from None


def checked_settings(dataset: str, stated: Mapping[str, Any], what: str) -> Stated:
    """Check the settings that a file has, and return them.

    Raise DamageError for settings that no dataset can have.
    """
    check_record(_RECORDS[dataset], {"settings": stated}, what)
    settings = Stated(stated, what)
    if dataset == "images" and is_scored(settings):
        raise DamageError(what, "it has images, and settings of scores")
    try:
        if dataset == "latents":
            _check_layout(settings)
    except DamageError:
        raise
    except FormatError as error:
        raise DamageError(what, f"settings have {error}") from None
    return settings


def _check_layout(settings: Mapping[str, Any]) -> None:
    fields = fields_of(settings["layout"])
    names = {field.name for field in fields}
    if not (fields or is_scored(settings)) or len(names) < len(fields):
        raise FormatError("a layout of no arrays, or with one twice")
    if shapes_of(settings) and is_of_text(fields):
        raise FormatError("shapes, and no latents")
    for before, field in zip((None, *fields), fields, strict=False):
        if field.name in (LATENT, FLIPPED):
            _check_latents(field, settings)
        if field.role and field.mirrors and (before is None or before.name != field.mirrors):
            raise FormatError(f"{field.name}, and no {field.mirrors} before it")
    in_shapes = fields_by_shape(settings) if LATENT in names else {}
    for field in chain(fields, *in_shapes.values()):
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


def is_scored(settings: Mapping[str, Any]) -> bool:
    """Return whether a dataset of these settings holds scores."""
    return SCORES in settings


def counted_as(dataset: str, settings: Mapping[str, Any]) -> str:
    """Return what the samples of a dataset are counted as: images, latents or scores."""
    return SCORES if is_scored(settings) else dataset


def columns_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return which kind of value each column of scores holds, such as `number`.

    The columns stand in the order in which they were asked for.
    """
    return dict(settings.get(SCORES, {}).get("columns", {}))


def as_json(settings: Settings) -> dict[str, Any]:
    """Return the settings as their file gives them back, with lists in place of tuples."""
    stored: dict[str, Any] = json.loads(canonical_json(dict(settings)))
    return stored


def is_same(old: Any, new: Any) -> bool:
    """Return whether two settings, or values of them, are the same in a file. NaN is NaN there."""
    if old == new:  # usual: a million receipts have the same
        return True
    before, now = canonical_json(old), canonical_json(new)
    return before == now or bool(json.loads(before) == json.loads(now))


def changed_settings(old: Settings, new: Settings) -> Changes:
    """Return the old and new value of each setting that differs, except loosened policies."""
    old, new = as_json(old), as_json(new)
    looser = loosened(old, new)
    pairs = {name: (old.get(name), new.get(name)) for name in sorted({*old, *new})}
    return {n: pair for n, pair in pairs.items() if n not in looser and not is_same(*pair)}


def say_changes(changes: Changes, between: str = ", now ") -> str:
    """Return what differs, such as `buckets: 256,512, now 512`, each setting with both values.

    Another kind of source has other settings, so it is named alone. Mappings are compared by their
    names, and so are lists of what has a name. Digests and other lists of more than texts and
    numbers say nothing to people: they are named without their values.
    """
    if "source" in changes:
        changes = {"source": changes["source"]}
    texts = []
    for name, old, new in _flat(changes):
        before, now = _say_value(old), _say_value(new)
        values = f"{before}{between}{now}" if before and now and before != now else "other"
        texts.append(f"{SAID.get(name, name.replace('_', '-'))}: {values}")
    return "; ".join(texts)


def _flat(changes: Changes) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of each change, with mappings taken apart."""
    for name, (old, new) in changes.items():
        if isinstance(old, Mapping | None) and isinstance(new, Mapping | None):
            inner = changed_settings(old or {}, new or {})
            yield from _flat({f"{name}.{part}": pair for part, pair in inner.items()})
        else:
            yield name, old, new


def _say_value(value: Any) -> str:
    """Return a value as people read it, or "" if it says nothing to them.

    That holds for digests, mappings, and lists of others than texts, numbers and what has a name.
    """
    if isinstance(value, list):
        items = [item.get("name") if isinstance(item, Mapping) else item for item in value]
        is_plain = all(isinstance(item, str | int | float) for item in items)
        return shlex.quote(",".join(map(str, items))) if is_plain else ""
    if isinstance(value, bool | None):
        return {True: "yes", False: "no", None: "none"}[value]
    is_plain = not isinstance(value, Mapping) and not DIGEST.fullmatch(str(value))
    return shlex.quote(str(value)) if is_plain else ""


def loosened(old: Settings, new: Settings) -> tuple[str, ...]:
    """Return the policies by which the new settings allow more to be fetched than the old ones.

    There are none unless both are of a dataset from a table of URLs.
    """
    names = POLICIES if old.get("source") == new.get("source") == "urls" else ()
    return tuple(name for name in names if _laxity(name, new) > _laxity(name, old))


def allowed_more(policies: Iterable[str]) -> dict[str, int]:
    """Return the counts by which a receipt says that its slice was fetched with looser policies."""
    return {f"{ALLOWED_MORE}{name}": 1 for name in policies}


def _laxity(name: str, settings: Settings) -> int:
    value = int(settings.get(name, 0))
    return -value if name in STRICT else value
