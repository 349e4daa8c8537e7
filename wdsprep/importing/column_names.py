"""The names that trainers give the columns of their caches, and the role of each."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from wdsprep.errors import SourceError, UsageError
from wdsprep.text import check_one_of, list_columns

LATENT, MEAN, LOGVAR, MEAN_STD = "latent", "mean", "logvar", "mean_std"
REFERENCES = "source"
EMB, POOLED, MASK = "emb", "pooled", "emb_mask"
TEXT = (EMB, POOLED, MASK)
ROLES = (LATENT, MEAN, LOGVAR, MEAN_STD, REFERENCES, *TEXT)
DTYPES = {
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "uint16": 2,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
"""The dtypes that arrays may have, with the bytes of a value."""
ANY = -1
"""A side whose length follows from the number of bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedColumn:
    """A column of a cache.

    `dtype` and `shape` are for columns of bare bytes. `resolution` is the one of the images, if the
    name of the column states it.
    """

    role: str
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    resolution: int = 0

    def sides(self, nbytes: int) -> tuple[int, ...]:
        """Return the shape of an array of `nbytes`. Raise ValueError if none fits."""
        width = DTYPES[self.dtype]
        fixed = width * prod(side for side in self.shape if side != ANY)
        rest, over = divmod(nbytes, fixed) if fixed else (0, 0)
        if over or not rest or (ANY not in self.shape and rest != 1):
            shown = " x ".join("any" if side == ANY else str(side) for side in self.shape)
            raise ValueError(f"{nbytes:,} bytes are not {self.dtype} of {shown}")
        return tuple(rest if side == ANY else side for side in self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerNames:
    """The names that one trainer gives its columns: a pattern for each role.

    `scale` and `shift` are those of its VAE, if that is certain; then a trainer is recognised by
    all of its columns together.
    """

    trainer: str
    patterns: Mapping[str, str]
    dtype: str = ""
    """The dtype of bare bytes."""
    scale: float = 0.0
    shift: float = 0.0


TRAINERS = (
    TrainerNames(
        trainer="mosaicml/diffusion, micro_diffusion",
        patterns={LATENT: r"latents_(?P<pixels>[1-9][0-9]{0,4})", EMB: "caption_latents"},
        dtype="float16",
    ),
    TrainerNames(
        trainer="PRX",
        patterns={
            MEAN_STD: "img_latent",
            EMB: r"latent_.+",
            MASK: r"attention_mask_.+",
            POOLED: "pooled",
        },
    ),
    TrainerNames(
        trainer="MLPerf Flux.1, torchtitan",
        patterns={EMB: "t5_encodings", POOLED: "clip_encodings", MEAN: MEAN, LOGVAR: LOGVAR},
        scale=0.3611,
        shift=0.1159,
    ),
    TrainerNames(
        trainer="Primus",
        patterns={
            LATENT: r"latents\.pth",
            MEAN: r"mean\.pth",
            LOGVAR: r"logvar\.pth",
            EMB: r"prompt_embeds\.pth",
            POOLED: r"pooled_prompt_embeds\.pth",
        },
    ),
    TrainerNames(trainer="Sana", patterns={LATENT: "npy"}),
    TrainerNames(
        trainer="others",
        patterns={
            LATENT: r"(image_|vae_|img_|target_)?latents?(\.npy|\.pth|\.pt)?",
            REFERENCES: "latents_control|context_latents",
            EMB: r"(prompt|text|caption)_emb(ed(ding)?)?s?(\.npy|\.pth|\.pt)?|emb(\.npy)?"
            "|t5_vec|ctx_vec|varlen_(vl|llm)_embed",
            POOLED: r"pooled(_prompt_embeds)?(\.npy|\.pth|\.pt)?|clip_l_pooler",
            MASK: r"(prompt_|text_|emb_)?(attention_)?mask(\.npy|\.pth|\.pt)?",
            MEAN: MEAN,
            LOGVAR: LOGVAR,
        },
    ),
)
"""The known trainers. The first that knows a column of latents is taken, or else one of text."""
CAPTION_TOKENS, CELL = 77, 8
"""Sizes that bare bytes do not state: tokens of a CLIP caption, and pixels of a cell's side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenColumns:
    """The columns to import, with the scale and shift of the trainer that names them so."""

    columns: tuple[CachedColumn, ...]
    scale: float = 0.0
    shift: float = 0.0
    is_asked: bool = False
    """True if the user named the columns."""

    def of(self, role: str) -> CachedColumn | None:
        """Return the column with a role, or None if there is none."""
        return next((column for column in self.columns if column.role == role), None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


def parse_columns(text: str) -> tuple[CachedColumn, ...]:
    """Parse columns such as `latent=z:float16:4x32x32,emb=t5`: a role and a name each.

    Columns of bare bytes have a dtype and a shape too.
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        role, equals, said = part.partition("=")
        name, dtype, sides = (*said.split(":"), "", "")[:3]
        if not equals or not name or said.count(":") > 2:
            raise UsageError(
                f"--columns {part!r}: write ROLE=NAME, as latent=z, or latent=z:float16:4x32x32 if "
                "it holds bare bytes"
            )
        check_one_of(ROLES, columns=role)
        if dtype:
            check_one_of(tuple(DTYPES), columns=dtype)
        if not re.fullmatch(r"(\d+(x\d+)*)?", sides) or bool(dtype) != bool(sides):
            raise UsageError(
                f"--columns {part!r}: the shape of bare bytes is written as float16:4x32x32"
            )
        shape = tuple(int(side) for side in sides.split("x")) if sides else ()
        found.append(CachedColumn(role=role, name=name, dtype=dtype, shape=shape))
    return tuple(found)


def choose_columns(
    there: Sequence[str], asked: Sequence[CachedColumn], *, resolution: int, what: str
) -> ChosenColumns:
    """Return the columns to import: those in `asked`, or those of the first trainer that fits.

    `there` are the names of all columns, and `what` names the file in errors. Raise UsageError if a
    column in `asked` is missing, and SourceError if no trainer fits.
    """
    for column in asked:
        if column.name not in there:
            raise UsageError(
                f"{what} has no column {column.name!r} (--columns): it has {list_columns(there)}"
            )
    if asked:
        return ChosenColumns(columns=tuple(asked), is_asked=True)
    for roles in ((LATENT, MEAN, MEAN_STD), (EMB,)):
        for names in TRAINERS:
            found = dict(_match_columns(names, there, resolution, what))
            is_whole = len(found) == len(names.patterns)
            if any(role in found for role in roles) and (is_whole or not names.scale):
                return _prefer_latents(names, found)
    raise SourceError(
        f"{what} has no column that is known to hold latents or text: it has "
        f"{list_columns(there)}; give them, as --columns latent=NAME,emb=NAME"
    )


def _match_columns(
    names: TrainerNames, there: Sequence[str], resolution: int, what: str
) -> Iterable[tuple[str, CachedColumn]]:
    """Yield the role and the column of each name in `there` that a trainer uses.

    Raise UsageError if several columns have the same role.
    """
    suffix = ""
    for role, pattern in names.patterns.items():
        matches = [m for m in (re.fullmatch(pattern, name) for name in there) if m]
        if role == LATENT and resolution and len(matches) > 1:
            matches = [m for m in matches if m.groupdict().get("pixels") == str(resolution)]
        if role == MASK and suffix:
            matches = [m for m in matches if m[0].endswith(suffix)]
        if len(matches) > 1:
            several = ", ".join(match[0] for match in matches)
            one = f"--columns {role}={matches[0][0]}"
            pixels = [match.groupdict().get("pixels") for match in matches]
            way = f"--resolution {pixels[0]}" if role == LATENT and all(pixels) else one
            raise UsageError(f"{what} has {several}: choose one of them, as by {way}")
        for match in matches:
            pixels_said = int(match.groupdict().get("pixels") or 0)
            found = CachedColumn(role=role, name=match[0], resolution=pixels_said)
            if role == EMB:
                suffix = match[0].partition("_")[2] if names.trainer == "PRX" else ""
            yield role, _with_dtype(names, found)


def _with_dtype(names: TrainerNames, column: CachedColumn) -> CachedColumn:
    """Return a column with the dtype and shape of its bare bytes, which the bytes do not state.

    The column stays as it is if its trainer has no bare bytes.
    """
    if not names.dtype:
        return column
    cells = column.resolution // CELL
    shape = (CAPTION_TOKENS, ANY) if column.role == EMB else (ANY, cells, cells)
    return replace(column, dtype=names.dtype, shape=shape)


def _prefer_latents(names: TrainerNames, found: Mapping[str, CachedColumn]) -> ChosenColumns:
    """Return the columns of a trainer, without mean and logvar if there are latents too."""
    moments = (MEAN, LOGVAR)
    kept = [c for role, c in found.items() if LATENT not in found or role not in moments]
    return ChosenColumns(columns=tuple(kept), scale=names.scale, shift=names.shift)
