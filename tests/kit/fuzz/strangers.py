"""What users and strangers give: sets to import or pack, tars, models, lists, tables."""

import contextlib
import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import wdsprep
from tests.kit.fuzz.cases import (
    HERE,
    TOY,
    Kind,
    Make,
    Run,
    change,
    command,
    copy_ours,
    library,
    load_some,
    serve,
)
from tests.kit.fuzz.mutations import ANY, changed
from tests.kit.packs import BUCKETS, jpeg
from wdsprep.errors import WdsprepError

KEYS = [f"{number // 4:06d}{number % 4:06d}" for number in range(8)]


def _copy(name: str) -> Make:
    def make(sound: Path, place: Path, _rng: Random) -> None:
        source = sound / "foreign" / name
        if source.is_dir():
            shutil.copytree(source, place)
        else:
            place.mkdir()
            shutil.copy(source, place)

    return make


# Sets of other libraries, as `tests.kit.foreign_sets` has written them


def _change_shard(place: Path, rng: Random) -> str:
    """Change an MDS shard, and let its index say what is there, but for what it unpacks to."""
    index = place / "index.json"
    said = json.loads(index.read_bytes())
    shard = rng.choice(said["shards"])
    kind = "zip_data" if shard["zip_data"] else "raw_data"
    path = place / shard[kind]["basename"]
    path.write_bytes(rng.choice(ANY)(path.read_bytes(), rng))
    for each in filter(None, (shard["zip_data"], shard["raw_data"])):
        each["hashes"] = {}
    shard[kind]["bytes"] = path.stat().st_size
    if shard["zip_data"] and rng.random() < 0.3:
        shard["raw_data"]["bytes"] = rng.choice((0, 1, 10**6, 10**9, 2**32, 10**12))
    index.write_text(json.dumps(said))
    return path.name


def _change_member(*endings: str) -> Callable[[Path, Random], str]:
    """Change a member of a tar, and write the tar anew, at times gzipped."""

    def act(place: Path, rng: Random) -> str:
        path = rng.choice(sorted(place.rglob("*.tar")))
        with tarfile.open(path) as tar:
            members = [(m.name, tar.extractfile(m).read()) for m in tar]  # type: ignore[union-attr]
        at = rng.choice([n for n, (name, _) in enumerate(members) if name.endswith(endings)])
        name, data = members[at]
        members[at] = name, changed(data, name, rng)
        made = tar_of([member(*each) for each in members], tarfile.USTAR_FORMAT)
        path.write_bytes(gzip.compress(made) if rng.random() < 0.2 else made)
        return f"{path.name}: {name}"

    return act


def _sound_after(*words: str) -> Callable[[Path, Path], Sequence[Run]]:
    """Run a command, and let `verify` find nothing in what came of it."""

    def runs(place: Path, out: Path) -> list[Run]:
        run = command(words[0], place, out, *words[1:])

        def act() -> int:
            code = run.act()
            if code in (0, 3) and (found := wdsprep.verify(str(out)).findings):
                raise AssertionError(f"verify: {found[0]}")
            return code

        return [Run(run.name, act)]

    return runs


def _images_in_parquet(sound: Path, place: Path, _rng: Random) -> None:
    place.mkdir()
    sets = sorted((sound / "foreign/images/datasets").rglob("*.arrow"))
    tables = [pa.ipc.open_stream(path.read_bytes()).read_all() for path in sets[:2]]
    pq.write_table(tables[0], place / "a.parquet", compression="zstd")
    pq.write_table(tables[1], place / "b.parquet", row_group_size=2)


def write_tables(place: Path, rows: list[dict[str, Any]]) -> None:
    """Write the same rows in each form that users have."""
    for ending, mark in (("csv", ","), ("tsv", "\t")):
        lines = [mark.join(rows[0]), *(mark.join(map(str, row.values())) for row in rows)]
        (place / f"t.{ending}").write_text("\n".join(lines) + "\n")
    (place / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "t.csv.gz").write_bytes(gzip.compress((place / "t.csv").read_bytes()))
    pq.write_table(pa.Table.from_pylist(rows), place / "t.parquet")


def _urls(place: Path) -> None:
    """Write tables of URLs that only this machine could have, so that none is fetched."""
    rows = [{"url": f"http://127.0.0.1/{n}.jpg", "caption": f"p {n}", "n": n} for n in range(12)]
    write_tables(place, rows)


def _folder(place: Path) -> None:
    """Write images with metadata, json and txt beside them."""
    for n in range(4):
        (place / f"{n}.jpg").write_bytes(jpeg(n))
        (place / f"{n}.json").write_text(json.dumps({"caption": f"p {n}", "more": {"tags": [n]}}))
        (place / f"{n}.txt").write_text(f"picture {n}")
    rows = [{"file_name": f"{n}.jpg", "score": n, "tags": ["a", n]} for n in range(4)]
    (place / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


FLUX = _sound_after("import", "--resolution", "64")
PRX = _sound_after("import", "--resolution", "64", "--scale", "0.18215", "--shift", "0")
BYTES = _sound_after("import", "--resolution", "256")
PACK = _sound_after("pack", "--workers", "1", *BUCKETS)
FOREIGN: list[tuple[str, Make, Any, Any]] = [
    ("import-mds-index", _copy("latents/prx"), change("index.json"), PRX),
    ("import-mds-shard", _copy("latents/prx"), _change_shard, PRX),
    ("import-mds-bytes", _copy("latents/mosaicml"), _change_shard, BYTES),
    ("import-arrow", _copy("latents/mlperf"), change("*.arrow", "*.json"), FLUX),
    ("import-parquet", _copy("latents/mlperf.parquet"), change("*.parquet"), FLUX),
    ("import-pth", _copy("latents/primus"), _change_member(".pth"), FLUX),
    ("import-npy", _copy("latents/sana"), _change_member(".npy", ".json"), FLUX),
    ("import-tar", _copy("latents/sana"), change("*.tar"), FLUX),
    ("pack-mds-index", _copy("images/mds-jpeg"), change("index.json"), PACK),
    ("pack-mds-zstd", _copy("images/mds-jpeg"), _change_shard, PACK),
    ("pack-mds-br", _copy("images/mds-bytes"), _change_shard, PACK),
    ("pack-mds-pil", _copy("images/mds-pil"), _change_shard, PACK),
    ("pack-arrow", _copy("images/datasets"), change("*.arrow", "*.json"), PACK),
    ("pack-parquet", _images_in_parquet, change("*.parquet"), PACK),
    ("pack-tables", copy_ours(write=_urls), change("t.*"), PACK),
    ("pack-folder", copy_ours(write=_folder), change("*.json*"), PACK),
]

# Tars with every kind of member that there is; `dataset/test_tar_read.py` changes headers

FORMS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
RECORDS = {  # of PAX
    "path": ("../../out.jpg", "/etc/passwd", "a\nb.jpg", "x" * 5000, ""),
    "linkpath": ("/etc/passwd", "../..", "0.jpg", ""),
    "size": ("-1", "0", str(10**18), str(2**63), "9" * 4000, "1e9", " 7 "),
    "GNU.sparse.map": ("0,10", "0,1000000000000", "x"),
    "GNU.sparse.realsize": (str(10**15), "x"),
    "hdrcharset": ("BINARY", "x"),
    "mtime": ("nan", "1e400"),
}


class Member(tarfile.TarInfo):
    """A member with its bytes."""

    data = b""


def member(name: str, data: bytes) -> Member:
    info = Member(name)
    info.size, info.data = len(data), data
    return info


def samples(first: int, count: int) -> list[Member]:
    """Return the members of so many samples."""
    found = []
    for number in range(first, first + count):
        said = json.dumps({"caption": f"picture {number}", "width": number}).encode()
        parts = (("jpg", jpeg(number)), ("txt", b"picture"), ("json", said))
        found += [member(f"{number:04d}.{ending}", data) for ending, data in parts]
    return found


def tar_of(members: list[Member], form: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for info in members:
            tar.addfile(info, io.BytesIO(info.data))
    return out.getvalue()


def _make_tars(_sound: Path, place: Path, rng: Random) -> None:
    place.mkdir()
    (place / "0.tar").write_bytes(tar_of(samples(0, 3), tarfile.USTAR_FORMAT))
    (place / "1.tar").write_bytes(tar_of(samples(3, 3), rng.choice(FORMS)))


def _change_members(place: Path, rng: Random) -> str:
    """Write a tar with links, devices, long names and PAX records of any kind."""
    members = samples(3, 4)
    for _ in range(rng.randint(1, 3)):
        info = rng.choice(members)
        way = rng.randrange(4)
        if way == 0:
            info.type = rng.choice((b"1", b"2", b"3", b"5", b"L", b"S", b"x", b"\xff"))
            info.linkname = rng.choice(("0003.jpg", "/etc/passwd", "../..", info.name))
        elif way == 1:
            name = rng.choice([*RECORDS])
            info.pax_headers = {**info.pax_headers, name: rng.choice(RECORDS[name])}
        elif way == 2:
            info.name = rng.choice(("../../out.jpg", "/abs.jpg", "x" * 300 + ".jpg", ".jpg"))
        else:
            members.insert(rng.randrange(len(members)), rng.choice(members))
    data = b""
    for form in (rng.choice(FORMS), tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with contextlib.suppress(ValueError, OverflowError):  # what tarfile does not write
            data = tar_of(members, form)
            break
    (place / "1.tar").write_bytes(data)
    return "1.tar: members"


def _tar_runs(place: Path, out: Path) -> list[Run]:
    def load(**options: Any) -> Run:
        def use() -> None:
            if command("index", place).act() == 0:
                serve(wdsprep.load(place, global_batch=2, **options))

        return library("load", use)

    return [
        command("pack", place, out, "--workers", "1", *BUCKETS),
        command("index", place),
        command("encode", place, out, "--resolution", "32", *TOY),
        load(raw=True),
        load(pixels=32),
    ]


# Models


def load(folder: Path, text: str) -> str:
    """Find a model and load what encodes with it; return the line that refuses it, or nothing."""
    from wdsprep.encoding.models.encoder import load_encoder
    from wdsprep.encoding.models.find_model import find_model
    from wdsprep.encoding.recipe_defaults import settle_recipe
    from wdsprep.encoding.recipe_options import Encode

    try:
        recipe, model = settle_recipe(
            Encode(resolution=64, text=text), find_model(str(folder), text=text), "cpu"
        )
        load_encoder(model, recipe, "cpu")
    except WdsprepError as error:
        return str(error)
    return ""


def copied(folder: Path, into: Path) -> Path:
    """Copy a model without the denoiser, which nobody reads."""
    shutil.rmtree(into, ignore_errors=True)
    left_out = shutil.ignore_patterns("transformer", "unet")
    return Path(shutil.copytree(folder, into, ignore=left_out))


def _make_pipeline(sound: Path, place: Path, rng: Random) -> None:
    """Copy the pipeline of a family, which is made when it is first asked for."""
    from tests.kit.families import NAMES, small

    folder = sound / "models" / rng.choice(NAMES)
    copied(folder if folder.is_dir() else small(folder.name, folder), place)
    place.with_name("images").symlink_to(sound / "datasets/images")


def _make_scorer(sound: Path, place: Path, rng: Random) -> None:
    """Copy a model that scores, with a head for its embedding beside it."""
    from tests.kit.scoring_models import KINDS, SIDE, head, small

    folder = sound / "scoring" / rng.choice(KINDS)
    copied(folder if folder.is_dir() else small(folder.name, folder), place)
    head(place / "head.safetensors", {"clip": 24}.get(folder.name, SIDE))
    place.with_name("images").symlink_to(sound / "datasets/images")


def _encodes(place: Path, out: Path) -> list[Run]:
    images = place.with_name("images").resolve()
    encode = ("encode", images, out, "--resolution", "32", *HERE, "--model", place)

    how = wdsprep.Encode(resolution=32, model=str(place))
    more = (("--text", "tokens"), ("--latents", "none"))
    load = load_some(images, 1, encode=how, device="cpu")
    return [*(command(*encode, *words) for words in ((), *more)), load]


def _scores(place: Path, out: Path) -> list[Run]:
    images = place.with_name("images").resolve()
    score = ("score", images, out, *HERE, "--model", place)
    head = f"good={place / 'head.safetensors'}"
    return [command(*score), command(*score, "--head", head, "--overwrite")]


MODELS: list[tuple[str, Make, Any, Any]] = [
    ("scoring-configs", _make_scorer, change("config.json", "preprocessor_config.json"), _scores),
    ("scoring-head", _make_scorer, change("head.safetensors"), _scores),
    ("model-index", _make_pipeline, change("model_index.json"), _encodes),
    ("model-configs", _make_pipeline, change("config.json"), _encodes),
    ("model-tokenizers", _make_pipeline, change("*token*/*", "processor/*"), _encodes),
    ("model-weights", _make_pipeline, change("*.safetensors", "*.index.json"), _encodes),
]

# Lists and tables that are given beside datasets


def _rows(place: Path) -> None:
    named = [{"key": key, "caption": f"picture {key}"} for key in KEYS]
    numbers = ({"score": n / 2, "many": n, "is_red": True} for n in range(8))
    write_tables(place, [row | more for row, more in zip(named, numbers, strict=True)])


def _lists(place: Path) -> None:
    lists = {
        "keys": KEYS,
        "urls": [f"http://127.0.0.1/{key}.jpg" for key in KEYS],
        "sha256": [hashlib.sha256(key.encode()).hexdigest() for key in KEYS],
        "sources": ["photo-0000.jpg", *KEYS],
        "shapes": ["24x40", "32x32", "40x24"],
    }
    for name, lines in lists.items():
        (place / f"{name}.list").write_text("".join(f"{line}\n" for line in lines))


def _captioned(place: Path, out: Path) -> list[Run]:
    (table,) = place.glob("t.*")
    encode = ("encode", place / "images", out, "--resolution", "32", *TOY, "--captions", table)
    return [command(*encode), command(*encode, "--latents", "none", "--caption-column", "caption")]


def _joined(place: Path, _out: Path) -> list[Run]:
    (table,) = place.glob("t.*")
    conditions: list[dict[str, str]] = [{}, {"where": "score >= 1 and many < 7"}]
    conditions.append({"where": "caption != 'x'"})
    return [load_some(place / "latents", join=[str(table)], **where) for where in conditions]


def _listed(place: Path, out: Path) -> list[Run]:
    images = place / "images"
    removed = [
        command("remove", images, f"--{name}", place / f"{name}.list", "--yes")
        for name in ("keys", "urls", "sha256", "sources")
    ]
    encode = ("encode", images, out, "--resolution", "32", *TOY)
    select = command("select", images, out, "--keys", place / "keys.list")
    return [*removed, select, command(*encode, "--shapes", place / "shapes.list")]


GIVEN: list[tuple[str, Make, Any, Any]] = [
    ("list-captions", copy_ours("images", write=_rows), change("t.*"), _captioned),
    ("list-joins", copy_ours("latents", write=_rows), change("t.*"), _joined),
]
OWN: list[tuple[str, Make, Any, Any]] = [
    ("list-keys", copy_ours("images", write=_lists), change("*.list"), _listed),
    ("tar-members", _make_tars, _change_members, _tar_runs),
    ("tar-bytes", _make_tars, change("1.tar"), _tar_runs),
]
KINDS = tuple(
    Kind(name=name, make=make, change=act, runs=runs, is_ours=rows is OWN)
    for rows in (FOREIGN, MODELS, GIVEN, OWN)
    for name, make, act, runs in rows
)
