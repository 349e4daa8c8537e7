"""Where runs meet or are killed: nothing is lost, and the bytes are those of an undisturbed run."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from tests.kit.damaged import check, findings, flip, pack_here, source_of_photos
from tests.kit.kills import JOBS, Kills
from tests.kit.meetings import Meeting, Stage
from tests.kit.packs import jpeg, manifest_of, once, outcome, rejects_of, tree
from tests.kit.sealed_files import receipt_of_images
from tests.kit.sites import FAST, KINDS, Site, table_of
from tests.kit.webserver import Connection, Request, WebServer, ok, status
from wdsprep.checks.repair import do_repair, plan_repair
from wdsprep.dataset.draft import Draft
from wdsprep.dataset.unit_locks import Edition
from wdsprep.store import open_store

RETRY = (*FAST, "--samples-per-shard", "4")
ROLLING = ("--samples-per-shard", "9", "--max-shard-size", "20KB", "--buckets", "32")
ROUNDS = {"local": 4, "s3": 1}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as opened:
        yield opened


class Holding:
    """A site that gives each client other pictures, and holds one back from the first client. One
    that is `failing` cannot be had the next time that it is asked for."""

    def __init__(self, held: int) -> None:
        self._held, self.reached, self.released = held, threading.Event(), threading.Event()
        self.failing = -1

    def __call__(self, connection: Connection, request: Request) -> bool:
        number = int(request.path.rpartition("/")[2] or 0)
        is_second = self.reached.is_set()
        if number == self._held and not is_second:
            self.reached.set()
            self.released.wait(30)
        if number == self.failing:
            self.failing = -1
            return status(503)(connection, request)
        return ok(jpeg(number + 1000 * is_second, (70, 64)))(connection, request)


def files(root: Path) -> dict[str, bytes]:
    """But those without a name yet."""
    return {name: data for name, data in tree(root).items() if not name.endswith(".tmp")}


def pack_words(table: Path, out: Path, *options: str) -> list[object]:
    return ["pack", table, out, *once(*FAST, "--ignore-robots", "--workers", "1", *options)]


@contextlib.contextmanager
def held_up(
    stage: Stage, root: Path, out: Path, *options: str, failing: int = -1
) -> Iterator[tuple[Path, Callable[[], int]]]:
    """A run of `pack` that lacks one answer; what ends the block lets it go on, and says how it
    ended."""
    site = Holding(1)
    with WebServer(site) as server:
        table = table_of(root / "in", server, ["ok"] * 9)
        process = stage.start(pack_words(table, out, *options), root / "log")
        assert site.reached.wait(20)
        while len(server.paths()) < 9:  # the others have been asked for
            time.sleep(0.01)
        site.failing = failing

        def go_on() -> int:
            site.released.set()
            return stage.end(process)

        yield table, go_on


@pytest.mark.system
def test_an_overwrite_ends_a_run_that_is_under_way_and_what_it_packs_stays(
    stage: Stage, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with held_up(stage, tmp_path, out, *ROLLING) as (table, go_on):
        words = pack_words(table, out, *ROLLING)
        assert stage.run([*words, "--overwrite"], tmp_path / "log") == 0
        packed = files(out)
        assert go_on() == 1
        assert "was started over by another run" in (tmp_path / "log").read_text()
        assert files(out) == packed
        assert findings(out) == []
        assert stage.run(words, tmp_path / "log") == 0
    assert files(out) == packed


@pytest.mark.system
def test_a_run_that_wakes_packs_no_row_that_a_retry_has_now(stage: Stage, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--samples-per-shard", "9", "--buckets", "32")
    with held_up(stage, tmp_path, out, *options, failing=5) as (table, go_on):
        words = pack_words(table, out, *options)
        assert stage.run(words, tmp_path / "log") == 0
        assert [reject["source"] for reject in rejects_of(out)] == ["urls.parquet#5"]
        assert stage.run([*words, "--retry-rejected"], tmp_path / "log") == 0
        flip(out / "32/000000.tar", 5_000)
        assert stage.run(["repair", out, "--yes", "--workers", "1"], tmp_path / "log") == 0
        assert go_on() == 3
        assert "a retry has taken rows of 000000" in (tmp_path / "log").read_text()
        assert stage.run(words, tmp_path / "log") == 0
    assert findings(out) == []
    assert outcome(out) == {f"urls.parquet#{number}": "packed" for number in range(9)}


def test_a_repair_with_an_old_plan_lets_a_slice_be_that_was_packed_again(tmp_path: Path) -> None:
    source = source_of_photos(tmp_path / "in")
    out = pack_here(source, tmp_path / "out")
    whole = tree(out)
    flip(out / "32/000001.tar", 5_000)
    old = plan_repair(check(out).surveys[0])
    do_repair(old)
    pack_here(source, out)
    assert tree(out) == whole
    done = do_repair(old)
    assert done.changed == ("000001",)
    assert tree(out) == whole


STOPPED = """
import os, signal, sys
from wdsprep.dataset.draft import Draft
from wdsprep.dataset.unit_locks import Edition
from wdsprep.dataset.manifest import Receipt
from wdsprep.store import open_store
from wdsprep.store.local import LocalStore

store, after = open_store(sys.argv[1]), int(sys.argv[2])
names = iter(range(1, 100))


class Stopping(Edition):
    def holding(self, unit, giving=()):
        replace = os.replace
        def stop_and_replace(*paths):
            if next(names) == after:
                os.kill(os.getpid(), signal.SIGSTOP)
            return replace(*paths)
        os.replace = stop_and_replace
        return super().holding(unit, giving)


with Draft(Stopping(store=store), "000000") as draft:
    tar = draft.shard("32/000000.tar")
    tar.add("000000000000", [("txt", sys.argv[3].encode())])
    receipt = Receipt(dataset="images", unit="000000", generation=0, settings={"buckets": [64]},
                      input="x", inputs=1, shards=(tar.finish(),), rejects={})
    print(draft.finish(receipt, {"inputs/000000.jsonl": b""}).shards[0].digest)
"""


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_who_is_stopped_while_it_gives_names_holds_up_nobody_and_names_nothing_later(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.store.local.PATIENCE_S", 0.1)

    def draft(step: int, text: str) -> "subprocess.Popen[str]":
        words = [sys.executable, "-c", STOPPED, str(tmp_path / "out"), str(step), text]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    slow = draft(after, "of the one that is stopped")
    while not Path(f"/proc/{slow.pid}/stat").read_text().rpartition(")")[2].startswith(" T"):
        assert slow.poll() is None, slow.communicate()
        time.sleep(0.01)
    store = open_store(str(tmp_path / "out"))
    with Draft(Edition(store=store), "000000") as mine:
        tar = mine.shard("32/000000.tar")
        tar.add("000000000000", [("txt", b"mine")])
        receipt = receipt_of_images(input="x", inputs=1, shards=(tar.finish(),))
        assert mine.finish(receipt, {"inputs/000000.jsonl": b""}) == receipt
    done = files(tmp_path / "out")
    os.kill(slow.pid, signal.SIGCONT)
    said, complaint = slow.communicate(timeout=30)
    assert said.strip() == receipt.shards[0].digest, complaint  # the one that was finished
    assert tree(tmp_path / "out") == done
    assert blake3(done["32/000000.tar"]).hexdigest() == receipt.shards[0].digest


# --- retries, and files beside images that the web may not have any more


@pytest.mark.parametrize("harm", ["damaged", "missing"])
@pytest.mark.parametrize("beside", ["rejects", "inputs"])
def test_a_bad_file_beside_images_from_the_web_costs_none_of_them(
    tmp_path: Path, site: tuple[Site, WebServer], beside: str, harm: str
) -> None:
    _, server = site
    table = table_of(tmp_path, server, KINDS)
    out = pack_here(table, tmp_path / "out", *RETRY)
    before = tree(out)
    asked = len(server.paths())
    path = out / beside / "000001.jsonl"
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(b"?" + path.read_bytes()[1:])
    assert findings(out) != []
    repair = plan_repair(check(out).surveys[0])
    assert (repair.units, repair.names, list(repair.mended)) == ({}, (), ["000001"])
    do_repair(repair)
    pack_here(table, out, *RETRY)
    assert findings(out) == []
    assert len(server.paths()) == asked
    after = tree(out)
    if beside == "inputs":
        assert after == before
    else:
        lost = [reject for reject in rejects_of(out) if reject["code"] == "record_lost"]
        assert len(lost) == (3 if harm == "missing" else 1)
        assert sum(r.inputs for r in manifest_of(out).receipts) == len(KINDS)
    assert {n for n in before if n.endswith(".tar")} == {n for n in after if n.endswith(".tar")}


# --- at random


@pytest.mark.system
@pytest.mark.parametrize("place", ["local", "s3"])
def test_whatever_runs_meet_one_quiet_run_makes_all_sound_and_nothing_is_lost(
    place: str, out_url: str, stage: Stage, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")  # pytest shows it where the test fails
    with Meeting(stage, tmp_path, out_url, seed).begun() as meeting:
        for _ in range(ROUNDS[place]):
            done = meeting.play()
            assert done.findings == [], done.commands


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kills]:
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")  # pytest shows it where a test fails
    root = tmp_path_factory.mktemp("kills")
    with Stage(alike=True) as stage:
        yield Kills(stage, root, str(root), seed)


@pytest.mark.system
@pytest.mark.parametrize("name", JOBS)
def test_killed_and_resumed_a_command_leaves_the_bytes_of_an_undisturbed_run(
    name: str, kills: Kills
) -> None:
    *_, done = kills.play(name, 1)
    assert done.kills
    assert done.findings == []
