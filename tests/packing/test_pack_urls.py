"""Tables of URLs are packed to the same dataset anywhere; rejects are fetched again."""

import contextlib
import hashlib
import random
import sys
from pathlib import Path

import pytest
from blake3 import blake3

import wdsprep
from tests.kit.kills import CutError
from tests.kit.packs import (
    BUCKETS,
    command,
    jpeg,
    manifest_of,
    outcome,
    pack,
    packing_here,
    rejects_of,
    run_pack,
    samples_of,
    temporaries,
    touch,
    upload,
    write_files,
)
from tests.kit.sites import FAST, KINDS, MENDED, Site, kill_when_asked, table_of
from tests.kit.webserver import Connection, Request, WebServer, black_hole, ok
from wdsprep.cli import main
from wdsprep.errors import FingerprintError, UsageError, WorkError
from wdsprep.store.local import LocalStore


def test_each_row_is_packed_or_rejected_with_its_code_and_its_url(
    tmp_path: Path, site: tuple[Site, WebServer], capfd: pytest.CaptureFixture[str]
) -> None:
    _, server = site
    table = table_of(tmp_path, server, ["ok", "gone", "html", "busy", "ok", "ok"])
    out = pack(table, tmp_path / "out", *FAST, "--compute-hash", "sha256", "--filter", "n < 5")
    codes = ["packed", "http_4xx", "not_an_image", "http_5xx", "packed", "filtered"]
    assert outcome(out) == {f"urls.parquet#{n}": code for n, code in enumerate(codes)}
    for sample in samples_of(out):
        facts = sample["json"]
        number = facts["meta"]["n"]
        assert sample["__key__"] == f"000000{number:06d}"
        assert facts["url"] == f"{server.url}/ok/{number}"
        assert facts["sha256"] == hashlib.sha256(jpeg(number)).hexdigest()
        assert (sample["jpg"], sample["txt"]) == (jpeg(number), f"c {number}")
    gone = [reject["url"] for reject in rejects_of(out) if reject["code"] == "http_4xx"]
    assert gone == [f"{server.url}/gone/1"]
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
    options = ("--verify-hash", "md5", "--save-additional-columns", "n")
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
    with pytest.raises(FingerprintError, match=r": max-bytes: 50000000, now 9: run with"):
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


def test_a_network_that_is_down_stops_the_run_and_writes_nothing(tmp_path: Path) -> None:
    """Nine addresses are silent, as all are then."""
    table, out = tmp_path / "urls.txt", tmp_path / "out"
    with contextlib.ExitStack() as stack:
        sites = [stack.enter_context(black_hole(f"127.0.1.{n}")) for n in range(1, 10)]
        table.write_text("".join(f"{sites[n % 9]}/{n}.jpg\n" for n in range(30)))
        down = r"none of the last 30 URLs .* \(timeout 30\): the network"
        with pytest.raises(WorkError, match=down):
            pack(table, out, *FAST, *SILENT)
        assert not list(out.glob("*/*"))
        assert manifest_of(out).receipts == ()
        found = outcome(pack(table, out, *FAST, *SILENT, "--ignore-outage"))
    assert list(found.values()) == ["timeout"] * 30
    assert manifest_of(out).complete


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


RETRY = (*FAST, "--samples-per-shard", "4")


def wanted() -> dict[str, str]:
    return {f"urls.parquet#{n}": MENDED[kind] for n, kind in enumerate(KINDS)}


def check_whole(out: Path) -> None:
    """Every row is there once, and all counts say so."""
    assert outcome(out) == wanted()
    manifest = manifest_of(out)
    assert manifest.complete
    assert sum(receipt.inputs for receipt in manifest.receipts) == len(KINDS)
    assert manifest.rejects == {"http_4xx": 1, "not_an_image": 1}
    for receipt in manifest.receipts:
        lines = (out / f"rejects/{receipt.unit}.jsonl").read_bytes()
        assert len(lines.splitlines()) == sum(receipt.rejects.values())
        assert blake3(lines).hexdigest() == receipt.files[f"rejects/{receipt.unit}.jsonl"]


def test_retry_rejected_fetches_what_may_pass_into_new_shards(
    tmp_path: Path, site: tuple[Site, WebServer]
) -> None:
    behaviour, server = site
    table = table_of(tmp_path, server, KINDS)
    out = pack(table, tmp_path / "out", *RETRY)
    tars = {path: path.read_bytes() for path in out.glob("*/*.tar")}
    asked = len(server.paths())
    touch(table)
    pack(table, out, *RETRY, "--retry-rejected")  # in vain
    assert set(server.paths()[asked:]) == {f"/busy/{n}" for n in (1, 4, 5, 8)}
    assert manifest_of(out).rejects["http_5xx"] == 4
    behaviour.is_mended = True
    pack(table, out, *RETRY, "--retry-rejected")
    check_whole(out)
    assert all(path.read_bytes() == data for path, data in tars.items())
    asked = len(server.paths())
    pack(table, out, *RETRY, "--retry-rejected")
    pack(table, out, *RETRY)
    assert len(server.paths()) == asked
    check_whole(out)


def test_what_was_forbidden_is_fetched_where_a_retry_allows_it_and_its_receipt_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(connection: Connection, request: Request) -> bool:
        if request.path == "/robots.txt":
            return ok(b"User-agent: *\nDisallow: /no/\n")(connection, request)
        name = "noai" if request.path == "/ai" else "all"
        return ok(jpeg(1), X_Robots_Tag=name)(connection, request)

    with WebServer(answer) as server:
        urls = [f"{server.url}/{name}" for name in ("no/1", "ai", "ok")]
        table = write_files(tmp_path, {"urls.txt": "\n".join(urls)}) / "urls.txt"

        def codes(*options: str) -> list[str]:
            with packing_here():
                main(["pack", str(table), str(tmp_path / "out"), "--buckets", "32", *options])
            return sorted(outcome(tmp_path / "out").values())

        allowed = ["--max-bytes", "10", "--allow-private-hosts"]
        for options in (allowed[:2], allowed):
            assert codes(*options) == ["private_address"] * 3
            said = "private_address 3: --retry-rejected --allow-private-hosts fetches them"
            assert said in capsys.readouterr().out
        assert codes(*allowed, "--retry-rejected") == ["disallowed"] * 2 + ["too_many_bytes"]
        allowed = ["--retry-rejected", "--allow-private-hosts"]
        assert codes(*allowed) == ["disallowed"] * 2 + ["packed"]
        assert "disallowed 2: --retry" not in capsys.readouterr().out
        codes("--ignore-opt-outs")
        said = "disallowed 2: --retry-rejected fetches those that are allowed now"
        assert said in capsys.readouterr().out
        asked = server.paths()
        assert codes(*allowed, "--ignore-opt-outs") == ["disallowed"] + ["packed"] * 2
        assert "disallowed 1: --retry" not in capsys.readouterr().out
        assert server.paths()[len(asked) :] == ["/ai"]
        assert codes(*allowed, "--ignore-robots") == ["packed"] * 3
        asked = server.paths()
        assert codes("--max-bytes", "10") == ["packed"] * 3
        assert server.paths() == asked
    assert manifest_of(tmp_path / "out").settings["robots"] is True
    assert manifest_of(tmp_path / "out").counts["allowed_more:robots"] == 1
    assert not wdsprep.verify(tmp_path / "out", workers=1).findings


def test_no_row_comes_twice_after_an_overwrite_that_was_killed_between_two_retries(
    tmp_path: Path, site: tuple[Site, WebServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second retry takes its rows from the first."""
    _, server = site
    table = table_of(tmp_path, server, KINDS)
    out = pack(table, tmp_path / "out", *RETRY)
    for _ in range(2):
        pack(table, out, *RETRY, "--retry-rejected")
    delete, gone = LocalStore.delete, set[str]()

    def stop_at_the_second(store: LocalStore, name: str) -> None:
        if name.startswith("inputs/1"):
            gone.add(name)
        if len(gone) == 2:
            raise CutError
        delete(store, name)

    monkeypatch.setattr(LocalStore, "delete", stop_at_the_second)
    with pytest.raises(CutError):
        pack(table, out, *RETRY, "--overwrite")
    monkeypatch.undo()
    pack(table, out, *RETRY)
    assert outcome(out).keys() == wanted().keys()


@pytest.mark.system
def test_a_retry_is_whole_after_a_kill_at_any_step_and_after_a_receipt_is_deleted(
    tmp_path: Path, site: tuple[Site, WebServer]
) -> None:
    behaviour, server = site
    table = table_of(tmp_path, server, KINDS)
    out = pack(table, tmp_path / "out", *RETRY)
    old = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    behaviour.is_mended = True
    pack(table, out, *RETRY, "--retry-rejected")
    for path, data in old.items():  # as a kill leaves it just before the older slices are settled
        path.write_bytes(data)
    touch(table)
    pack(table, out, *RETRY)
    check_whole(out)
    first, retry = out / "receipts/000000.json", out / "receipts/1000000000.json"
    for names in ([first], [retry], [first, retry]):
        for path in names:
            path.unlink()
        touch(table)
        pack(table, out, *RETRY)
        check_whole(out)
