"""The command line as people meet it: one line for each failure, and the right exit code."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from tests.kit.packs import tar_bytes
from tests.kit.paths import ROOT
from wdsprep.cli import cli, main
from wdsprep.version import __version__

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


def test_pack_alone_packs_downloads(downloads: Path) -> None:
    done = run("pack")
    assert done.returncode == 0
    assert f"{downloads.name}: 3 images in a folder, 1 with captions" in done.stderr
    assert "phase 256: 2 samples in 2 shards" in done.stdout
    assert "phase 512: 1 sample in 1 shard" in done.stdout
    assert "1 reject (too_small 1)" in done.stdout
    assert "next: " in done.stdout
    assert "nothing left to do" in run("pack").stdout


def test_json_is_all_that_stands_on_stdout(downloads: Path) -> None:
    found = json.loads(run("pack", str(downloads), "--json").stdout)
    assert found["samples"] == 2
    assert found["phases"] == {
        "256": {"samples": 2, "shards": 2},
        "512": {"samples": 1, "shards": 1},
    }
    assert found["rejects"] == {"too_small": 1}


@pytest.mark.usefixtures("downloads")
def test_underscores_and_img2dataset_names_are_taken() -> None:
    names = ["--number_sample_per_shard", "7", "--min_image_size", "300", "--max_aspect_ratio", "3"]
    more = ["--encode_quality", "90", "--processes_count", "1", "--caption_col", "caption"]
    assert main(["pack", *names, *more]) == 0
    settings = json.loads(Path("shards/images/wdsprep.json").read_bytes())["settings"]
    wanted = {"samples_per_shard": 7, "min_size": 300, "max_aspect_ratio": 3.0}
    assert settings.items() >= (wanted | {"reencode": "jpg:90", "caption_col": "caption"}).items()


def test_img2dataset_names_are_not_shown() -> None:
    assert "number-sample" not in run("pack", "--help").stdout


@pytest.mark.usefixtures("downloads")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pack", "nowhere"], 1, "nowhere is empty or not there"),
        (["pack", "urls.csv"], 1, "has no column of URLs: it has link_to, caption"),
        (["pack", "downloads", "downloads/out"], 2, "lies in the source"),
        (["pack", "https://a.b/c.tar"], 2, "only tables are read from the web"),
        (["pack", "pipe:cat x.tar"], 2, "local paths, s3:// and tables by https://"),
        (["pack", "--retry-rejected"], 2, "is no table of URLs"),
        (["pack", "--retry-rejected", "--overwrite"], 2, "give one"),
        (["pack", "--verify-hash", "crc"], 2, "write COLUMN:HASH"),
        (["pack", "--buckets", "512,256"], 2, "give rising sizes"),
        (["pack", "--filter", "__import__('os')"], 2, "cannot be used"),
        (["pack", "--filter", "a >"], 2, "at character"),
        (["pack", "--append", "--overwrite"], 2, "give one of them"),
        (["pack", "--min-caption", "9", "--max-caption", "5"], 2, "no caption fits both"),
        (["pack", "urls.py"], 1, "urls.py is a file of a kind that pack does not know"),
        (["pack", "--max-side", "9"], 2, "--max-side needs --reencode"),
        (["pack", "--max-shard-size", "big"], 2, "is no size"),
        (["pack", "--reencode", "png:3"], 2, "write jpg:95"),
        (["pack", "--no-such-option"], 2, "No such option"),
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
def test_other_settings_on_resume_are_an_error_that_says_what_differs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["pack"]) == 0
    assert main(["pack", "--check", "header", "--min-size", "300"]) == 1
    said = capfd.readouterr().err
    assert ": --check header (was full); --min-size 300 (was 0): run with those" in said
    assert "--overwrite" in said


@pytest.mark.usefixtures("downloads")
def test_a_damaged_manifest_is_one_line_with_the_way_out(
    capfd: pytest.CaptureFixture[str],
) -> None:
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


def test_version_is_the_packages(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"wdsprep, version {__version__}\n"


def test_index_writes_what_pack_would(downloads: Path) -> None:
    assert run("pack", str(downloads)).returncode == 0
    indexes = sorted(Path("shards/images").rglob("*.idx"))
    whole = [path.read_bytes() for path in indexes]
    for path in indexes:
        path.unlink()
    assert run("index", "shards/images").stdout == "2 indexes written, of 2 samples\n"
    assert [path.read_bytes() for path in indexes] == whole


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
    assert said[0] == "1 index written, of 2 samples"
    assert said[1] == f"nothing left to do: each tar in {tmp_path} has its index"


def test_every_command_and_option_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for name, command in cli.commands.items():
        assert f"wdsprep {name}" in text
        for option in command.params:
            for spelling in option.opts:
                assert not spelling.startswith("--") or spelling in text, f"{name} {spelling}"


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def output(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.system
def test_python_blocks_of_the_readmes_run_on_what_pack_makes(downloads: Path) -> None:
    assert run("pack", str(downloads)).returncode == 0
    encode, read_images, read_latents, load, resume, online, *_ = python_blocks("README.md")
    assert output(encode) == "True 2 ()\n"
    assert output(read_images) == "000000000000 (300, 400) a photo\n"
    assert output(read_latents) == "000000000000 (4, 32, 32) (77, 64) a photo\n"
    shapes = "torch.Size([2, 4, 32, 32]) torch.Size([2, 77, 64])"
    assert output(load).startswith(f"{shapes} ['0000")
    imports = "import wdsprep\n"
    assert output(imports + resume).startswith("3 ['0000")
    assert output(online).startswith(f"{shapes} ['0000")
    read_sample = python_blocks("shards/README.md")[0]
    print_one = f"{read_sample}\nprint(*read_sample('shards/images/256/000000.tar', 0))"
    assert output(print_one) == "000000000000.jpg 000000000000.json 000000000000.txt\n"


# Commands of the README that need what a test does not have: other data, real weights, a cluster.
NEEDS = ("s3://", "laion", "photos/", "parquet", "part-{", "--trial", "--limit")
NEEDS += ("tools/", "torchrun", "energon", "shards/trial", "git clone", "http.server", "kill %1")


def commands_of_the_readme() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition(" #")[0].strip().replace(".venv/bin/", "") for line in lines]


def test_every_wdsprep_command_of_the_readme_can_be_parsed() -> None:
    found = [shlex.split(line) for line in commands_of_the_readme() if line.startswith("wdsprep")]
    assert len(found) > 25
    for _program, name, *options in found:
        cli.commands[name].make_context(name, options)


@pytest.mark.system
def test_the_commands_of_the_readme_run_one_after_the_other(downloads: Path) -> None:
    serve = partial(SimpleHTTPRequestHandler, directory=str(downloads))
    server = ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever).start()
    ran = []
    try:
        for line in commands_of_the_readme():
            if any(need in line for need in NEEDS) or line in ran:
                continue
            line = line.replace("127.0.0.1:8000", f"127.0.0.1:{server.server_port}")
            line += " --model tiny" if line.startswith("wdsprep encode") else ""
            env = {**os.environ, "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}"}
            done = subprocess.run(
                ["bash", "-c", line], env=env, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, f"{line}: {done.stderr}"
            ran.append(line)
    finally:
        server.shutdown()
        server.server_close()
    assert len(ran) >= 12, ran
    assert "wdsprep report" in "".join(ran)


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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_python_cannot_raise_comes_again(signum: signal.Signals) -> None:
    code = LOST.format(signum=signum)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.returncode == 130
    assert done.stderr.strip() == "wdsprep: interrupted: run the same command to go on from here"
