"""An outage of our own network is told from sites that give no answer."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.fetches import Answers
from wdsprep.dataset.reject_codes import Code
from wdsprep.errors import WorkError
from wdsprep.fetch.options import Fetched
from wdsprep.fetch.outage import NO_SUCH_NAME, OutageCheck, Witnesses


def noted(pairs: list[tuple[str, Code | None]]) -> OutageCheck:
    outage = OutageCheck(Answers().submit, Witnesses())
    for url, code in pairs:
        outage.note(url, code)
    return outage


def suspected(pairs: list[tuple[str, Code | None]], *, at_end: bool = False) -> bool:
    return noted(pairs).is_suspected(at_end=at_end)


def test_an_outage_is_suspected_where_many_sites_give_no_answer() -> None:
    many = [(f"http://a.b{n % 9}.org/x", Code.DNS) for n in range(200)]
    assert suspected(many)
    assert not suspected(many[:199])
    assert not suspected([*many[:199], ("http://x.org", Code.HTTP_5XX), *many[:199]])
    assert suspected([*many[:199], ("file:///x", Code.BAD_URL), *many[:1]])
    assert not suspected([("http://dead.org/x", Code.DNS)] * 10_000, at_end=True)
    assert not suspected([(f"http://a{n}.dead.org/x", Code.DNS) for n in range(999)])
    few = [(f"http://a.b{n}.org/x", Code.UNREACHABLE) for n in range(20)]
    assert suspected(few, at_end=True)
    assert not suspected(few)
    assert not suspected(few[:19], at_end=True)
    assert not suspected([("http://ok.org", None), *many[:100]], at_end=True)


NO_NAME, NO_DATA = NO_SUCH_NAME


@pytest.mark.parametrize(
    ("code", "says", "of_the_internet", "is_outage"),
    [
        (Code.DNS, NO_NAME, 0, False),  # nobody has these names
        (Code.DNS, NO_DATA, 0, False),
        (Code.DNS, NO_NAME, NO_NAME, True),  # a name service that knows of no internet
        (Code.DNS, socket.EAI_AGAIN, socket.EAI_AGAIN, True),  # one that does not answer
        (Code.DNS, socket.EAI_FAIL, 0, True),
        (Code.TIMEOUT, NO_NAME, 0, True),  # whoever they are, they are silent
    ],
)
def test_before_anybody_has_answered_the_name_service_decides(
    monkeypatch: pytest.MonkeyPatch, code: Code, says: int, of_the_internet: int, is_outage: bool
) -> None:
    def getaddrinfo(name: str, _port: None) -> list[object]:
        error = of_the_internet if name.endswith("root-servers.net") else says
        if error:
            raise socket.gaierror(error, "x")
        return []

    monkeypatch.setattr("wdsprep.fetch.outage.socket.getaddrinfo", getaddrinfo)
    outage = noted([(f"http://dead{n}.org/x", code) for n in range(30)])
    assert outage.is_suspected(at_end=True)
    if is_outage:
        with pytest.raises(WorkError, match="if it is up and these hosts are gone, add --ignore-o"):
            outage.confirm()
    else:
        outage.confirm()
        assert not outage.is_suspected(at_end=True)


@pytest.mark.parametrize("answer", [None, Code.HTTP_5XX, Code.TIMEOUT, Code.DISALLOWED])
def test_a_host_that_answered_before_decides(answer: Code | None) -> None:
    client, witnesses = Answers(), Witnesses()
    OutageCheck(client.submit, witnesses).note("http://ok.org/1", Code.HTTP_4XX)  # of another slice
    outage = OutageCheck(client.submit, witnesses)
    for n in range(30):
        outage.note(f"http://dead{n}.org/x", Code.TIMEOUT)
    with ThreadPoolExecutor(1) as threads:
        told = threads.submit(outage.confirm)
        while "http://ok.org/1" not in client.asked:
            time.sleep(0.001)
        client.asked["http://ok.org/1"][0].set_result(Fetched(code=answer))
        if answer in (Code.TIMEOUT, Code.DISALLOWED):  # the latter is known without asking
            with pytest.raises(WorkError, match="nor do hosts that did before"):
                told.result()
        else:
            told.result()
