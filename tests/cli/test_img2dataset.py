"""Command lines of img2dataset, pasted after `wdsprep pack`, work or say what to write instead."""

import ast
import hashlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from tests.kit.packs import jpeg, manifest_of, samples_of
from tests.kit.paths import ROOT
from tests.kit.sites import write_parquet
from tests.kit.webserver import WebServer, ok
from wdsprep.cli import cli, main
from wdsprep.cli.img2dataset import TABLE, Meaning
from wdsprep.errors import UsageError
from wdsprep.fetch.opt_outs import OPT_OUTS
from wdsprep.packing.options import Digest

PAGE = ROOT / "wdsprep/cli/README.md"
PICTURES = {f"/{n}.jpg": jpeg(n, (300, 260 + n)) for n in range(3)}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.chdir(tmp_path)
    with WebServer({path: ok(data) for path, data in PICTURES.items()}) as opened:
        yield opened


def parsed(line: str) -> dict[str, Any]:
    """What the options of a command line come to that were given."""
    parent = click.Context(cli, info_name="wdsprep", **cli.context_settings)
    context = cli.commands["pack"].make_context("pack", shlex.split(line), parent=parent)
    return {name: value for name, value in context.params.items() if value not in (None, False)}


def meanings(name: str) -> list[Meaning]:
    found = TABLE[name]
    return [found] if isinstance(found, Meaning) else list(found.values())


def test_every_option_of_img2dataset_has_a_meaning_and_no_other_has() -> None:
    found = importlib.util.find_spec("img2dataset")
    if found is None or found.origin is None:
        pytest.skip("needs pip install --no-deps img2dataset")
    body = ast.parse(Path(found.origin).with_name("main.py").read_text()).body
    (download,) = (n for n in body if isinstance(n, ast.FunctionDef) and n.name == "download")
    assert set(TABLE) == {argument.arg for argument in download.args.args}


def test_what_stands_in_place_of_an_option_is_an_option_of_pack() -> None:
    known = {name for option in cli.commands["pack"].params for name in option.opts}
    own = {f"--{name}" for name in TABLE} | {"--resolution"}  # of encode
    texts = [(m.option, m.note, m.refusal) for name in TABLE for m in meanings(name)]
    named = set(re.findall(r"--[a-z][a-z_-]*", str(texts)))
    assert {"--workers", "--max-side", "--ray-address"} <= named <= known | own


def test_the_headers_that_are_obeyed_together_are_named() -> None:
    (both,) = (m.refusal for m in meanings("disallowed_header_directives") if m.refusal)
    assert set(re.findall(r"\w+", both.partition(" are obeyed")[0])) == OPT_OUTS | {"and"}


def test_the_page_has_what_every_option_is_here() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    table = next(table for table in tables if table.startswith("| img2dataset | here |"))
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    found = {name: here for names, here in rows for name in re.findall(r"--(\w+)", names)}
    assert found.keys() == TABLE.keys()
    for name, here in found.items():
        texts = [(m.option, m.note, m.refusal) for m in meanings(name)]
        named = set(re.findall(r"--[a-z][a-z-]+\b(?!_)", str(texts)))
        assert named <= set(re.findall(r"--[a-z-]+", here)), name


def test_the_code_of_the_page_takes_samples_from_elsewhere_to_a_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train, write = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(write, names)
    names["write_tars"]([{"image": data, "caption": path} for path, data in PICTURES.items()])
    assert main(["pack", "tars", "--workers", "1"]) == 0
    exec(train, {})
    said = capfd.readouterr().out
    assert {path for path in PICTURES if path in said} == set(PICTURES)


def test_the_first_line_of_its_readme_packs(
    server: WebServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("myimglist.txt").write_text("".join(f"{server.url}{path}\n" for path in PICTURES))
    line = "--url_list=myimglist.txt --output_folder=output_folder --thread_count=64"
    line += " --image_size=256 --allow-private-hosts --workers 1"
    assert main(["pack", *shlex.split(line)]) == 0
    out = tmp_path / "output_folder"
    assert {sample["jpg"] for sample in samples_of(out)} == set(PICTURES.values())
    said = capfd.readouterr().err
    assert "note: --thread_count: --requests sets" in said
    assert (
        "note: --image_size: images keep their own size: `wdsprep encode --resolution 256`" in said
    )


def test_a_line_for_laion_packs_with_hashes_columns_and_limits(
    server: WebServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "URL": f"{server.url}{path}",
            "TEXT": path,
            "NSFW": "UNLIKELY",
            "similarity": 0.3,
            "HEIGHT": 1,
            "md5": "0" * 32 if path == "/2.jpg" else hashlib.md5(data).hexdigest(),
        }
        for path, data in PICTURES.items()
    ]
    write_parquet(tmp_path / "laion400m-meta" / "part-00000.parquet", rows)
    line = """--url_list laion400m-meta --input_format "parquet" --url_col "URL"
        --caption_col "TEXT" --output_format webdataset --output_folder laion400m-data
        --processes_count 1 --thread_count 128 --image_size 384 --resize_only_if_bigger=True
        --resize_mode="keep_ratio" --skip_reencode=True --save_additional_columns
        '["NSFW","similarity"]' --enable_wandb True --number_sample_per_shard=100
        --compute_hash "md5" --verify_hash '["md5","md5"]' --allow-private-hosts"""
    assert main(["pack", *shlex.split(line)]) == 0
    out = tmp_path / "laion400m-data"
    manifest = manifest_of(out)
    assert (manifest.samples, manifest.rejects) == (2, {"hash_mismatch": 1})
    for sample in samples_of(out):
        assert sample["jpg"] == PICTURES[sample["txt"]]
        assert sample["json"]["meta"] == {"NSFW": "UNLIKELY", "similarity": 0.3}
    said = capfd.readouterr().err
    assert "--buckets 384" in said
    assert "note: --resize_only_if_bigger, --resize_mode: nothing is cut" in said
    assert "note: --enable_wandb: --track wandb sends progress there" in said


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("--url_list a.csv --output_folder s3://b/o", {"source": "a.csv", "images": "s3://b/o"}),
        ("a.csv --output_folder o", {"source": "a.csv", "images": "o"}),
        ("--output-folder o", {"images": "o"}),
        (
            "--number_sample_per_shard 7 --max_aspect_ratio 3",
            {"samples_per_shard": 7, "max_aspect_ratio": 3},
        ),
        ("--number-sample-per-shard=7", {"samples_per_shard": 7}),
        ("--samples_per_shard 7", {"samples_per_shard": 7}),
        ("--min_image_size 300 --max_image_area 90000", {"min_size": 300, "max_area": 90000}),
        ('--save_additional_columns \'["a", "b c"]\'', {"save_additional_columns": ("a", "b c")}),
        ("--save_additional_columns [a,b]", {"save_additional_columns": ("a", "b")}),
        ("--save_additional_columns None", {}),
        ("--verify_hash [sum,md5]", {"verify_hash": Digest(column="sum", hash="md5")}),
        ("--verify_hash \"('sum','md5')\"", {"verify_hash": Digest(column="sum", hash="md5")}),
        ("--max_aspect_ratio inf --compute_hash None", {}),
        ("--caption-col None", {"caption_col": "None"}),
        ("--encode_quality 90 --encode_format jpg", {"reencode": 90}),
        ("--encode_quality 90 --disable_all_reencoding True", {}),
        ("--encode_quality 90 --skip_reencode", {}),
        ("--encode_quality 90 --noskip_reencode", {"reencode": 90}),
        ("--incremental_mode overwrite", {"overwrite": True}),
        ("--incremental_mode=extend", {"append": True}),
        ("--incremental_mode incremental --distributor multiprocessing", {}),
        ("--distributor ray --processes_count 4", {"runner": "ray", "workers": (4, 0)}),
        ("--disallowed_header_directives '[]'", {"ignore_opt_outs": True}),
        (
            """--disallowed_header_directives '["noai", "noindex", "noimageai", "noimageindex"]'""",
            {},
        ),
        ("--timeout 5 --retries=1", {"timeout": 5, "retries": 1}),
        ("--enable_wandb --retries 1", {"retries": 1}),
        ("-- --url_list", {"source": "--url_list"}),
    ],
)
def test_an_option_is_given_as_ours(line: str, meant: dict[str, Any]) -> None:
    assert parsed(line) == meant


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("--output_format files", "--output_format files: pack writes WebDataset tars"),
        ("--output_format=parquet", "pack writes WebDataset tars"),
        ("--encode_format webp", "--reencode jpg:95"),
        ("--distributor pyspark", "--runner ray and --ray-address"),
        ("--input_format json", "pandas.read_json"),
        ("--input_format=json.gz", "pandas.read_json"),
        ("--bbox_col boxes", "let img2dataset write tars"),
        ("--incremental_mode no", "give incremental, overwrite or extend"),
        ("--disallowed_header_directives '[\"noai\"]'", "--ignore-opt-outs"),
        ("a.csv --url_list b.csv", "SOURCE is given twice: a.csv, b.csv"),
    ],
)
def test_what_would_give_something_else_is_refused_with_advice(line: str, advice: str) -> None:
    with pytest.raises(UsageError, match=re.escape(advice)):
        parsed(line)


@pytest.mark.parametrize(
    "line", ["--enable_wandb False", "--noenable_wandb", "--resize_mode no", "--extract_exif=False"]
)
def test_what_asks_for_nothing_is_passed_over_in_silence(
    line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert parsed(line) == {}
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "again"),
    [
        (["--incremental_mode", "extend"], "the same command"),
        (["--incremental_mode=overwrite"], "the same without --incremental_mode=overwrite"),
        (["--incremental_mode", "overwrite"], "the same without --incremental_mode overwrite"),
        (["--overwrite"], "the same without --overwrite"),
    ],
)
def test_who_interrupts_is_told_what_goes_on_and_does_not_start_over(
    words: list[str],
    again: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_given: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("wdsprep.packing.pack.pack", interrupted)
    assert main(["pack", *words]) == 130
    assert f"interrupted: run {again} to go on from here" in capfd.readouterr().err


def test_the_options_of_img2dataset_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "--help"]) == 0
    assert not [name for name in TABLE if f"--{name}" in capfd.readouterr().out and "_" in name]
