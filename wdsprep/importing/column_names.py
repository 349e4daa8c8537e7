"""The names that trainers give the columns of their caches, and the role of each.

They are those that `import` knows, and those that `export` writes for musubi-tuner, Primus and
MLPerf. The plan of an import says which columns it takes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from wdsprep.dataset.npy_arrays import BFLOAT16, Field
from wdsprep.errors import SourceError, UsageError
from wdsprep.text import check_one_of, list_columns

LATENT, MEAN, LOGVAR, MEAN_STD = "latent", "mean", "logvar", "mean_std"
REFERENCES = "source"
EMB, POOLED, MASK = "emb", "pooled", "emb_mask"
TEXT = (EMB, POOLED, MASK)
ROLES = (LATENT, MEAN, LOGVAR, MEAN_STD, REFERENCES, *TEXT)
SAFETENSORS = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    BFLOAT16: "BF16",
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
}
"""The dtypes that arrays may have, and what safetensors calls them."""
ANY = -1
"""A side whose length follows from the number of bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedColumn:
    """A column of a cache.

    `dtype` and `shape` are for columns of bare bytes; one side may be ANY. `resolution` is the one
    of the images, if the name of the column states it.
    """

    role: str
    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    resolution: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportPlan:
    """The columns to import from each row, and the fields that they become.

    `scale` and `shift` are of the VAE of the trainer whose names of columns were recognised, or 0
    where a user gave the names. `fields` are found later, in the first samples.
    """

    columns: tuple[CachedColumn, ...]
    scale: float = 0.0
    shift: float = 0.0
    fields: tuple[Field, ...] = ()

    def of(self, role: str) -> CachedColumn | None:
        """Return the column with a role, or None if there is none."""
        return next((column for column in self.columns if column.role == role), None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


class MusubiFamily(NamedTuple):
    """A kind of model, by the names that musubi-tuner gives it in names of files and arrays."""

    short: str
    name: str
    pipelines: tuple[str, ...]
    """The pipelines with its latents; what is imported counts as of the last."""
    texts: Mapping[str, str]
    """Its names for arrays of text; an array of a name with `varlen` ends with its caption."""
    reference: str = ""
    """Its name for the latent of a reference, with a place for a number if it takes several."""
    frames: str = "1x"
    """What stands before the sides of a latent in the name of its array."""
    has_axis: bool = False
    """True if its latents have an axis for frames after that of channels."""


CONTROL = "latents_control"
_FLUX_2 = MusubiFamily("", "", (), {EMB: "ctx_vec"}, f"{CONTROL}_{{}}", frames="")
_KLEIN = _FLUX_2._replace(pipelines=("Flux2KleinPipeline",))
_QWEN = MusubiFamily("", "qwen_image", (), {EMB: "varlen_vl_embed"}, has_axis=True)
FAMILIES = (
    MusubiFamily(
        *("fk", "flux_kontext", ("FluxKontextPipeline",)),
        *({EMB: "t5_vec", POOLED: "clip_l_pooler"}, CONTROL),
    ),
    _FLUX_2._replace(short="f2d", name="flux_2_dev", pipelines=("Flux2Pipeline",)),
    _KLEIN._replace(short="f2k9b", name="flux_2_klein_9b"),
    _KLEIN._replace(short="f2k4b", name="flux_2_klein_4b"),
    _QWEN._replace(short="qi", pipelines=("QwenImagePipeline",)),
    _QWEN._replace(
        short="qie",
        pipelines=("QwenImageEditPipeline", "QwenImageEditPlusPipeline"),
        reference=_FLUX_2.reference,
    ),
    MusubiFamily("zi", "z_image", ("ZImagePipeline",), {EMB: "varlen_llm_embed"}),
)
"""The families of musubi-tuner, whose caches are exported and imported."""
_MUSUBI = {
    role: "|".join(dict.fromkeys(f.texts[role] for f in FAMILIES if role in f.texts))
    for role in (EMB, POOLED)
}
MLPERF = {EMB: "t5_encodings", POOLED: "clip_encodings", MEAN: MEAN, LOGVAR: LOGVAR}
PRIMUS = {
    LATENT: "latents.pth",
    MEAN: "mean.pth",
    LOGVAR: "logvar.pth",
    EMB: "prompt_embeds.pth",
    POOLED: "pooled_prompt_embeds.pth",
}
TRAINERS: Mapping[str, Mapping[str, str]] = {
    "mosaicml": {LATENT: r"latents_(?P<pixels>[1-9][0-9]{0,4})", EMB: "caption_latents"},
    "PRX": {
        MEAN_STD: "img_latent",
        EMB: r"latent_.+",
        MASK: r"attention_mask_.+",
        POOLED: "pooled",
    },
    "MLPerf": MLPERF,
    "Primus": {role: re.escape(name) for role, name in PRIMUS.items()},
    "Sana": {LATENT: "npy"},
    "others": {
        LATENT: r"(image_|vae_|img_|target_)?latents?(\.npy|\.pth|\.pt)?",
        REFERENCES: f"{CONTROL}|context_latents",
        EMB: r"(prompt|text|caption)_emb(ed(ding)?)?s?(\.npy|\.pth|\.pt)?|emb(\.npy)?|"
        + _MUSUBI[EMB],
        POOLED: r"pooled(_prompt_embeds)?(\.npy|\.pth|\.pt)?|" + _MUSUBI[POOLED],
        MASK: r"(prompt_|text_|emb_)?(attention_)?mask(\.npy|\.pth|\.pt)?",
        MEAN: MEAN,
        LOGVAR: LOGVAR,
    },
}
"""The names that each trainer gives its columns: a pattern for each role. The first trainer that
knows a column of latents is taken, or else one of text."""
FLUX_SCALE, FLUX_SHIFT = 0.3611, 0.1159
"""Those of the VAE of MLPerf's Flux.1, which is recognised by all of its columns together."""
COLUMN = re.compile(r"([^=]*)=([^:]+)(?::(\w+):(\d+(?:x\d+)*))?")
"""A column as `--columns` has it: a role and a name, and of bare bytes a dtype and sides."""
CAPTION_TOKENS, CELL = 77, 8
"""Sizes that bare bytes do not state: tokens of a CLIP caption, and pixels of a cell's side."""


def parse_columns(text: str) -> tuple[CachedColumn, ...]:
    """Parse columns such as `latent=z:float16:4x32x32,emb=t5`: a role and a name each.

    Columns of bare bytes have a dtype and a shape too.
    """
    columns = []
    for part in filter(None, map(str.strip, text.split(","))):
        if (match := COLUMN.fullmatch(part)) is None:
            raise UsageError(
                f"--columns {part!r}: write ROLE=NAME, as latent=z, or latent=z:float16:4x32x32 if "
                "it holds bare bytes"
            )
        role, name, dtype, sides = (group or "" for group in match.groups())
        check_one_of("--columns", role, ROLES)
        if dtype:
            check_one_of("--columns", dtype, tuple(SAFETENSORS))
        shape = tuple(map(int, filter(None, sides.split("x"))))
        columns.append(CachedColumn(role=role, name=name, dtype=dtype, shape=shape))
    return tuple(columns)


def choose_columns(
    there: Sequence[str], asked: Sequence[CachedColumn], *, resolution: int, what: str
) -> ImportPlan:
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
        return ImportPlan(columns=tuple(asked))
    for roles in ((LATENT, MEAN, MEAN_STD), (EMB,)):
        for trainer, patterns in TRAINERS.items():
            columns = dict(_match_columns(trainer, there, resolution, what))
            is_mlperf = trainer == "MLPerf" and len(columns) == len(patterns)
            if columns.keys().isdisjoint(roles) or (trainer == "MLPerf" and not is_mlperf):
                continue
            if LATENT in columns:  # mean and logvar beside them say the same
                columns = {role: c for role, c in columns.items() if role not in (MEAN, LOGVAR)}
            scale, shift = (FLUX_SCALE, FLUX_SHIFT) if is_mlperf else (0.0, 0.0)
            return ImportPlan(columns=tuple(columns.values()), scale=scale, shift=shift)
    raise SourceError(
        f"{what} has no column that is known to hold latents or text: it has "
        f"{list_columns(there)}; give them, as --columns latent=NAME,emb=NAME"
    )


def _match_columns(
    trainer: str, there: Sequence[str], resolution: int, what: str
) -> Iterable[tuple[str, CachedColumn]]:
    """Yield the role and the column of each name in `there` that a trainer uses.

    Raise UsageError if several columns have the same role.
    """
    suffix = ""
    for role, pattern in TRAINERS[trainer].items():
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
            column = CachedColumn(
                role=role, name=match[0], resolution=int(match.groupdict().get("pixels") or 0)
            )
            if role == EMB and trainer == "PRX":
                suffix = match[0].partition("_")[2]
            if trainer == "mosaicml":  # bare bytes, which do not state what they are
                cells = column.resolution // CELL
                shape = (CAPTION_TOKENS, ANY) if role == EMB else (ANY, cells, cells)
                column = replace(column, dtype="float16", shape=shape)
            yield role, column
