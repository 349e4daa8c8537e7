"""The README and the pages it leads to: short, complete, and every line of code in them runs."""

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.kit.command_lines import ran
from tests.kit.encodes import in_this_process
from tests.kit.packs import packing_here
from tests.kit.paths import README, ROOT, blocks, format_recipe, pages
from tests.kit.webserver import WebServer, ok
from tools import option_tables
from wdsprep.cli import cli, main
from wdsprep.terminal import TERMINAL

PAGES = pages()
SIZES = {"a": (300, 400), "b": (640, 520), "c": (100, 100)}
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Lines of the README that need a network or the clone.
ONLINE = ("pip install", "pipx", "uv tool", "git clone", "--model sd2", "tools/demo", "tools/test")
# Lines of the pages that need what a test does not have: other data, real weights, a cluster.
NEEDS = ("s3://", "gs://", "az://", "hf://", "laion", "photos/", "parquet", "part-{", "--trial")
NEEDS += ("--limit", "tools/", "torchrun", "energon", "shards/trial", "http.server", "kill %1")
NEEDS += ("install",)
# `wdsprep` with fewer pictures to draw, and one plain process a run: Ray has tests of its own.
FEW = f"""#!{sys.executable}
import sys

from wdsprep import cpus

cpus.usable_cpus = lambda: 1

from wdsprep.__main__ import main
from wdsprep.cli import demo
from wdsprep.runners import options

demo.write_pictures.__defaults__ = 12, (256, 256, 256, 512)
options.choose_runner = lambda *_wanted, **_there: "local"
sys.exit(main())
"""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Those that headings have: their words with dashes between."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands_of(page: Path) -> list[str]:
    lines = "".join(code for _kind, code in blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [line.partition(" #")[0].strip() for line in lines]


def run_here(line: str, *, in_a_process: bool = False) -> str:
    """A line of shell; what wdsprep is asked for is done in this process, which has torch, or in
    one of its own."""
    program, *words = shlex.split(line, comments=True)
    if program != "wdsprep" or in_a_process:
        return ran("bash", "-c", line, timeout=900).stdout
    with in_this_process(), packing_here(), contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(words) == 0, line
    return said.getvalue()


def run_code(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(code, {"__name__": "__main__"})
    return said.getvalue()


def test_the_readme_can_be_read_in_one_go_and_leads_to_every_page() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 200
    linked = {(ROOT / link).resolve() for link in LINK.findall(text)}
    assert {*PAGES} - {README} <= linked


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [page for page in PAGES if page != README], ids=name_of)
def test_a_page_leads_back_to_the_readme(page: Path) -> None:
    *_, last = LINK.findall(page.read_text())
    assert (page.parent / last).resolve() == README


def test_every_command_and_option_is_in_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for name, command in cli.commands.items():
        assert f"wdsprep {name}" in text
        for option in command.params:
            for spelling in option.opts:
                assert not spelling.startswith("--") or spelling in text, f"{name} {spelling}"


def test_the_guide_for_contributors_and_ci_name_files_that_are_there() -> None:
    guide = ROOT / "wdsprep/README.md"
    named = re.findall(r"`((?:[\w.]+/)+[\w.]+)`", guide.read_text())
    assert len(named) > 30
    for name in named + re.findall(r"tests/[\w/]+\.py", (ROOT / ".ci/run").read_text()):
        assert (ROOT / name).exists() or (ROOT / "wdsprep" / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_of_options_are_as_declared(page: Path) -> None:
    """`python -m tools.option_tables` writes them."""
    text = page.read_text()
    assert option_tables.rewritten(text) == text
    assert text.count("<!-- options: ") == len(option_tables.TABLE.findall(text))


def test_every_wdsprep_command_of_the_pages_can_be_parsed() -> None:
    lines = [line for page in PAGES for line in commands_of(page)]
    found = [shlex.split(line) for line in lines if line.startswith("wdsprep ")]
    assert len(found) > 25
    with TERMINAL.during_command():  # after which the words of one, such as -v, hold no more
        for _program, name, *options in found:
            cli.commands[name].make_context(name, options)


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, where `wdsprep` is one that draws few pictures."""
    home, programs = tmp_path / "home", tmp_path / "programs"
    home.mkdir()
    programs.mkdir()
    (programs / "wdsprep").write_text(FEW)
    (programs / "wdsprep").chmod(0o755)
    (programs / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(home)
    return home


@pytest.mark.system
def test_the_readme_runs_from_its_first_line_to_its_last_with_nothing_else(few: Path) -> None:
    """Without a network, as somebody would who reads it in its order: the demo and the first pack
    in processes of their own, all else in this one."""
    outputs = []
    for kind, code in blocks(README, "sh", "python"):
        if kind == "python":
            outputs.append(run_code(code))
            continue
        for line in code.splitlines():
            if not any(word in line for word in ONLINE):
                is_own = len(outputs) < 2
                outputs.append(run_here(line, in_a_process=is_own))
    assert len(outputs) >= 10
    assert {path.name for path in few.iterdir()} == {"demo", "shards", "report.html"}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a folder `downloads` here: three photos, one caption."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "downloads"
    folder.mkdir()
    for name, size in SIZES.items():
        Image.effect_noise(size, 50).convert("RGB").save(folder / f"{name}.jpg")
    (folder / "a.txt").write_text("a photo")
    files = {f"/{path.name}": ok(path.read_bytes()) for path in folder.iterdir()}
    with WebServer(files) as server:
        yield f"127.0.0.1:{server.port}"


# A loop over webdataset that a page leaves has a file open until it is forgotten.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.system
def test_what_the_pages_say_runs_page_after_page(served: str) -> None:
    """On three photos. Their lines of shell and their blocks called python, in their order."""
    found: dict[str, list[str]] = {}
    for room in ("runners", "fetch", "encoding", "loading", "checks", "reporting"):
        page = ROOT / "wdsprep" / room / "README.md"
        for line in commands_of(page):
            if not any(need in line for need in NEEDS):
                if line.startswith("wdsprep encode") and "--model" not in line:
                    line += " --model tiny"
                found[line] = [run_here(line.replace("127.0.0.1:8000", served))]
        codes = [code for _kind, code in blocks(page, "python")]
        found[room] = [run_code(code) for code in codes]
    assert len(found) > 16
    load, resume, joined, online, images, latents = found["loading"]
    assert found["encoding"] == ["True 2 ()\n", "2 1\n"]
    assert images == "000000000000 (300, 400) a photo\n"
    assert latents == "000000000000 (4, 32, 32) (77, 64) a photo\n"
    shapes = "torch.Size([2, 4, 32, 32]) torch.Size([2, 77, 64])"
    assert load.startswith(f"{shapes} ['0000")
    assert resume.startswith("3 ['0000")
    assert all(text.startswith(f"{shapes} ['0000") for text in (joined, online))
    read_sample = format_recipe("read_sample")
    print_one = f"{read_sample}\nprint(*read_sample('shards/images/256/000000.tar', 0))"
    members = "000000000000.jpg 000000000000.json 000000000000.txt\n"
    assert run_code(print_one) == members


def test_the_bits_of_bfloat16_are_read_as_the_page_says() -> None:
    code = format_recipe("embedding") + (
        "\nimport io, torch\n"
        "values = torch.randn(7, 5).bfloat16()\n"
        "file = io.BytesIO()\n"
        "np.save(file, values.view(torch.int16).numpy().view('<u2'))\n"
        "file.seek(0)\n"
        "assert np.array_equal(embedding(file, 'bfloat16'), values.float().numpy())"
    )
    exec(code, {})


def test_the_recipes_in_python_can_be_parsed() -> None:
    """Those that are not run here are held by the tests of what they are about."""
    found = [code for page in PAGES for _kind, code in blocks(page, "py", "python")]
    assert len(found) > 15
    for code in found:
        compile(code, "recipe", "exec")
