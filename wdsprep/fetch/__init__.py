"""A polite, bounded HTTP client for tables of URLs.

    fetcher = Fetcher(FetchRules(contact="https://example.org/crawl"))
    future = fetcher.submit("https://example.org/cat.jpg")
    future.result()  # a Fetched: the data, or the code of why there is none
    fetcher.close()

`rules` is what the user decides. `fetcher` is a thread with an event loop; `client` says what is
done for a URL, attempt by attempt and hop by hop; `per_host` when; `transfer` and `multi` do it
with libcurl, and `memory` bounds how many bodies may come at a time. What things mean is decided in
modules without I/O: `urls`, `robots`, `manners`, `outcomes`. Objects of S3 are read in `objects`.
`downloads` keeps many rows of a table under way, and `outage` tells a network that is down from
hosts that are gone.

The values cost nothing to import; the client is loaded when it is first used.

In: URLs of strangers.
Out: Bytes, or the code of why there are none.
"""

from typing import TYPE_CHECKING, Any

from wdsprep.fetch.rules import PASSING, Fetched, FetchRules

if TYPE_CHECKING:
    from wdsprep.fetch.fetcher import Fetcher


__all__ = ["PASSING", "FetchRules", "Fetched", "Fetcher"]


def __getattr__(name: str) -> Any:
    if name != "Fetcher":
        raise AttributeError(f"module 'wdsprep.fetch' has no attribute {name!r}")
    from wdsprep.fetch.fetcher import Fetcher

    return Fetcher
