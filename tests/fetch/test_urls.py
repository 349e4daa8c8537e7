"""What URLs mean, and which addresses are public: pure functions."""

import pytest

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.fetch.urls import follow, is_public, parse


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("http://a.example/x.jpg", "http://a.example/x.jpg"),
        ("  HTTP://A.Example:80/x.jpg#part \n", "http://a.example/x.jpg"),
        ("https://a.example:443", "https://a.example/"),
        ("https://a.example:8443/", "https://a.example:8443/"),
        ("http://a.example:/?q=1#x", "http://a.example/?q=1"),
        ("http://a.example?q", "http://a.example/?q"),
        ("http://a.example/big cat.jpg?a b", "http://a.example/big%20cat.jpg?a%20b"),
        ("http://a.example/ü/100%.jpg", "http://a.example/%C3%BC/100%25.jpg"),
        ("http://a.example/%C3%bc?x=%20+y", "http://a.example/%C3%bc?x=%20+y"),
        ("http://a.example/a\tb\nc.jpg", "http://a.example/abc.jpg"),
        ("http:\\\\a.example\\x.jpg", "http://a.example/x.jpg"),
        ("http://a.example\\@b.example/x", "http://a.example/@b.example/x"),
        ("http://bücher.example/x", "http://xn--bcher-kva.example/x"),
        ("http://straße.example./x", "http://xn--strae-oqa.example/x"),
        ("http://\uff11\uff12\uff17.0.0.1/x", "http://127.0.0.1/x"),
        ("http://%31%32%37.0.0.1/x", "http://127.0.0.1/x"),
        ("http://a.example/a/./b/../../c/%2E%2e/x/", "http://a.example/x/"),
        ("http://a.example/../..", "http://a.example/"),
        ("http://a.example/a/b/..", "http://a.example/a/"),
        ("http://a.example//a//b/...?/../x", "http://a.example//a//b/...?/../x"),
        ("http://my_bucket.example/x", "http://my_bucket.example/x"),
        ("http://[2001:DB8::0:1]:81/x", "http://[2001:db8::1]:81/x"),
        ("http://a.example/\udcff", "http://a.example/%3F"),
    ],
)
def test_a_url_is_read_as_browsers_read_it(written: str, meant: str) -> None:
    assert parse(written).url == meant
    assert parse(meant).url == meant


@pytest.mark.parametrize(
    ("written", "detail"),
    [
        ("", "no URL"),
        ("nan", "no URL"),
        ("a.example/x.jpg", "no URL"),
        ("//a.example/x.jpg", "no URL"),
        ("file:///etc/hostname", "file: is not http, https, s3, gs, az or hf"),
        ("ftp://a.example/x.jpg", "ftp: is not http, https, s3, gs, az or hf"),
        ("data:image/png;base64,AAAA", "data: is not http, https, s3, gs, az or hf"),
        ("javascript:alert(1)", "javascript: is not http, https, s3, gs, az or hf"),
        ("http:a.example", "no // after http:"),
        ("http://", "no host"),
        ("http:///x.jpg", "no host"),
        ("http://:80/", "no host"),
        ("http://./", "no host"),
        ("http://user:secret@a.example/", "a user name or password in it"),
        ("http://a.example:99999/", "not a port"),
        ("http://a.example:80x/", "not a port"),
        ("http://[::1/", "not a port"),
        ("http://[::g]/", "not an IPv6 address"),
        ("http://[fe80::1%25eth0]/", "not an IPv6 address"),
        ("http://a b.example/", "not a host"),
        ("http://a..example/", "not a host"),
        ("http://" + "a" * 64 + ".example/", "not a host"),
        ("http://%00.example/", "not a host"),
        ("http://☃" + "☃" * 70 + "/", "not a host"),
        ("http://a.example/" + "x" * 20_000, "20017 characters long"),
    ],
)
def test_what_is_no_url_for_us_is_refused_with_the_reason(written: str, detail: str) -> None:
    with pytest.raises(RejectedError) as refused:
        parse(written)
    assert (refused.value.code, refused.value.detail) == (Code.BAD_URL, detail)


def test_a_password_in_a_url_is_not_repeated() -> None:
    with pytest.raises(RejectedError) as refused:
        parse("http://user:secret@a.example/")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("location", "meant"),
    [
        ("/y", "https://a.example/y"),
        ("y?z", "https://a.example/x/y?z"),
        ("//b.example/y", "https://b.example/y"),
        ("http://b.example:81/y#z", "http://b.example:81/y"),
        (" ../y z ", "https://a.example/y%20z"),
    ],
)
def test_a_redirect_is_read_beside_the_url_it_comes_from(location: str, meant: str) -> None:
    assert follow(parse("https://a.example/x/1.jpg"), location).url == meant


@pytest.mark.parametrize("location", ["file:///etc/passwd", "gopher://b/", "http://[", "s3://b/c"])
def test_a_redirect_to_anything_else_is_refused(location: str) -> None:
    with pytest.raises(RejectedError, match="redirect: ") as refused:
        follow(parse("https://a.example/x/1.jpg"), location)
    assert refused.value.code is Code.BAD_URL


@pytest.mark.parametrize(
    "address",
    [
        *("8.8.8.8", "1.1.1.1", "172.15.0.1", "172.32.0.1", "100.63.255.255", "193.0.0.1"),
        *(
            "2606:4700::1111",
            "2a00:1450::1",
            "64:ff9b::808:808",
            "::ffff:8.8.8.8",
            "2002:808:808::1",
        ),
    ],
)
def test_addresses_of_the_public_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.9.1", "0.0.0.0", "0.1.2.3", "10.0.0.3", "172.16.0.1", "172.31.9.9"),
        *("192.168.1.1", "169.254.169.254", "100.64.0.1", "192.0.2.1", "198.18.0.1", "203.0.113.9"),
        *("224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd00::2", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.3", "::127.0.0.1", "2002:7f00:1::", "2002:a00:3::1"),
        *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1", "2001:db8::1"),
        *("2001::1", "3fff::1", "4000::1", "5f00::1"),
    ],
)
def test_all_other_addresses_are_not(address: str) -> None:
    assert not is_public(address)
