"""Objects of S3 among the URLs: asked for only where the user says so."""

import pytest

from tests.kit.fetches import IMAGE, LONG_S, fetch, fetcher
from tests.kit.webserver import WebServer, ok
from wdsprep.dataset.reject_codes import Code
from wdsprep.fetch.options import Fetched


def test_objects_are_not_asked_for_unless_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With whose credentials else would they be read?"""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with WebServer(ok(IMAGE)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.url)
        for url in ("s3://payroll/2026.jpg", " S3://payroll/2026.jpg"):
            fetched = fetch(url, allow_s3=False)
            assert (fetched.code, fetched.host) == (Code.PRIVATE_ADDRESS, "payroll")
            assert fetched.detail.endswith("with your credentials: --allow-s3 does that")
        assert endpoint.connections == 0
        assert fetch("s3://payroll/2026.jpg").data == IMAGE
        asked = endpoint.requests[-1]
        assert "mine" in f"{asked.path} {asked.headers}"


def test_objects_are_read_through_the_store(bucket: str) -> None:
    from tests.kit.s3 import s3_client

    with s3_client() as client:
        client.put_object(Bucket=bucket, Key="a b/ü.jpg", Body=IMAGE)
        client.put_object(Bucket=bucket, Key="empty", Body=b"")
    with fetcher(max_nbytes=len(IMAGE)) as one:
        urls = ["a b/ü.jpg", "empty", "none.jpg", "../x"]
        found = [one.submit(f"s3://{bucket}/{name}").result(LONG_S) for name in urls]
        none = one.submit("s3://no-such-bucket-at-all/x").result(LONG_S)
    assert found[0] == Fetched(data=IMAGE, host=bucket)
    assert [one.code for one in found[1:]] == [Code.EMPTY, Code.HTTP_4XX, Code.BAD_URL]
    assert none.code is Code.HTTP_4XX
    assert fetch(f"s3://{bucket}/a b/ü.jpg", max_nbytes=100).code is Code.TOO_MANY_BYTES
