"""The command line as people meet it: one line for each failure, and the right exit code."""

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pytest
from click.shell_completion import ShellComplete
from PIL import Image
from pyarrow import parquet as pq

from tests.kit.command_lines import CommandLine, python
from tests.kit.packs import jpeg, pack, packing_here, run, tar_bytes, write_files
from wdsprep.cli import cli
from wdsprep.cli.base_command import GENERAL, Command, HeadedOption
from wdsprep.dataset.sample_table import IMAGE_COLUMNS, read_table
from wdsprep.encoding import MODELS

BESIDE = (".idx", ".parquet")


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A newcomer's folder: three photos, one caption; they are packed in this process."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "downloads"
    folder.mkdir()
    for name, size in (("a", (300, 400)), ("b", (640, 520)), ("c", (100, 100))):
        Image.effect_noise(size, 50).convert("RGB").save(folder / f"{name}.jpg")
    (folder / "a.txt").write_text("a photo")
    with packing_here():
        yield folder


def test_alone_it_prints_its_help(command: CommandLine) -> None:
    printed = command()
    assert command("--help") == printed
    assert "..." not in printed.out.replace("[ARGS]...", ""), "a sentence on a command is cut off"
    assert all(f"  {name} " in printed.out for name in cli.commands)


@pytest.mark.parametrize("name", cli.commands)
def test_help_has_headings_whole_sentences_and_examples_that_can_be_parsed(
    name: str, command: CommandLine
) -> None:
    declared = cli.commands[name]
    assert isinstance(declared, Command)
    for param in declared.params:
        if isinstance(param, HeadedOption):
            assert param.heading != GENERAL, param.name
            assert re.fullmatch(r"[A-Z].* .*\.", param.help or ""), param.name
            assert "](" not in (param.help or ""), "links are for pages"
        else:
            assert isinstance(param, click.Argument), "its options are made by `option`"
    assert 1 <= len(declared.examples) <= 3
    for example in declared.examples:
        prompt, program, called, *words = shlex.split(example)
        assert (prompt, program, called) == ("$", "wdsprep", name)
        declared.make_context(name, words)
    printed = command(name, "--help")
    assert printed.out.index(f"{declared.examples[-1]}\n") < printed.out.index(" --help ")
    assert max(map(len, printed.lines)) <= 100


@pytest.mark.parametrize("words", [["-q", "pack"], ["pack", "--quiet"]])
def test_quiet_leaves_warnings_and_what_was_asked_for(
    downloads: Path, words: list[str], command: CommandLine
) -> None:
    (downloads / "c.jpg").unlink()
    assert command(*words) == ("", "")
    (downloads / "a.txt").unlink()
    bare = (*words, "downloads", "bare")
    printed = command(*bare)
    assert (len(printed.lines), printed.err) == (1, "")
    assert printed.out.startswith("warning: no sample has a caption: put the caption of a.jpg into")
    assert command(*bare, "--json").facts["has_captions"] is False
    assert "2 samples" in command("inspect", "bare", "-q").out
    command("-q", "-v", "pack", code=2)


def test_where_nothing_is_kept_the_run_says_why_and_exits_with_3(
    downloads: Path, command: CommandLine
) -> None:
    for name in ("a", "b"):
        (downloads / f"{name}.jpg").unlink()
    said = command("pack", code=3).out
    assert "nothing was kept: 2 of 2 were rejected, 1 of them as no_image: put each image" in said
    (downloads / "a.txt").unlink()
    said = command("pack", "--overwrite", code=3).out
    assert (
        "nothing was kept: 1 of 1 was rejected, all of them as too_small: --overwrite with s"
        in said
    )
    assert "caption" not in said, "nothing is said of captions where there is no sample"
    (downloads / "c.json").write_text('{"deep": {"score": 7}}')
    filtered = ("pack", "--workers", 1, "--overwrite", "--filter")
    said = command(*filtered, "width > 1 or deep.scor > 1", code=3).out
    lacking = 'such as "deep.scor is missing (did you mean score?), width is missing"'
    assert f"--filter asks for what their json or row lacks, {lacking}: for sizes give" in said


def test_verbose_says_what_becomes_of_each_unit(downloads: Path) -> None:
    done = run("pack", "-v", downloads, "--samples-per-shard", "2", "--workers", "1")
    told = "000000 is done: 2 samples, 0 rejects\n000001 is done: 0 samples, 1 reject"
    assert told in done.stderr


FLUXES = ("", "-schnell", "2-klein")


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("encode --model ", ["dir,", *(f"plain,{name}" for name in MODELS)]),
        ("encode --model flux", ["dir,flux", *(f"plain,flux{more}" for more in FLUXES)]),
        ("encode --runner ", ["plain,auto", "plain,local", "plain,ray"]),
        ("verify dow", ["file,dow"]),
        ("rep", ["plain,report", "plain,repair"]),
        ("pack --quie", ["plain,--quiet"]),
    ],
)
def test_a_shell_completes_what_is_typed(typed: str, wanted: list[str]) -> None:
    *words, incomplete = typed.split(" ")
    shell = ShellComplete(cli, {}, "wdsprep", "_WDSPREP_COMPLETE")
    items = shell.get_completions(words, incomplete)
    assert [f"{item.type},{item.value}" for item in items] == wanted


COMPLETED = """
import json, sys
from wdsprep.cli import main
try:
    main()
except SystemExit:
    json.dump(sorted({name.partition(".")[0] for name in sys.modules}), sys.stderr)
"""


def test_nothing_heavy_is_imported_to_complete_what_is_typed() -> None:
    asked = {"COMP_WORDS": "wdsprep encode --runner ", "COMP_CWORD": "3"}
    env = {**os.environ, "_WDSPREP_COMPLETE": "bash_complete", **asked}
    done = python(COMPLETED, env=env)
    assert done.stdout.split() == ["plain,auto", "plain,local", "plain,ray"]
    assert not set(json.loads(done.stderr)) & {"numpy", "PIL", "pyarrow", "ray", "torch", "boto3"}


def test_models_lists_each_that_has_a_name_and_what_a_sample_weighs(command: CommandLine) -> None:
    lines = command("models").lines
    assert [line.split(" ")[0] for line in lines[3 : 3 + len(MODELS)]] == list(MODELS)
    (flux,) = (line for line in lines if line.startswith("flux "))
    assert flux.split() == [
        *("flux", "9.8", "GB", "4.3", "MB", "4.7", "MB", "black-forest-labs/FLUX.1-dev", "(login)")
    ]
    assert max(map(len, lines)) <= 120
    sana = next(m for m in command("models", "--json").facts["models"] if m["name"] == "sana")
    assert sana["arrays"] == [
        {"dtype": "bfloat16", "name": "emb.npy", "shape": [300, 2304], "trimmed": True}
    ]
    trimmed = sana["sample_nbytes"]["512"] - sana["sample_nbytes_at_60_tokens"]["512"]
    assert trimmed == (300 - 60) * 2304 * 2


@pytest.mark.usefixtures("downloads")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pack", "urls.csv"], 1, "has no column of URLs: it has link_to, caption"),
        (["pack", "downloads", "downloads/out"], 2, "lies in the source"),
        (["pack", "https://a.b/c.tar"], 2, "only tables are read from the web"),
        (["pack", "pipe:cat x.tar"], 2, "az:// or hf://datasets/, or a table by https://"),
        (["pack", "--retry-rejected"], 2, "is not a table of URLs"),
        (["pack", "--verify-hash", "crc"], 2, "write COLUMN:HASH"),
        (["pack", "--buckets", "512,256"], 2, "give rising sizes"),
        (["pack", "--filter", "__import__('os')"], 2, "cannot be used"),
        (["pack", "urls.py"], 1, "or is a file of a kind that is not known here"),
        (["pack", "--max-shard-size", "big"], 2, "is not a size"),
        (["pack", "--reencode", "png:3"], 2, "write jpg:95"),
        (["pack", "--no-such-option"], 2, '--no-such-option: "wdsprep pack --help" lists them'),
        (["index", "downloads"], 1, "downloads holds no .tar to index"),
        (["select", "downloads"], 2, "select needs OUT: the folder or URL to copy to"),
        (["rebuild", "downloads"], 1, "has no receipts"),
        (["verify", "downloads", "downloads/"], 2, "downloads is given twice"),
    ],
)
def test_a_failure_is_one_clear_line_and_never_a_traceback(
    arguments: list[str], code: int, message: str, command: CommandLine
) -> None:
    Path("urls.csv").write_text("link_to,caption\nhttp://a.b/c.jpg,c\n")
    Path("urls.py").write_text("url = 1\n")
    *others, last = command(*arguments, code=code).err.splitlines()
    assert message in last
    assert last.startswith("wdsprep: ")
    assert not [line for line in others if line.startswith(("wdsprep: ", "Traceback"))]
    assert not Path("shards").exists()


def test_debug_shows_the_traceback_and_a_bug_is_reported_as_one(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (("--debug", "pack", "/nowhere"), ("pack", "/nowhere", "--debug")):
        assert "Traceback" in command(*words, code=1).err
    monkeypatch.setattr("wdsprep.dataset.reindex.index", {}.__getitem__)
    assert "a bug: TypeError: " in command("index", "somewhere", code=1).err


@pytest.mark.usefixtures("downloads")
def test_json_stands_alone_on_stdout_and_a_damaged_manifest_is_one_line_with_the_way_out(
    command: CommandLine,
) -> None:
    facts = command("pack", "--json").facts
    assert (facts["samples"], facts["rejects"]) == (2, {"too_small": 1})
    assert facts["phases"] == {
        "256": {"samples": 2, "shards": 2},
        "512": {"samples": 1, "shards": 1},
    }
    manifest = Path("shards/images/wdsprep.json")
    whole = manifest.read_bytes()
    manifest.write_bytes(whole.replace(b'"check":"full"', b'"check":"fool"'))
    wanted = f'run "wdsprep rebuild {Path("shards/images").absolute()}"'
    assert wanted in command("pack", code=1).err
    command("rebuild", "shards/images")
    command("pack")
    assert manifest.read_bytes() == whole


@pytest.mark.usefixtures("downloads")
def test_index_writes_what_pack_would(command: CommandLine) -> None:
    command("pack")
    files = sorted(path for path in Path("shards/images").glob("*/*") if path.suffix in BESIDE)
    whole = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    printed = command("index", "shards/images")
    assert printed.out == "4 indexes and tables written, of 2 samples\n"
    assert [path.read_bytes() for path in files] == whole


def test_index_makes_tables_of_the_tars_of_others_beside_theirs(
    tmp_path: Path, command: CommandLine
) -> None:
    def rows() -> list[dict[str, Any]]:
        data = (tmp_path / "a.tar.parquet").read_bytes()
        return read_table(data, IMAGE_COLUMNS, what="a").to_pylist()

    facts = {"caption": "a cat", "width": 3, "score": 0.5, "key": "other"}
    members = [("x.jpg", b"1"), ("x.json", json.dumps(facts).encode()), ("y.jpg", b"2")]
    for name in ("a", "b"):
        (tmp_path / f"{name}.tar").write_bytes(tar_bytes(members))
    pq.write_table(pa.table({"key": ["x"], "status": ["success"]}), tmp_path / "b.parquet")
    theirs = (tmp_path / "b.parquet").read_bytes()
    assert command("index", tmp_path).out == "4 indexes and tables written, of 4 samples\n"
    assert (tmp_path / "b.parquet").read_bytes() == theirs
    first, second = rows()
    assert (first["key"], first["caption"], first["width"]) == ("x", "a cat", 3)
    assert (second["key"], second["caption"]) == ("y", None)
    assert json.loads(first["rest"]) == {"score": 0.5, "key": "other"}
    (tmp_path / "a.tar").write_bytes(tar_bytes([("z.jpg", b"1")]))
    os.utime(tmp_path / "a.tar", (time.time() + 60, time.time() + 60))
    assert command("index", tmp_path).out == "2 indexes and tables written, of 1 sample\n"
    assert [row["key"] for row in rows()] == ["z"]


def test_index_says_what_to_do_about_a_tar_that_it_cannot_index_and_that_all_have_one(
    tmp_path: Path, command: CommandLine
) -> None:
    members = [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.txt", b"3")]
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    told = "a stands in two places: make the tar again with its names"
    assert told in command("index", tmp_path, code=1).err
    (tmp_path / "a.tar").write_bytes(tar_bytes(members[:2]))
    assert command("index", tmp_path).out == "2 indexes and tables written, of 2 samples\n"
    nothing = f"nothing left to do: each tar in {tmp_path} has its index\n"
    assert command("index", tmp_path).out == nothing


# Ctrl-C comes while Python can raise nothing: it prints such an exception and goes on.
LOST = """
import os, sys, time
from wdsprep.cli import cli
from wdsprep.__main__ import main

class Deaf:
    def __del__(self):
        os.kill(os.getpid(), {signum:d})
        time.sleep(1)

def command(**_options):
    Deaf()
    time.sleep(30)

cli.commands["pack"].callback = command
sys.argv[1:] = ["pack"]
sys.exit(main())
"""


def test_an_interrupt_that_python_cannot_raise_comes_again() -> None:
    done = python(LOST.format(signum=signal.SIGINT), exit_code=130)
    assert done.stderr.strip() == "wdsprep: interrupted: run the same command to go on from here"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["inspect", "sets/imagse"], 1, "(did you mean sets/images?)"),
        (["verify", "sets/image"], 1, "(did you mean sets/images?)"),
        (["rebuild", "sets/imags"], 1, "(did you mean sets/images?)"),
        (["report", "sets/images/"], 0, ""),
        (["pack", "fotos", "out"], 1, "photos?), or is a file of a kind"),
        (["encode", "sets/imagess", "out", "--resolution", "64"], 1, "(did you mean "),
        (["encode", "sets/images", "--resolution", "64", "128"], 2, "--resolution 64,128?"),
        (["duplicates", "sets/images", "--join", "tabel.csv", "--keep", "a"], 1, "table.csv?)"),
        (["remove", "sets/images", "--keys", "kyes.txt"], 2, "(did you mean keys.txt?)"),
        (["export", "sets/images", "out", "--to", "kohia"], 2, "(did you mean kohya?)"),
        (["score", "sets/images", "out", "--model", "clop"], 2, "(did you mean clip?)"),
        (["encod"], 2, "'encod' (did you mean encode?): see wdsprep --help"),
    ],
)
def test_a_name_that_is_nearly_right_is_suggested(
    words: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: CommandLine,
) -> None:
    monkeypatch.chdir(tmp_path)
    pack(write_files(tmp_path / "photos", {"a.jpg": jpeg(0, (80, 70))}), tmp_path / "sets/images")
    write_files(tmp_path, {"table.csv": "key,a\n1,2\n", "keys.txt": "1\n"})
    error = command(*words, code=code).err
    assert said in error
    assert ("did you mean" in error) is bool(said)
