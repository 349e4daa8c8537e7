"""What every sample of a cache will be here, settled by its first rows: columns, arrays, settings.

All samples of a dataset have arrays of one dtype and shape, so what the first rows have is what all
have to have; a sample that differs is a reject. One array of text may be as long as its caption is,
up to the length of its mask or of `--text-length`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wdsprep.dataset.arrays import EMB as EMB_NPY
from wdsprep.dataset.arrays import LATENT as LATENT_NPY
from wdsprep.dataset.arrays import MASK as MASK_NPY
from wdsprep.dataset.arrays import POOLED as POOLED_NPY
from wdsprep.dataset.arrays import Field, is_finite, layout
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.errors import FormatError, SourceError, UsageError
from wdsprep.importing.arrays import BITS, array_of, npy_of, one_behind_other, stored, with_logvar
from wdsprep.importing.names import (
    CELL,
    EMB,
    LATENT,
    LOGVAR,
    MASK,
    MEAN,
    MEAN_STD,
    POOLED,
    Chosen,
)
from wdsprep.sources.tables import RawArray

LOOKED_AT = 64
"""Rows that settle it."""
SIDES = {LATENT: 3, MEAN: 3, LOGVAR: 3, MEAN_STD: 3, EMB: 2, POOLED: 1, MASK: 1}
"""How many sides the array of a role has, without that of a batch."""
MEMBERS = {EMB: EMB_NPY, POOLED: POOLED_NPY, MASK: MASK_NPY}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportPlan:
    """What is taken of each row, and what it becomes."""

    chosen: Chosen
    fields: tuple[Field, ...]
    bits: tuple[str, ...] = ()
    """The columns whose whole numbers are the bits of bfloat16."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.chosen.names

    def members(self, columns: Mapping[str, Any]) -> list[tuple[str, bytes]]:
        """The arrays of a sample; refused where it lacks one, or has another."""
        arrays = arrays_in(self.chosen, columns)
        members = []
        for field in self.fields:
            raw = arrays[field.name]
            data = npy_of(field, raw)
            if not is_finite(field.dtype, raw.data):
                raise RejectedError(Code.NOT_FINITE, f"{field.name} has values that are not")
            members.append((field.name, data))
        return members


def arrays_in(chosen: Chosen, columns: Mapping[str, Any]) -> dict[str, RawArray]:
    """The arrays of a sample by the names that members have here."""
    found: dict[str, RawArray] = {}
    for column in chosen.columns:
        value = columns.get(column.name)
        if value is None:
            raise RejectedError(Code.NO_ARRAY, f"it has no {column.name}")
        found[column.role] = stored(array_of(column, value), SIDES[column.role])
    members = {MEMBERS[role]: raw for role, raw in found.items() if role in MEMBERS}
    if LATENT in found:
        members[LATENT_NPY] = found[LATENT]
    elif MEAN_STD in found:
        members[LATENT_NPY] = with_logvar(found[MEAN_STD])
    elif MEAN in found:
        members[LATENT_NPY] = one_behind_other(found[MEAN], found[LOGVAR])
    return members


def settle_plan(
    chosen: Chosen, rows: Iterable[Mapping[str, Any]], *, text_length: int, what: str
) -> ImportPlan:
    """By the first rows, of which one at least has to be sound."""
    if (chosen.of(MEAN) is None) != (chosen.of(LOGVAR) is None):
        raise SourceError(
            f"{what} has mean or logvar without the other: name a column of latents, as --columns "
            "latent=NAME"
        )
    sound: list[dict[str, RawArray]] = []
    refused: RejectedError | None = None
    bits: tuple[str, ...] = ()
    for columns in rows:
        try:
            sound.append(arrays_in(chosen, columns))
            bits = bits or _bits(chosen, columns)
        except RejectedError as error:
            refused = refused or error
    if not sound:
        why = refused.detail if refused else "it holds no rows"
        raise SourceError(f"{what}: none of its first rows can be taken: {why}")
    names = [n for n in (LATENT_NPY, *MEMBERS.values()) if n in sound[0]]
    fields = [_field(name, sound, text_length) for name in names]
    fields.sort(key=lambda field: field.is_variable)
    if fields[-1].is_variable:  # lengths tell what a mask does
        fields = [field for field in fields if field.name != MASK_NPY]
    _check(fields, what)
    return ImportPlan(chosen=chosen, fields=tuple(fields), bits=bits)


def _bits(chosen: Chosen, columns: Mapping[str, Any]) -> tuple[str, ...]:
    arrays = ((column.name, array_of(column, columns[column.name])) for column in chosen.columns)
    return tuple(name for name, array in arrays if array.dtype == BITS)


def _field(name: str, sound: Sequence[Mapping[str, RawArray]], text_length: int) -> Field:
    first = sound[0][name]
    field = Field(name=name, dtype=first.dtype, shape=first.shape)
    if name != MEMBERS[EMB] or len(first.shape) != SIDES[EMB]:
        return field
    lengths = {len(arrays[name].shape) and arrays[name].shape[0] for arrays in sound}
    most = text_length or max(_mask_length(arrays) for arrays in sound)
    if lengths == {most} or (len(lengths) == 1 and not most):
        return field
    if not most:
        raise UsageError(
            f"{name} is {min(lengths)} to {max(lengths)} tokens long: give --text-length, the most "
            "that any caption has"
        )
    if max(lengths) > most:
        raise UsageError(f"{name} has {max(lengths)} tokens, more than --text-length {most}")
    shape = (most, *first.shape[1:])
    return Field(name=name, dtype=first.dtype, shape=shape, is_variable=True)


def _mask_length(arrays: Mapping[str, RawArray]) -> int:
    mask = arrays.get(MASK_NPY)
    return mask.shape[-1] if mask and mask.shape else 0


def _check(fields: Sequence[Field], what: str) -> None:
    for field in fields:
        if field.name == LATENT_NPY and (len(field.shape) != 3 or 0 in field.shape):
            raise SourceError(f"{what}: latents of {field} are no channels of cells")
        if field.name == LATENT_NPY and field.shape[1] != field.shape[2]:
            raise SourceError(
                f"{what}: latents of {field} are no squares, and only squares of one size are "
                "taken in: wdsprep encode --shapes makes others of the images themselves"
            )
    try:
        layout(fields)
    except FormatError as error:
        raise SourceError(f"{what}: {error}") from error


def resolution_of(plan: ImportPlan, given: int, what: str) -> int:
    """The pixels a side of the images: as given, or as the name of the column says."""
    column = plan.chosen.of(LATENT)
    named = column.resolution if column else 0
    if given and named and given != named:
        raise UsageError(f"{what} has {column.name if column else ''}, not --resolution {given}")
    if resolution := given or named:
        side = plan.fields[0].shape[-1]
        if plan.fields[0].name == LATENT_NPY and resolution % side:
            raise UsageError(
                f"--resolution {resolution} is no whole number of pixels for each of the {side} "
                f"cells a side of {plan.fields[0]}"
            )
        return resolution
    if plan.fields[0].name != LATENT_NPY:
        raise UsageError(f"{what} holds text alone: give --resolution, which names its folder")
    side = plan.fields[0].shape[-1]
    raise UsageError(
        f"nothing in {what} says of how many pixels its images were: give --resolution, such as "
        f"{side * CELL} where each of the {side} cells a side is {CELL} pixels"
    )


def settings_of(
    plan: ImportPlan,
    *,
    form: Mapping[str, Any],
    kind: str,
    resolution: int,
    scale: float | None,
    shift: float | None,
) -> dict[str, Any]:
    """What is known of the dataset. How its latents were made is not, but for moments, of which a
    loader has to know how they are scaled."""
    chosen = plan.chosen
    names = {field.name for field in plan.fields}
    has_moments = chosen.of(MEAN) is not None or chosen.of(MEAN_STD) is not None
    latents = "none" if LATENT_NPY not in names else "moments" if has_moments else "given"
    settings = {
        **form,
        "columns": {column.role: column.name for column in chosen.columns},
        "latents": latents,
        "layout": layout(plan.fields),
        "resolution": resolution,
        "source": kind,
        "text": "emb" if MEMBERS[EMB] in names else "none",
    }
    if has_moments:
        settings |= _scaling(chosen, scale, shift)
    elif scale is not None or shift is not None:
        raise UsageError(
            "--scale and --shift are for means and variances, of which a loader makes latents: "
            "latents are taken as they are"
        )
    return settings


def _scaling(chosen: Chosen, scale: float | None, shift: float | None) -> dict[str, float]:
    """Those of the VAE: caches hold what it gave, and trainers scale."""
    known = scale if scale is not None else chosen.scale
    if not known:
        raise UsageError(
            "give --scale and --shift of the VAE, by which a loader makes latents of its means and "
            "variances: 0.3611 and 0.1159 of Flux.1, 0.18215 and 0 of SD"
        )
    return {"scale": known, "shift": chosen.shift if shift is None else shift}
