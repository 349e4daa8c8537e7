"""Rejects that may pass are fetched again into new shards, whatever was killed meanwhile."""

from pathlib import Path

import pytest
from blake3 import blake3

import wdsprep
from tests.kit.packs import jpeg, manifest_of, outcome, pack, touch, write_files
from tests.kit.sites import FAST, KINDS, MENDED, Site, table_of, write_parquet
from tests.kit.webserver import Connection, Request, WebServer, ok
from wdsprep.cli import main

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
            main(["pack", str(table), str(tmp_path / "out"), "--buckets", "32", *options])
            return sorted(outcome(tmp_path / "out").values())

        assert codes("--max-bytes", "10") == ["private_address"] * 3
        said = capsys.readouterr().out
        assert "private_address 3: --retry-rejected --allow-private-hosts fetches them" in said
        allowed = ["--max-bytes", "10", "--allow-private-hosts"]
        assert codes(*allowed) == ["private_address"] * 3
        said = capsys.readouterr().out
        those = "--retry-rejected fetches those that --allow-private-hosts allows"
        assert f"private_address 3: {those}" in said
        assert codes(*allowed, "--retry-rejected") == ["disallowed"] * 2 + ["too_many_bytes"]
        allowed = ["--retry-rejected", "--allow-private-hosts"]
        assert codes(*allowed) == ["disallowed"] * 2 + ["packed"]
        asked = server.paths()
        assert codes(*allowed, "--ignore-opt-outs") == ["disallowed"] + ["packed"] * 2
        assert server.paths()[len(asked) :] == ["/ai"]
        assert codes(*allowed, "--ignore-robots") == ["packed"] * 3
        asked = server.paths()
        assert codes("--max-bytes", "10") == ["packed"] * 3
        assert server.paths() == asked
    assert manifest_of(tmp_path / "out").settings["robots"] is True
    assert manifest_of(tmp_path / "out").counts["allowed_more:robots"] == 1
    assert not wdsprep.verify(tmp_path / "out", workers=1).findings


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


@pytest.mark.system
def test_a_retry_and_a_limit_and_an_append_leave_each_other_alone(
    tmp_path: Path, site: tuple[Site, WebServer]
) -> None:
    behaviour, server = site
    root = tmp_path / "in"
    table_of(root, server, KINDS)
    out = pack(root, tmp_path / "out", *RETRY, "--limit", "4")
    behaviour.is_mended = True
    pack(root, out, *RETRY, "--limit", "4", "--retry-rejected")
    assert outcome(out) == dict(list(wanted().items())[:4])
    pack(root, out, *RETRY)
    check_whole(out)
    behaviour.is_mended = False
    rows = [{"url": f"{server.url}/busy/{n}", "caption": "", "n": n} for n in (90, 91)]
    write_parquet(root / "vrls.parquet", rows)
    pack(root, out, *RETRY, "--append")
    behaviour.is_mended = True
    pack(root, out, *RETRY, "--retry-rejected")
    more = {f"vrls.parquet#{n}": "packed" for n in range(2)}
    assert outcome(out) == wanted() | more
    assert manifest_of(out).complete
