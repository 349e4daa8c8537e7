"""What trainers call the columns of their caches, and what each is to us: one table."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from wdsprep.errors import SourceError, UsageError
from wdsprep.text import columns as listed
from wdsprep.text import one_of

LATENT, MEAN, LOGVAR, MEAN_STD = "latent", "mean", "logvar", "mean_std"
EMB, POOLED, MASK = "emb", "pooled", "mask"
TEXT = (EMB, POOLED, MASK)
ROLES = (LATENT, MEAN, LOGVAR, MEAN_STD, *TEXT)
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
"""The dtypes that arrays may have, and the bytes of a value."""
ANY = -1
"""A side that the number of bytes tells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedColumn:
    """A column of a cache.

    `dtype` and `shape` are for columns of bare bytes. `resolution` is that of the images, where
    the name tells it.
    """

    role: str
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    resolution: int = 0

    def sides(self, nbytes: int) -> tuple[int, ...]:
        """Return the shape of so many bytes. Raise an error where they do not fit."""
        width = DTYPES[self.dtype]
        fixed = width * prod(side for side in self.shape if side != ANY)
        rest, over = divmod(nbytes, fixed) if fixed else (0, 0)
        if over or not rest or (ANY not in self.shape and rest != 1):
            shown = " x ".join("any" if side == ANY else str(side) for side in self.shape)
            raise ValueError(f"{nbytes:,} bytes are not {self.dtype} of {shown}")
        return tuple(rest if side == ANY else side for side in self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The names that one trainer gives its columns: a pattern for each role.

    `scale` and `shift` are those of the VAE that it is for, where that is certain. A trainer is
    recognised by all of its columns together.
    """

    trainer: str
    patterns: Mapping[str, str]
    dtype: str = ""
    """The dtype of bare bytes."""
    scale: float = 0.0
    shift: float = 0.0


TRAINERS = (
    Names(
        trainer="mosaicml/diffusion, micro_diffusion",
        patterns={LATENT: r"latents_(?P<pixels>[1-9][0-9]{0,4})", EMB: "caption_latents"},
        dtype="float16",
    ),
    Names(
        trainer="PRX",
        patterns={
            MEAN_STD: "img_latent",
            EMB: r"latent_.+",
            MASK: r"attention_mask_.+",
            POOLED: "pooled",
        },
    ),
    Names(
        trainer="MLPerf Flux.1, torchtitan",
        patterns={EMB: "t5_encodings", POOLED: "clip_encodings", MEAN: MEAN, LOGVAR: LOGVAR},
        scale=0.3611,
        shift=0.1159,
    ),
    Names(
        trainer="Primus",
        patterns={
            LATENT: r"latents\.pth",
            MEAN: r"mean\.pth",
            LOGVAR: r"logvar\.pth",
            EMB: r"prompt_embeds\.pth",
            POOLED: r"pooled_prompt_embeds\.pth",
        },
    ),
    Names(trainer="Sana", patterns={LATENT: "npy"}),
    Names(
        trainer="others",
        patterns={
            LATENT: r"(image_|vae_|img_)?latents?(\.npy|\.pth|\.pt)?",
            EMB: r"(prompt|text|caption)_emb(ed(ding)?)?s?(\.npy|\.pth|\.pt)?|emb(\.npy)?",
            POOLED: r"pooled(_prompt_embeds)?(\.npy|\.pth|\.pt)?",
            MASK: r"(prompt_|text_)?(attention_)?mask(\.npy|\.pth|\.pt)?",
            MEAN: MEAN,
            LOGVAR: LOGVAR,
        },
    ),
)
"""The first of them that knows a column of latents, or else one of text, is the one."""
CAPTION_TOKENS, CELL = 77, 8
"""Numbers that bare bytes do not say: tokens of a caption of CLIP, and pixels a side of a cell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The columns to take, by their roles, and who calls them so."""

    columns: tuple[CachedColumn, ...]
    scale: float = 0.0
    shift: float = 0.0

    def of(self, role: str) -> CachedColumn | None:
        return next((column for column in self.columns if column.role == role), None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


def parse_columns(text: str) -> tuple[CachedColumn, ...]:
    """`latent=z:float16:4x32x32,emb=t5`: of each role a column, and of bare bytes what they are."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        role, equals, said = part.partition("=")
        name, dtype, sides = (*said.split(":"), "", "")[:3]
        if not equals or not name or said.count(":") > 2:
            raise UsageError(
                f"{part!r}: write ROLE=NAME, as latent=z, or latent=z:float16:4x32x32 of bare bytes"
            )
        one_of(ROLES, columns=role)
        if dtype:
            one_of(tuple(DTYPES), columns=dtype)
        if not re.fullmatch(r"(\d+(x\d+)*)?", sides) or bool(dtype) != bool(sides):
            raise UsageError(f"{part!r}: the shape of bare bytes is written as float16:4x32x32")
        shape = tuple(int(side) for side in sides.split("x")) if sides else ()
        found.append(CachedColumn(role=role, name=name, dtype=dtype, shape=shape))
    return tuple(found)


def choose(
    there: Sequence[str], asked: Sequence[CachedColumn], *, resolution: int, what: str
) -> Chosen:
    """Choose the columns to take. Raise an error that lists the columns where none is known."""
    for column in asked:
        if column.name not in there:
            raise UsageError(
                f"{what} has no column {column.name!r} (--columns): it has {listed(there)}"
            )
    if asked:
        return Chosen(columns=tuple(asked))
    for roles in ((LATENT, MEAN, MEAN_STD), (EMB,)):
        for names in TRAINERS:
            found = dict(_found(names, there, resolution, what))
            is_whole = len(found) == len(names.patterns)
            if any(role in found for role in roles) and (is_whole or not names.scale):
                return _settled(names, found)
    raise SourceError(
        f"{what} has no column that is known to hold latents or text: it has {listed(there)}; "
        "name them, as --columns latent=NAME,emb=NAME"
    )


def _found(
    names: Names, there: Sequence[str], resolution: int, what: str
) -> Iterable[tuple[str, CachedColumn]]:
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
            raise UsageError(f"{what} has {several}: say which are meant, as by {way}")
        for match in matches:
            pixels_said = int(match.groupdict().get("pixels") or 0)
            found = CachedColumn(role=role, name=match[0], resolution=pixels_said)
            if role == EMB:
                suffix = match[0].partition("_")[2] if names.trainer == "PRX" else ""
            yield role, _bare(names, found)


def _bare(names: Names, column: CachedColumn) -> CachedColumn:
    """Add dtype and shape to a column of bare bytes, which do not tell them."""
    if not names.dtype:
        return column
    cells = column.resolution // CELL
    shape = (CAPTION_TOKENS, ANY) if column.role == EMB else (ANY, cells, cells)
    return replace(column, dtype=names.dtype, shape=shape)


def _settled(names: Names, found: Mapping[str, CachedColumn]) -> Chosen:
    """Latents go before their mean and variance, where there are both."""
    moments = (MEAN, LOGVAR)
    kept = [c for role, c in found.items() if LATENT not in found or role not in moments]
    return Chosen(columns=tuple(kept), scale=names.scale, shift=names.shift)
