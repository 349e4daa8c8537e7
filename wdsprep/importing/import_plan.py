"""Decide from the first rows of a cache which arrays and settings its dataset gets.

All samples of a dataset have arrays of the same dtypes and shapes. So all samples must have what
the first rows have; a sample that differs is a reject. One array of text may be as long as its
caption, up to the length of its mask or of `--text-length`. Latents may have any shape of
`--shapes`.

`empty_of` reads the arrays of the empty caption, for classifier-free guidance, from where a user
says: a cache does not hold them, but its trainer has them in files, or uses zeros.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from wdsprep.dataset.npy_arrays import GIVEN, Field, fields_of, layout, text_fields
from wdsprep.dataset.npy_arrays import LATENT as LATENT_NPY
from wdsprep.dataset.npy_arrays import MASK as MASK_NPY
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.samples import TARGET, image_name, names_in_roles, roles_of
from wdsprep.dataset.shapes import Size
from wdsprep.errors import FormatError, SourceError, UsageError
from wdsprep.importing.column_arrays import (
    LATENT_SIDES,
    Array,
    array_of,
    as_float32,
    field_dtype,
    npy_of,
    std_to_logvar,
    to_stored,
)
from wdsprep.importing.column_names import (
    CELL,
    EMB,
    LATENT,
    LOGVAR,
    MASK,
    MEAN,
    MEAN_STD,
    POOLED,
    REFERENCES,
    TEXT,
    CachedColumn,
    ImportPlan,
)
from wdsprep.importing.latent_caches import LatentCache, Row
from wdsprep.importing.options import ImportOptions
from wdsprep.sources.base import check_names, make_or_refuse
from wdsprep.store import split_url

LOOKED_AT = 64
"""The number of rows that decide."""
SIDES = {
    **dict.fromkeys((LATENT, MEAN, LOGVAR, MEAN_STD, REFERENCES), LATENT_SIDES),
    EMB: 2,
    POOLED: 1,
    MASK: 1,
}
"""The number of dimensions of the arrays with a role, without the one of a batch."""
MEMBERS = {role: f"{role}.npy" for role in TEXT}
Arrays = dict[str, Array]
"""The arrays of a sample by the names that they have as members."""


def arrays_in(chosen: ImportPlan, columns: Mapping[str, Any]) -> Arrays:
    """Return the arrays of a row.

    Raise RejectedError if the row lacks one, or has one that cannot be stored. It may have any
    number of references.
    """
    by_role: Arrays = {}
    references: list[Array] = []
    for column in chosen.columns:
        value, sides = columns.get(column.name), SIDES[column.role]
        if value is None:
            raise RejectedError(Code.NO_ARRAY, f"it has no {column.name}")
        if column.role == REFERENCES:
            values = value if isinstance(value, list) else [value]
            references += [to_stored(array_of(column, value), sides) for value in values]
        else:
            by_role[column.role] = to_stored(array_of(column, value), sides)
    if MASK in by_role:
        flags = as_float32(by_role[MASK])
        if not ((flags == 0) | (flags == 1)).all():
            raise RejectedError(Code.OTHER_SHAPE, "its mask has values other than 0 and 1")
        by_role[MASK] = flags.astype("|u1")
    members = {MEMBERS[role]: array for role, array in by_role.items() if role in MEMBERS}
    if LATENT in by_role:
        members[LATENT_NPY] = by_role[LATENT]
    elif MEAN_STD in by_role:
        members[LATENT_NPY] = std_to_logvar(by_role[MEAN_STD])
    elif MEAN in by_role:
        mean, logvar = by_role[MEAN], by_role[LOGVAR]
        if (mean.dtype, mean.shape) != (logvar.dtype, logvar.shape):
            said = (f"{field_dtype(array)} {array.shape}" for array in (mean, logvar))
            raise RejectedError(Code.OTHER_SHAPE, "mean is {}, logvar {}".format(*said))
        members[LATENT_NPY] = np.concatenate([mean, logvar])
    names = [image_name(REFERENCES, number) for number in range(len(references))]
    check_names(names)
    return members | {f"{name}.npy": array for name, array in zip(names, references, strict=True)}


def settle_plan(
    chosen: ImportPlan,
    rows: Iterable[Row],
    *,
    options: ImportOptions,
    sizes: tuple[Size, ...],
    what: str,
) -> ImportPlan:
    """Return the plan of an import, as the first rows demand.

    `sizes` are those of the images, if latents have several shapes. Raise SourceError or UsageError
    if no row can be imported, or if their arrays do not fit into one dataset. `what` names the file
    in these errors.
    """
    if (chosen.of(MEAN) is None) != (chosen.of(LOGVAR) is None):
        raise SourceError(
            f"{what} has mean or logvar without the other: give a column of latents, as --columns "
            "latent=NAME"
        )
    if chosen.of(REFERENCES) and not chosen.of(LATENT):
        raise UsageError(f"{what} has references (source): give their targets, as latent=NAME")
    sound: list[Arrays] = []
    looked, why = 0, ""
    for _, source, values in rows:
        arrays: Arrays | Reject
        if isinstance(values, Reject):
            arrays = values
        elif (looked := looked + 1) > LOOKED_AT:
            break
        else:
            arrays = make_or_refuse(source, partial(arrays_in, chosen, values))
        if isinstance(arrays, Reject):
            why = why or arrays.detail
        else:
            sound.append(arrays)
    if not sound:
        why = why or "it has no rows"
        raise SourceError(f"none of the first rows of {what} can be imported ({why})")
    try:
        fields = _fields_of(chosen, sound, options=options, sizes=sizes, what=what)
    except FormatError as error:
        raise SourceError(f"{what}: {error}") from error
    return replace(chosen, fields=fields)


def _fields_of(
    chosen: ImportPlan,
    sound: Sequence[Arrays],
    *,
    options: ImportOptions,
    sizes: tuple[Size, ...],
    what: str,
) -> tuple[Field, ...]:
    """Return the fields of a dataset whose first samples have these arrays.

    Raise FormatError, SourceError or UsageError if they do not fit into one dataset.
    """
    names = [n for n in (LATENT_NPY, *MEMBERS.values()) if n in sound[0]]
    fields = [_field(name, sound, options.text_length) for name in names]
    if sizes:  # the layout is that of the square
        side = options.resolution // _cell(sound, sizes, what)
        fields[0] = replace(fields[0], shape=(fields[0].shape[0], side, side))
    has_references = any(f"{REFERENCES}.npy" in arrays for arrays in sound)
    if chosen.of(REFERENCES) and (has_references or options.columns):
        fields.insert(1, replace(fields[0], name=f"{REFERENCES}.npy", is_of_role=True))
    fields.sort(key=lambda field: field.is_variable)
    if fields[-1].is_variable:  # lengths tell what a mask does
        fields = [field for field in fields if field.name != MASK_NPY]
    latent = fields[0]
    if latent.name == LATENT_NPY and len(latent.shape) != LATENT_SIDES:
        raise SourceError(f"latents of {latent} in {what} are not channels of rows of cells")
    if latent.name == LATENT_NPY and latent.shape[1] != latent.shape[2]:
        raise SourceError(
            f"latents of {latent} in {what} are not squares: give the sizes of its images, as "
            "by --shapes sdxl"
        )
    layout(fields)
    return tuple(fields)


def _cell(sound: Sequence[Arrays], sizes: Sequence[Size], what: str) -> int:
    """Return the side of a cell, in pixels, with which most latents have one of the sizes.

    Raise UsageError if there is no such side, or if there are no latents.
    """
    shapes = [arrays[LATENT_NPY].shape for arrays in sound if LATENT_NPY in arrays]
    if not shapes:
        raise UsageError(f"{what} holds text alone, which has no shapes: leave out --shapes")
    counts: Counter[int] = Counter()
    for _, high, wide in (shape for shape in shapes if len(shape) == LATENT_SIDES):
        alike = (width for width, height in sizes if width * high == height * wide)
        counts.update(width // wide for width in alike if width % wide == 0)
    whole = [cell for cell in counts if not any(side % cell for size in sizes for side in size)]
    if not whole:
        first = " x ".join(map(str, shapes[0]))
        raise UsageError(
            f"latents of {first} in {what} fit no size in --shapes, whatever the pixels per cell: "
            "give the sizes that its images had"
        )
    return max(whole, key=lambda cell: (counts[cell], -cell))


def size_of(latent: Array | None, settings: Mapping[str, Any]) -> Size:
    """Return the width and height in pixels of the image of a latent, or (0, 0) without latents."""
    field, *_ = fields_of(settings["layout"])
    if latent is None or latent.ndim != LATENT_SIDES:
        return 0, 0
    cell = settings["resolution"] // field.shape[-1]
    return latent.shape[2] * cell, latent.shape[1] * cell


def sizes_in_roles(arrays: Arrays, settings: Mapping[str, Any]) -> dict[str, Size]:
    """Return the width and height in pixels of each reference of a sample, by its name.

    Raise RejectedError if the dataset has no place for references.
    """
    names = names_in_roles(arrays, [REFERENCES])
    if names and not roles_of(settings):
        raise RejectedError(
            Code.OTHER_SHAPE,
            "it has references, and the first samples have none: import them apart, or name all "
            "columns, as --columns latent=NAME,source=NAME",
        )
    return {name: size_of(arrays[f"{name}.npy"], settings) for name in names}


def _field(name: str, sound: Sequence[Arrays], text_length: int) -> Field:
    first = sound[0][name]
    field = Field(name=name, dtype=field_dtype(first), shape=first.shape)
    if name != MEMBERS[EMB] or first.ndim != SIDES[EMB]:
        return field
    lengths = {len(arrays[name]) for arrays in sound}
    masks = {arrays[MASK_NPY].shape[-1] for arrays in sound if MASK_NPY in arrays}
    most = text_length or (masks.pop() if len(masks) == 1 else 0)
    if lengths == {most} or (len(lengths) == 1 and not most):
        return field
    if max(lengths) > most:
        raise UsageError(
            f"{name} is {min(lengths)} to {max(lengths)} tokens long: give --text-length, the most "
            f"that any caption has, such as {max(lengths)}"
        )
    return replace(field, shape=(most, *first.shape[1:]), is_variable=True)


def resolution_of(plan: ImportPlan, asked: int, what: str) -> int:
    """Return the resolution of the images: the one asked for, or the one in the name of the column.

    Raise UsageError if there is neither, if they differ, or if the resolution is no multiple of the
    cells per side of latents.
    """
    column, first = plan.of(LATENT), plan.fields[0]
    named = column.resolution if column else 0
    if column and asked and named and asked != named:
        raise UsageError(
            f"{what} has {column.name}, which is for resolution {named}: give --resolution "
            f"{named} instead of {asked}, or choose another column with --columns"
        )
    resolution, side, has_latents = asked or named, first.shape[-1], first.name == LATENT_NPY
    if not resolution:
        such_as = f", such as {side * CELL} if each of the {side} cells per side is {CELL} pixels"
        raise UsageError(
            f"{what} does not state how many pixels its images had: give --resolution"
            f"{such_as if has_latents else ', which names the folder of its text'}"
        )
    if has_latents and resolution % side:
        raise UsageError(
            f"--resolution {resolution} is not a multiple of {side}, the cells per side of "
            f"{first}: give the pixels per side that its images had"
        )
    return resolution


def settings_of(
    plan: ImportPlan, cache: LatentCache, options: ImportOptions, *, sizes: tuple[Size, ...]
) -> dict[str, Any]:
    """Return the settings of the dataset, as far as they are known.

    They do not say how the latents were made, but how a loader has to scale moments.
    """
    names = {field.name for field in plan.fields}
    has_moments = plan.of(MEAN) is not None or plan.of(MEAN_STD) is not None
    latents = "none" if LATENT_NPY not in names else "moments" if has_moments else GIVEN
    settings = {
        "columns": {column.role: column.name for column in plan.columns},
        "latents": latents,
        "layout": layout(plan.fields),
        "resolution": resolution_of(plan, options.resolution, cache.url),
        "source": cache.kind,
        "text": "emb" if MEMBERS[EMB] in names else "none",
        **cache.settings,
    }
    if any(field.is_of_role for field in plan.fields):
        settings |= {"roles": [TARGET, REFERENCES], "role_sizes": {REFERENCES: GIVEN}}
    if sizes:
        settings["shapes"] = list(map(list, sizes))
    if options.caption_col:
        settings["caption_col"] = options.caption_col
    if has_moments:
        scale = plan.scale if options.scale is None else options.scale
        shift = plan.shift if options.shift is None else options.shift
        if not scale:
            raise UsageError(
                "a loader scales latents that it draws from means and variances: give --scale and "
                "--shift of the VAE, 0.3611 and 0.1159 for Flux.1, 0.18215 and 0 for SD"
            )
        settings |= {"scale": scale, "shift": shift}
    elif options.scale is not None or options.shift is not None:
        raise UsageError(
            "--scale and --shift are for means and variances, and this cache has latents, which "
            "are used as they are: leave both out"
        )
    return settings


ZEROS = "zeros"


def empty_of(places: str, fields: Sequence[Field]) -> dict[str, bytes]:
    """Return the arrays of the empty caption that the user gives, by their member, or none.

    `places` are `zeros`, or files: `emb=t5_empty.npy,pooled=clip_empty.npy`. Raise UsageError if
    these are not the arrays of text in `fields`, and SourceError if an array does not fit its
    field.
    """
    wanted = {field.name.removesuffix(".npy"): field for field in text_fields(fields)}
    if not places:
        return {}
    if places == ZEROS:
        first = [field.of_length(1) if field.is_variable else field for field in wanted.values()]
        return {field.name: field.header + bytes(field.array_nbytes) for field in first}
    pairs = (part.strip().partition("=") for part in places.split(",") if part.strip())
    files = {role: path for role, _, path in pairs}
    if files.keys() != wanted.keys():
        roles = ",".join(f"{role}=FILE" for role in sorted(wanted))
        raise UsageError(f"--empty {places}: give {roles or 'none, as there is no text'}, or zeros")
    arrays: dict[str, bytes] = {}
    for role, field in wanted.items():
        store, name = split_url(files[role])
        column, data = CachedColumn(role=role, name=files[role]), store.read(name)
        try:
            arrays[field.name] = npy_of(field, to_stored(array_of(column, data), SIDES[role]))
        except RejectedError as refused:
            raise SourceError(
                f"{files[role]} cannot be the array of an empty caption ({refused.detail})"
            ) from refused
    return arrays
