"""Tables of URLs, packed: each row once, or rejected with its code and its URL."""

import contextlib
import hashlib
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.packs import (
    BUCKETS,
    command,
    jpeg,
    manifest_of,
    outcome,
    pack,
    rejects_of,
    run_pack,
    samples_of,
    temporaries,
    upload,
    write_files,
)
from tests.kit.sites import FAST, KINDS, MENDED, Site, kill_when_asked, table_of
from tests.kit.webserver import Behaviour, WebServer, black_hole, in_turn, ok, stall
from wdsprep.cli import cli
from wdsprep.errors import FingerprintError, UsageError, WorkError


def test_each_row_is_packed_or_rejected_with_its_code_and_its_url(
    tmp_path: Path, site: tuple[Site, WebServer], capfd: pytest.CaptureFixture[str]
) -> None:
    _, server = site
    kinds = ["ok", "gone", "html", "busy", "ok", "ok"]
    table = table_of(tmp_path, server, kinds)
    out = pack(table, tmp_path / "out", *FAST, "--compute-hash", "sha256", "--filter", "n < 5")
    codes = {"ok": "packed", "gone": "http_4xx", "html": "not_an_image", "busy": "http_5xx"}
    assert outcome(out) == {
        f"urls.parquet#{n}": "filtered" if n == 5 else codes[kind] for n, kind in enumerate(kinds)
    }
    for sample in samples_of(out):
        facts = sample["json"]
        number = facts["meta"]["n"]
        assert sample["__key__"] == f"000000{number:06d}"
        assert facts["url"] == f"{server.url}/ok/{number}"
        assert facts["sha256"] == hashlib.sha256(jpeg(number)).hexdigest()
        assert (sample["jpg"], sample["txt"]) == (jpeg(number), f"c {number}")
    assert {reject["url"] for reject in rejects_of(out) if reject["code"] == "http_4xx"} == {
        f"{server.url}/gone/1"
    }
    assert not [path for path in server.paths() if path.endswith("/5")]  # filtered before
    said = capfd.readouterr()
    assert "6 URLs to download, in column 'url', captions in 'caption'" in said.err
    assert "worst hosts: 127.0.0.1 (http_4xx 1" in said.out
    assert "1 failed in a way that may pass: --retry-rejected" in said.out


def test_digests_are_verified_and_columns_kept_as_asked(
    tmp_path: Path, site: tuple[Site, WebServer]
) -> None:
    _, server = site
    digests = [hashlib.md5(jpeg(n)).hexdigest() for n in (0, 7)] + [""]
    table = table_of(tmp_path, server, ["ok"] * 3, md5=digests)
    options = ("--verify_hash", '["md5","md5"]', "--save_additional_columns", '["n"]')
    out = pack(table, tmp_path / "out", *FAST, *options)
    assert list(outcome(out).values()) == ["packed", "hash_mismatch", "hash_mismatch"]
    assert [sample["json"]["meta"] for sample in samples_of(out)] == [{"n": 0}]
    with pytest.raises(UsageError, match=r"no column 'sha' \(--verify-hash\)"):
        pack(table, tmp_path / "other", *FAST, "--verify-hash", "sha:sha256")


def test_what_decides_only_how_to_fetch_may_differ_on_resume_and_nothing_is_fetched_twice(
    tmp_path: Path, site: tuple[Site, WebServer]
) -> None:
    _, server = site
    table = table_of(tmp_path, server, ["ok", "gone"])
    out = pack(table, tmp_path / "out", *FAST)
    before = server.paths()
    pack(table, out, *FAST, "--timeout", "3", "--per-host", "1", "--requests", "9")
    assert server.paths() == before
    with pytest.raises(FingerprintError, match=r": --max-bytes 9 \(was 50000000\): run with"):
        pack(table, out, *FAST, "--max-bytes", "9")
    with pytest.raises(UsageError, match="is not a table of URLs"):
        pack(out / "32", tmp_path / "more", "--retry-rejected")


def test_rows_of_s3_are_packed_only_where_the_user_allows_it(tmp_path: Path, bucket: str) -> None:
    write_files(tmp_path, {"up/a.jpg": jpeg(0), "urls.txt": f"s3://{bucket}/in/a.jpg\n"})
    upload(tmp_path / "up", f"s3://{bucket}/in")
    table = tmp_path / "urls.txt"
    out = pack(table, tmp_path / "out", *FAST)
    (reject,) = rejects_of(out)
    assert reject["code"] == "private_address"
    assert "--allow-s3" in reject["detail"]
    pack(table, out, *FAST, "--allow-s3")
    assert [reject["code"] for reject in rejects_of(out)] == ["private_address"]
    pack(table, out, *FAST, "--allow-s3", "--retry-rejected")
    assert outcome(out) == {"urls.txt#0": "packed"}


SILENT = ("--timeout", "0.2", "--ignore-robots")


@pytest.fixture
def silent_sites() -> Iterator[list[str]]:
    """Of nine addresses, as all are where the network is down."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(black_hole(f"127.0.1.{n}")) for n in range(1, 10)]


def silent_rows(sites: list[str], count: int) -> str:
    return "".join(f"{sites[n % len(sites)]}/{n}.jpg\n" for n in range(count))


def test_a_network_that_is_down_stops_the_run_and_writes_nothing(
    tmp_path: Path, silent_sites: list[str]
) -> None:
    table, out = tmp_path / "urls.txt", tmp_path / "out"
    table.write_text(silent_rows(silent_sites, 30))
    with pytest.raises(WorkError, match=r"none of the last 30 URLs .* \(timeout 30\): the network"):
        pack(table, out, *FAST, *SILENT)
    assert not list(out.glob("*/*"))
    assert manifest_of(out).receipts == ()
    found = outcome(pack(table, out, *FAST, *SILENT, "--ignore-outage"))
    assert list(found.values()) == ["timeout"] * 30
    assert manifest_of(out).complete


def test_names_that_do_not_exist_are_rejects_however_many(tmp_path: Path) -> None:
    """Nobody has these, ever."""
    table = tmp_path / "urls.txt"
    table.write_text("".join(f"http://a.site{n}.invalid/{n}.jpg\n" for n in range(30)))
    out = pack(table, tmp_path / "out", *FAST, "--timeout", "0.5")
    assert list(outcome(out).values()) == ["dns"] * 30
    assert manifest_of(out).complete


@pytest.mark.parametrize("then", [ok(jpeg(0)), stall], ids=["up", "down"])
def test_many_silent_hosts_are_rejects_while_one_that_answered_still_does(
    tmp_path: Path, silent_sites: list[str], then: Behaviour
) -> None:
    table, rows = tmp_path / "urls.txt", 210
    with WebServer({"/0.jpg": in_turn(ok(jpeg(0)), then)}, address="127.0.2.1") as server:
        table.write_text(f"{server.url}/0.jpg\n{silent_rows(silent_sites, rows)}")
        if then is stall:
            with pytest.raises(WorkError, match="nor do hosts that did before"):
                pack(table, tmp_path / "out", *FAST, *SILENT)
        else:
            found = outcome(pack(table, tmp_path / "out", *FAST, *SILENT))
            assert Counter(found.values()) == {"packed": 1, "timeout": rows}
        assert server.paths() == ["/0.jpg"] * 2


def test_the_first_lines_of_the_help_name_tables_of_urls() -> None:
    assert "tables of URLs" in (cli.commands["pack"].help or "")


@pytest.mark.system
def test_killed_at_random_points_no_row_is_lost_or_doubled(
    tmp_path: Path, site: tuple[Site, WebServer]
) -> None:
    behaviour, server = site
    kinds = KINDS * 12
    table = table_of(tmp_path, server, kinds)
    seed = random.SystemRandom().randrange(10**6)
    sys.stdout.write(f"seed {seed}\n")  # pytest shows it where the test fails
    chance, out = random.Random(seed), tmp_path / "out"
    for retry, kills in {(): 2, ("--retry-rejected",): 1}.items():
        words = command(table, out, *FAST, "--samples-per-shard", "15", *retry)
        for _ in range(kills):
            kill_when_asked(words, server, chance.randrange(60))
        done = run_pack(table, out, *words[4 + len(BUCKETS) :])
        assert done.returncode == 0, done.stderr
        codes = MENDED if behaviour.is_mended else MENDED | {"busy": "http_5xx"}
        assert outcome(out) == {f"urls.parquet#{n}": codes[kind] for n, kind in enumerate(kinds)}
        manifest = manifest_of(out)
        assert manifest.complete
        assert sum(receipt.inputs for receipt in manifest.receipts) == len(kinds)
        assert sum(manifest.rejects.values()) == len(rejects_of(out))
        assert not temporaries(out)
        behaviour.is_mended = True
