"""A polite, bounded HTTP client for tables of URLs.

    fetcher = Fetcher(FetchRules(contact="https://example.org/crawl"))
    future = fetcher.submit("https://example.org/cat.jpg")
    future.result()  # a Fetched: the data, or the code of why there is none
    fetcher.close()

`options` holds what the user decides. `client_thread` runs a thread with an event loop. `client`
fetches one URL, attempt by attempt and redirect by redirect; `host_limits` decides when its turn
comes, `backoff` how long it waits before the next attempt. `transfer` and `curl_loop` do the work
with libcurl, and `memory_limit` bounds the bytes that are being received. Modules without I/O
decide what things mean: `urls`, `robots`, `opt_outs`, `failure_codes` and `answer_rules`. URLs of
S3 and other stores are read in `object_urls`. `downloads` keeps many rows of a table under way, and
`outage` tells a network that is down from hosts that are gone.

The values cost nothing to import; the client is loaded when it is first used.

In: URLs of strangers.
Out: Bytes, or the code of why there are none.
"""

from typing import TYPE_CHECKING, Any

from wdsprep.fetch.options import TRANSIENT, Fetched, FetchRules

if TYPE_CHECKING:
    from wdsprep.fetch.client_thread import Fetcher


__all__ = ["TRANSIENT", "FetchRules", "Fetched", "Fetcher"]


def __getattr__(name: str) -> Any:
    if name != "Fetcher":
        raise AttributeError(f"module 'wdsprep.fetch' has no attribute {name!r}")
    from wdsprep.fetch.client_thread import Fetcher

    return Fetcher
