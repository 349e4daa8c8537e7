"""Names of the files of a dataset: where everything lies, and whose a file is.

A dataset of images has these:

    wdsprep.json             the manifest
    wdsprep.hold             while somebody writes it
    edition                  changes with each --overwrite
    removed                  what `wdsprep remove` took out, by digests: it stays away
    256/000000.tar           what unit 000000 has made for bucket 256
    256/000000.tar.idx       where its samples begin
    256/000000.parquet       what is known of its samples, one row each
    256/000000_01.tar        what did not fit into that
    inputs/000000.jsonl      what the unit was made of
    rejects/000000.jsonl     what did not make it
    receipts/000000.json     last of all: the unit is done
    receipts/000000.hold     while somebody changes it

In one of latents a unit is called like the image shard that it is made of, 256/000000, and has no
list of inputs; empty.emb.npy is what becomes of the empty caption, and the table says which samples
of the image shard those of the tar are. Of scores without arrays there are tables alone. Where
captions come from a table, these lie there:

    captions/table.json         which files they were read from
    captions/256/000000.parquet the captions of the samples of the unit's image shard
"""

import re
from collections.abc import Mapping

from wdsprep.dataset.settings import SCORER, is_scored
from wdsprep.store.base import HELD

MAKERS = {"images": "wdsprep pack", "latents": "wdsprep encode"}
SELECTION = "selection"
"""The source of images that were selected from other datasets."""
IMPORTER = "wdsprep import"
"""The source of latents that were imported."""
MANIFEST = "wdsprep.json"
MANIFEST_HOLD = f"wdsprep{HELD}"
EDITION = "edition"
CARD = "README.md"
HUB_FILES = (CARD, ".gitattributes")
"""The files that the Hugging Face hub has beside a dataset: its card, and one that the hub
writes."""
RECEIPTS, INPUTS, CAPTIONS = "receipts/", "inputs/", "captions/"
CAPTION_TABLE = f"{CAPTIONS}table.json"
REMOVED = "removed"
FIRST_RETRY = 1_000_000_000
"""Units from this number on have no rows of their own: they try again what failed in others."""
RETRIES = f"{INPUTS}{FIRST_RETRY}"[:-6]
"""The start of the names of input lists of retries."""
SHARD = re.compile(r"(\d+)/(\d{6,})(_\d+)?\.(?:tar(?:\.idx)?|parquet)")
BESIDE = re.compile(r"(rejects|inputs)/(\d{6,})\.jsonl")
# Of shards that pack made. Others may have the names of what a user keeps beside them.
LATENTS = re.compile(
    r"(?:rejects/|captions/)?(\d+/\d{6,}(?:_\d+)?)\.(?:tar|tar\.idx|parquet|jsonl)"
)
# What a dataset of each kind may hold beside its manifest. Latent shards of tars that something
# else packed have the names of those.
OURS = {
    "images": (
        re.compile(r"receipts/\d{6,}\.json"),
        re.compile(rf"{SHARD.pattern}|{BESIDE.pattern}"),
    ),
    "latents": (
        re.compile(r"receipts/\d+/.+\.json"),
        re.compile(
            r"\d+/.+\.(tar(\.idx)?|parquet)|rejects/\d+/.+\.jsonl|empty\.[a-z0-9_]+\.npy"
            r"|captions/(\d+/.+\.parquet|table\.json)"
        ),
    ),
}
_BUCKET = re.compile(r"(?:receipts/|rejects/|captions/)?(\d+)/")
_FOLDER_OR_ENDING = re.compile(
    r"^(receipts|rejects|inputs|captions)/|\.(jsonl?|tar(\.idx)?|parquet)$"
)
_TABLE = ".parquet"
_HELD = re.compile(rf"(.+{re.escape(HELD)})(\.\d+)?")


def maker_of(dataset: str, settings: Mapping[str, object]) -> str:
    """Return the command that continues a dataset with these settings."""
    source = settings.get("source", "")
    if is_scored(settings):
        return SCORER
    if source == SELECTION:
        return "wdsprep select"
    return IMPORTER if dataset == "latents" and source else MAKERS[dataset]


def slice_name(number: int) -> str:
    """Return the name of the unit that packs a slice."""
    return f"{number:06d}"


def is_retry(unit: str) -> bool:
    """Return whether a unit, by its number, tries again rows that failed in other units.

    Only the list of its inputs tells which rows.
    """
    return unit.isdecimal() and int(unit) >= FIRST_RETRY


def sample_key(unit: str, number: int) -> str:
    return f"{unit}{number:06d}"


def image_shard(bucket: int, unit: str, roll: int) -> str:
    """Return the name of a unit's tar in a bucket; `roll` counts the tars that were full before."""
    return f"{bucket}/{unit}{f'_{roll:02d}' if roll else ''}.tar"


def latent_shard(unit: str, settings: Mapping[str, object] | None = None) -> str:
    """Return the name of a unit's shard of latents; the tar of images has the same name.

    With the settings of scores without arrays it is the name of a table.
    """
    is_table_alone = settings is not None and is_scored(settings) and not settings["layout"]
    return f"{unit}{_TABLE if is_table_alone else '.tar'}"


def latent_unit(shard: str) -> str:
    """Return the unit that makes latents of an image shard, or made this shard of latents."""
    return shard.removesuffix(_TABLE if is_table(shard) else ".tar")


def index_name(tar: str) -> str:
    return f"{tar}.idx"


def table_name(tar: str) -> str:
    """Return the name of the table of a shard's samples in a dataset: a shard may be one."""
    return f"{latent_unit(tar)}{_TABLE}"


def foreign_table_name(tar: str) -> str:
    """Return the name of the table of a tar that another program packed.

    That program may have a file of its own beside it: img2dataset has 00000.parquet.
    """
    return f"{tar}{_TABLE}"


def is_foreign_table(name: str) -> bool:
    return name.endswith(f".tar{_TABLE}")


def is_table(name: str) -> bool:
    return name.endswith(_TABLE) and not name.startswith(CAPTIONS)


def names_beside(tar: str) -> tuple[str, str]:
    """Return the names of the files that lie beside a tar, and go with it."""
    return index_name(tar), table_name(tar)


def captions_name(unit: str) -> str:
    """Return the name of the file with the captions that a table has for a unit."""
    return f"{CAPTIONS}{unit}{_TABLE}"


def tar_of(name: str) -> str:
    """Return the name of the tar that an index or a table belongs to.

    Any other name, such as that of a tar, is returned as it is.
    """
    if is_table(name) and not is_foreign_table(name):
        return f"{name.removesuffix(_TABLE)}.tar"
    return name.removesuffix(".idx").removesuffix(_TABLE)


def is_index(name: str) -> bool:
    return name.endswith(".idx")


def rejects_name(unit: str) -> str:
    return f"rejects/{unit}.jsonl"


def receipt_name(unit: str) -> str:
    return f"{RECEIPTS}{unit}.json"


def inputs_name(unit: str) -> str:
    return f"{INPUTS}{unit}.jsonl"


def unit_of_receipt(name: str) -> str:
    """Return the unit that a receipt belongs to, by its name, or "" for other files."""
    is_one = name.startswith(RECEIPTS) and name.endswith(".json")
    return name[len(RECEIPTS) : -len(".json")] if is_one else ""


def retry_of_inputs(name: str) -> str:
    """Return the retry that a file of inputs belongs to, by its name, or "" for other files."""
    unit = name.removeprefix(INPUTS).removesuffix(".jsonl")
    return unit if name == inputs_name(unit) and is_retry(unit) else ""


def hold_name(unit: str) -> str:
    return f"{RECEIPTS}{unit}{HELD}"


def held_name(name: str) -> str:
    """Return the name of the lock that a file in a listing stands for, or "" for other files.

    The name ends in `.hold`. The file may have a number behind that.
    """
    match = _HELD.fullmatch(name)
    return match[1] if match else ""


def empty_name(member: str) -> str:
    """Return the name of the file with a member's array for the empty caption."""
    return f"empty.{member}"


def bucket_of(name: str) -> str:
    """Return the bucket in the path of a file, or "" if there is none."""
    match = _BUCKET.match(name)
    return match[1] if match else ""


def unit_of_file(name: str, dataset: str) -> str:
    """Return the unit that wrote a file, by its name; `dataset` is its kind, images or latents."""
    shard = SHARD.fullmatch(name) if dataset == "images" else None
    return shard[2] if shard else _FOLDER_OR_ENDING.sub("", name)
