"""Workers that find another wdsprep than their driver has: real processes, a real Ray."""

import shutil
from pathlib import Path

import pytest

import wdsprep
from tests.kit.clusters import LEAN
from tests.kit.command_lines import python
from tests.kit.packs import manifest_of
from tests.kit.packs import pack as pack_here
from tests.kit.packs import photos as write_photos
from wdsprep.runners.worker_versions import find_refusal
from wdsprep.version import __version__

PACKAGE = Path(wdsprep.__file__).parent
# Its own wdsprep is imported by then; workers look for theirs.
DRIVER = """
import os, sys
import wdsprep.version
other, *sys.argv[1:] = sys.argv[1:]
if other:
    sys.path.insert(0, other)
    os.environ["PYTHONPATH"] = other
"""
COMMAND = f"{DRIVER}from wdsprep.__main__ import main; sys.exit(main())"
STREAM = f"""{DRIVER}
import ray, wdsprep
from wdsprep.errors import WorkError
def stream(**options):
    how = wdsprep.Encode(resolution=32, model="tiny", device="cpu")
    return wdsprep.stream(sys.argv[1], encode=how, global_batch=4, decoders=(1, 1),
                          encoders=(1, 1), **options)
def told(call):
    try:
        print("told:", len(list(call())))
    except WorkError as error:
        print("told:", error)
    except ray.exceptions.RayTaskError as error:
        print("told:", str(error).splitlines()[-1])
ray.init("local", num_cpus=3, log_to_driver=False, logging_level="ERROR", **{LEAN})
with stream() as feed:
    told(lambda: ray.get(ray.remote(num_cpus=0)(lambda got: got).remote(feed.trainers)))
    told(lambda: feed.trainers[0])
told(lambda: stream(drop_text=0.5).trainers)
"""


def site(folder: Path, kind: str) -> Path:
    """A folder with a wdsprep of its own."""
    package = folder / "wdsprep"
    if kind == "none":  # the environment of the tests has one, further down the path
        package.mkdir(parents=True)
        Path(package, "__init__.py").write_text("raise ImportError('there is none')")
        return folder
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    if kind == "newer":  # which need not have the modules of now
        Path(package, "runners/worker_versions.py").unlink()
        Path(package, "version.py").write_text('__version__ = "10.20.30"\n')
    elif kind == "partial":
        Path(package, "runners/ray/worker.py").unlink()
        Path(package, "loading/streaming/stages.py").unlink()
    return folder


def what(folder: Path, kind: str) -> str:
    """What is said of it."""
    place = folder / "wdsprep"
    lacks = ", which cannot be imported: No module named 'wdsprep."
    return {
        "newer": f" has wdsprep 10.20.30 ({place}), and its driver has {__version__}: ",
        "partial": f" has wdsprep {__version__} ({place}){lacks}",
        "none": f" has no wdsprep, and its driver has {__version__}: ",
    }[kind]


def told(other: object, images: Path) -> list[str]:
    """What a stream tells, apart from Ray."""
    lines = python(STREAM, other, images, cwd="/").stdout.splitlines()
    return [line.removeprefix("told: ") for line in lines if line.startswith("told: ")]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos", 12)


TWO = ("--buckets", "32", "--samples-per-shard", "2")


def check_refused_and_resumed(photos: Path, tmp_path: Path, kind: str, runner: str) -> list[str]:
    """The lines of the run that is refused, of a dataset of which a part is there."""
    out, other = tmp_path / "out", site(tmp_path / "site", kind)
    pack_here(photos, out, *TWO, "--limit", "4")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    words = ("pack", photos, out, *TWO, "--workers", "1", "--runner", runner)
    lines = python(COMMAND, other, *words, exit_code=1, cwd="/").stderr.splitlines()
    after = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert {p.name for p in before} == {p.name for p in after}
    assert {p.name for p in before if before[p] != after[p]} <= {"wdsprep.json"}
    manifest = manifest_of(out)
    assert (manifest.complete, manifest.samples, dict(manifest.rejects)) == (False, 4, {})
    pack_here(photos, out, *TWO)
    whole = manifest_of(out)
    assert (whole.complete, whole.samples) == (True, 12)
    return lines


@pytest.mark.parametrize("kind", ["newer", pytest.param("none", marks=pytest.mark.system)])
def test_a_local_worker_of_another_version_ends_the_run_which_goes_on_later(
    photos: Path, tmp_path: Path, kind: str
) -> None:
    lines = check_refused_and_resumed(photos, tmp_path, kind, "local")
    remedy = "run again, with what is installed now: it goes on from there"
    said = f"a worker process{what(tmp_path / 'site', kind)}{remedy}"
    assert [line for line in lines if "wdsprep" in line] == [f"wdsprep: {said}"]
    assert not any("Traceback" in line for line in lines)


@pytest.mark.system
@pytest.mark.parametrize("kind", ["newer", "partial"])
def test_a_ray_node_of_another_version_ends_the_run_which_goes_on_later(
    photos: Path, tmp_path: Path, kind: str
) -> None:
    lines = check_refused_and_resumed(photos, tmp_path, kind, "ray")
    (said,) = [line for line in lines if "its driver has" in line]
    assert said.startswith("wdsprep: the worker on ")
    assert what(tmp_path / "site", kind) in said
    remedy = f"install wdsprep {__version__} on every node and run again: it goes on from there"
    assert said.endswith(f": {remedy}")
    assert not any("Traceback" in line for line in lines)


@pytest.mark.system
@pytest.mark.parametrize("kind", ["newer"])
def test_a_stream_over_a_node_of_another_version_ends_with_what_differs(
    photos: Path, tmp_path: Path, kind: str
) -> None:
    """Where a trainer is sent, where workers are made, and where the empty caption is encoded."""
    pack_here(photos, tmp_path / "out", *TWO)
    other = site(tmp_path / "site", kind)
    sent, *others = told(other, tmp_path / "out")
    assert sent == f"RuntimeError: {find_refusal(sent)}"
    assert len(others) == 2
    for line in (find_refusal(sent), *others):
        assert line.startswith("the worker on ")
        assert what(other, kind) in line
        assert line.endswith("begin a new stream from the state of the last batch")
