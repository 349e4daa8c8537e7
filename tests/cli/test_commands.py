"""The command line as people meet it: one line for each failure, and the right exit code."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pyarrow as pa
import pytest
from click.shell_completion import ShellComplete
from PIL import Image
from pyarrow import parquet as pq

from tests.kit.packs import jpeg, pack, tar_bytes, write_files
from wdsprep.cli import cli, main
from wdsprep.cli.base_command import GENERAL, Command, HeadedOption
from wdsprep.dataset.sample_table import IMAGE_COLUMNS, read_table
from wdsprep.encoding import MODELS

BESIDE = (".idx", ".parquet")
PROGRAM = Path(sys.executable).with_name("wdsprep")


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A newcomer's folder: three photos, one caption."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "downloads"
    folder.mkdir()
    for name, size in (("a", (300, 400)), ("b", (640, 520)), ("c", (100, 100))):
        Image.effect_noise(size, 50).convert("RGB").save(folder / f"{name}.jpg")
    (folder / "a.txt").write_text("a photo")
    return folder


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.usefixtures("downloads")
def test_json_is_all_that_stands_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "--workers", "1", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["samples"] == 2
    assert found["phases"] == {
        "256": {"samples": 2, "shards": 2},
        "512": {"samples": 1, "shards": 1},
    }
    assert found["rejects"] == {"too_small": 1}


def test_alone_it_prints_its_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capfd.readouterr().out
    assert main(["--help"]) == 0
    assert capfd.readouterr().out == said
    assert "..." not in said.replace("[ARGS]...", ""), "a sentence about a command is cut off"
    assert all(f"  {name} " in said for name in cli.commands)


@pytest.mark.parametrize("name", cli.commands)
def test_help_has_headings_whole_sentences_and_examples_that_can_be_parsed(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = cli.commands[name]
    assert isinstance(command, Command)
    for param in command.params:
        if isinstance(param, HeadedOption):
            assert param.heading != GENERAL, param.name
            assert re.fullmatch(r"[A-Z].* .*\.", param.help or ""), param.name
        else:
            assert isinstance(param, click.Argument), "its options are made by `option`"
    assert 1 <= len(command.examples) <= 3
    for example in command.examples:
        program, called, *words = shlex.split(example)
        assert (program, called) == ("wdsprep", name)
        command.make_context(name, words)
    assert main([name, "--help"]) == 0
    said = capfd.readouterr().out
    assert said.index(f"$ {command.examples[-1]}\n") < said.index(" --help ")
    assert max(map(len, said.splitlines())) <= 100


@pytest.mark.parametrize("words", [["-q", "pack"], ["pack", "--quiet"]])
def test_quiet_leaves_warnings_and_what_was_asked_for(
    downloads: Path, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    fast = ["--workers", "1"]
    (downloads / "c.jpg").unlink()
    assert main([*words, *fast]) == 0
    assert "".join(capfd.readouterr()) == ""
    (downloads / "a.txt").unlink()
    assert main([*words, "downloads", "bare", *fast]) == 0
    said = capfd.readouterr()
    assert (said.out.count("\n"), said.err) == (1, "")
    assert said.out.startswith("warning: no sample has a caption: put the caption of a.jpg into")
    assert main([*words, "downloads", "bare", *fast, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["has_captions"] is False
    assert main(["inspect", "bare", "-q"]) == 0
    assert "2 samples" in capfd.readouterr().out
    assert main(["-q", "-v", "pack"]) == 2


def test_where_nothing_is_kept_the_run_says_why_and_exits_with_3(
    downloads: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (downloads / f"{name}.jpg").unlink()
    assert main(["pack", "--workers", "1"]) == 3
    said = capfd.readouterr().out
    assert "nothing was kept: 1 of 2 rejects are no_image: put each image beside" in said
    (downloads / "a.txt").unlink()
    assert main(["pack", "--workers", "1", "--overwrite"]) == 3
    said = capfd.readouterr().out
    assert "nothing was kept: the one reject is too_small: --overwrite with smaller --b" in said
    assert "caption" not in said, "nothing is said of captions where there is no sample"


@pytest.mark.parametrize("words", [["-v", "pack"], ["pack", "-v"]])
def test_verbose_says_what_becomes_of_each_unit(downloads: Path, words: list[str]) -> None:
    done = run(*words, str(downloads), "--samples-per-shard", "2", "--workers", "1")
    assert (
        "000000 is done: 2 samples, 0 rejects\n000001 is done: 0 samples, 1 reject" in done.stderr
    )


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
    done = subprocess.run(
        [sys.executable, "-c", COMPLETED], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["plain,auto", "plain,local", "plain,ray"]
    assert not set(json.loads(done.stderr)) & {"numpy", "PIL", "pyarrow", "ray", "torch", "boto3"}


def test_models_lists_each_that_has_a_name_and_what_a_sample_weighs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["models"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in said[3 : 3 + len(MODELS)]] == list(MODELS)
    (flux,) = (line for line in said if line.startswith("flux "))
    assert flux.split() == [
        *("flux", "9.8", "GB", "4.3", "MB", "4.7", "MB", "black-forest-labs/FLUX.1-dev", "(login)")
    ]
    assert max(map(len, said)) <= 120
    assert main(["models", "--json"]) == 0
    models = {model["name"]: model for model in json.loads(capfd.readouterr().out)["models"]}
    sana = models["sana"]
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
        (["pack", "urls.py"], 1, "urls.py is a file of a kind that pack does not know"),
        (["pack", "--max-shard-size", "big"], 2, "is not a size"),
        (["pack", "--reencode", "png:3"], 2, "write jpg:95"),
        (["pack", "--no-such-option"], 2, '--no-such-option: "wdsprep pack --help" lists them'),
        (["index", "downloads"], 1, "downloads holds no .tar to index"),
        (["rebuild", "downloads"], 1, "has no receipts"),
    ],
)
def test_a_failure_is_one_clear_line_and_never_a_traceback(
    arguments: list[str], code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("urls.csv").write_text("link_to,caption\nhttp://a.b/c.jpg,c\n")
    Path("urls.py").write_text("url = 1\n")
    assert main(arguments) == code
    said = capfd.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert [line for line in said.splitlines() if line.startswith("wdsprep: ")] == [
        said.strip().splitlines()[-1]
    ]
    assert not Path("shards").exists()


def test_debug_shows_the_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--debug", "pack", "nowhere"]) == 1
    assert "Traceback" in capfd.readouterr().err
    assert main(["pack", "nowhere", "--debug"]) == 1
    assert "Traceback" in capfd.readouterr().err


def test_a_bug_is_reported_as_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_arguments: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr("wdsprep.dataset.reindex.index", broken)
    assert main(["index", "somewhere"]) == 1
    assert "a bug: KeyError: 'x'" in capfd.readouterr().err


@pytest.mark.usefixtures("downloads")
def test_a_damaged_manifest_is_one_line_with_the_way_out(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["pack"]) == 0
    manifest = Path("shards/images/wdsprep.json")
    whole = manifest.read_bytes()
    manifest.write_bytes(whole.replace(b'"check":"full"', b'"check":"fool"'))
    assert main(["pack"]) == 1
    said = capfd.readouterr().err
    assert f'run "wdsprep rebuild {Path("shards/images").absolute()}"' in said
    assert main(["rebuild", "shards/images"]) == 0
    assert main(["pack"]) == 0
    assert manifest.read_bytes() == whole


@pytest.mark.usefixtures("downloads")
def test_index_writes_what_pack_would(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "--workers", "1"]) == 0
    files = sorted(path for path in Path("shards/images").glob("*/*") if path.suffix in BESIDE)
    whole = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    capfd.readouterr()
    assert main(["index", "shards/images"]) == 0
    assert capfd.readouterr().out == "2 indexes and 2 tables written, of 2 samples\n"
    assert [path.read_bytes() for path in files] == whole


def test_index_makes_tables_of_the_tars_of_others_beside_theirs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    facts = {"caption": "a cat", "width": 3, "score": 0.5, "key": "other"}
    for name in ("a", "b"):
        (tmp_path / f"{name}.tar").write_bytes(
            tar_bytes([("x.jpg", b"1"), ("x.json", json.dumps(facts).encode()), ("y.jpg", b"2")])
        )
    pq.write_table(pa.table({"key": ["x"], "status": ["success"]}), tmp_path / "b.parquet")
    theirs = (tmp_path / "b.parquet").read_bytes()
    assert main(["index", str(tmp_path)]) == 0
    assert capfd.readouterr().out == "2 indexes and 2 tables written, of 4 samples\n"
    assert (tmp_path / "b.parquet").read_bytes() == theirs
    rows = read_table(
        (tmp_path / "a.tar.parquet").read_bytes(), IMAGE_COLUMNS, what="a"
    ).to_pylist()
    assert [row["key"] for row in rows] == ["x", "y"]
    assert (rows[0]["caption"], rows[0]["width"], rows[1]["caption"]) == ("a cat", 3, None)
    assert json.loads(rows[0]["rest"]) == {"score": 0.5, "key": "other"}
    (tmp_path / "a.tar").write_bytes(tar_bytes([("z.jpg", b"1")]))
    os.utime(tmp_path / "a.tar", (time.time() + 60, time.time() + 60))
    assert main(["index", str(tmp_path)]) == 0
    assert capfd.readouterr().out == "1 index and 1 table written, of 1 sample\n"
    rows = read_table(
        (tmp_path / "a.tar.parquet").read_bytes(), IMAGE_COLUMNS, what="a"
    ).to_pylist()
    assert [row["key"] for row in rows] == ["z"]


def test_index_says_what_to_do_about_a_tar_that_it_cannot_index_and_that_all_have_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    members = [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.txt", b"3")]
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    assert main(["index", str(tmp_path)]) == 1
    assert "a stands in two places: make the tar again with its names" in capfd.readouterr().err
    (tmp_path / "a.tar").write_bytes(tar_bytes(members[:2]))
    assert [main(["index", str(tmp_path)]) for _ in range(2)] == [0, 0]
    said = capfd.readouterr().out.splitlines()
    assert said[0] == "1 index and 1 table written, of 2 samples"
    assert said[1] == f"nothing left to do: each tar in {tmp_path} has its index"


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
    code = LOST.format(signum=signal.SIGINT)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.returncode == 130
    assert done.stderr.strip() == "wdsprep: interrupted: run the same command to go on from here"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "sets/imagse"], "(did you mean sets/images?)"),
        (["verify", "sets/image"], "(did you mean sets/images?)"),
        (["rebuild", "sets/imags"], "(did you mean sets/images?)"),
        (["report", "sets/images/"], ""),
        (["pack", "fotos", "out"], "photos?): put images in it"),
        (["encode", "sets/imagess", "out", "--resolution", "64"], "(did you mean "),
        (["duplicates", "sets/images", "--join", "tabel.csv", "--keep", "a"], "mean table.csv?)"),
        (["remove", "sets/images", "--keys", "kyes.txt"], "(did you mean keys.txt?)"),
        (["export", "sets/images", "out", "--to", "kohia"], "(did you mean kohya?)"),
        (["score", "sets/images", "out", "--model", "clop"], "(did you mean clip?)"),
        (["encod"], "'encod' (did you mean encode?): see wdsprep --help"),
    ],
)
def test_a_name_that_is_nearly_right_is_suggested(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    pack(write_files(tmp_path / "photos", {"a.jpg": jpeg(0, (80, 70))}), tmp_path / "sets/images")
    (tmp_path / "table.csv").write_text("key,a\n1,2\n")
    (tmp_path / "keys.txt").write_text("1\n")
    capfd.readouterr()
    code = main(words)
    error = capfd.readouterr().err
    assert (code in (1, 2)) is bool(said)
    assert said in error
    assert ("did you mean" in error) is bool(said)
