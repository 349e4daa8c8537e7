"""A polite, bounded HTTP client for tables of URLs.

    fetcher = Fetcher(FetchRules(contact="https://example.org/crawl"))
    future = fetcher.submit("https://example.org/cat.jpg")
    future.result()  # a Fetched: the data, or the code of why there is none
    fetcher.close()

`options` holds what the user decides. `client` runs a thread with an event loop, and fetches one
URL, attempt by attempt and redirect by redirect, also those of S3 and other stores. `limits`
decides when its turn comes, and bounds the bytes that are being received. `transfer` does the work
with libcurl. Modules without I/O decide what things mean: `urls`, `robots` and `answer_rules`,
which also says how long one waits before the next attempt. `downloads` keeps many rows of a table
under way, and `outage` tells a network that is down from hosts that are gone.

The values cost nothing to import; the client is loaded when it is first used.

In: URLs of strangers.
Out: Bytes, or the code of why there are none.
"""

from typing import TYPE_CHECKING, Any

from wdsprep.fetch.options import TRANSIENT, Fetched, FetchRules

if TYPE_CHECKING:
    from wdsprep.fetch.client import Fetcher


__all__ = ["TRANSIENT", "FetchRules", "Fetched", "Fetcher"]


def __getattr__(name: str) -> Any:
    if name != "Fetcher":
        raise AttributeError(f"module 'wdsprep.fetch' has no attribute {name!r}")
    from wdsprep.fetch.client import Fetcher

    return Fetcher
