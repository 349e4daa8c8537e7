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

In: URLs of strangers.
Out: Bytes, or the code of why there are none.
"""
