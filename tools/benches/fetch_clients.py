"""Clients that fetch the same URLs: ours, and those that it might have been built on."""

import contextlib
import os
import threading
import time
from collections import deque
from itertools import islice
from pathlib import Path

from tools.benches import note, took

PLACES = 64


def by_fetcher(urls: list[str], **rules: object) -> None:
    """Where one has come the next is asked for, in the fetcher's own thread like the others do."""
    from wdsprep.fetch.client import Fetcher
    from wdsprep.fetch.options import FetchRules

    defaults = {"allow_private_hosts": True, "requests": PLACES, "per_host": PLACES}
    todo, left, lock, done = iter(urls), len(urls), threading.Lock(), threading.Event()

    def go_on(_: object) -> None:
        nonlocal left
        with lock:  # the first may have come before they are asked about
            left -= 1
            if left == 0:
                done.set()
        if url := next(todo, None):
            fetcher.submit(url).add_done_callback(go_on)

    with contextlib.closing(Fetcher(FetchRules(**{**defaults, **rules}))) as fetcher:
        for asked in [fetcher.submit(url) for url in islice(todo, 8 * PLACES)]:
            asked.add_done_callback(go_on)
        done.wait()


def by_libcurl(urls: list[str]) -> None:
    """What libcurl takes when nothing is checked."""
    import pycurl

    multi, todo, active = pycurl.CurlMulti(), deque(urls), 0
    multi.setopt(pycurl.M_MAXCONNECTS, PLACES)
    free = [pycurl.Curl() for _ in range(PLACES)]
    for handle in free:
        handle.setopt(pycurl.CAINFO, os.environ["SSL_CERT_FILE"])
    while todo or active:
        while todo and free:
            handle = free.pop()
            handle.setopt(pycurl.URL, todo.popleft())
            handle.setopt(pycurl.WRITEFUNCTION, [].append)
            multi.add_handle(handle)
            active += 1
        multi.perform()
        multi.select(1.0)
        _, done, failed = multi.info_read()
        assert not failed, failed
        for handle in done:
            multi.remove_handle(handle)
            free.append(handle)
            active -= 1


def by_aiohttp(urls: list[str]) -> None:
    import asyncio

    import aiohttp

    async def run() -> None:
        todo = iter(urls)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=PLACES)) as session:

            async def work() -> None:
                for url in todo:
                    async with session.get(url) as answer:
                        await answer.read()

            await asyncio.gather(*(work() for _ in range(PLACES)))

    asyncio.run(run())


def by_urllib3(urls: list[str]) -> None:
    import urllib3

    pool = urllib3.PoolManager(maxsize=PLACES, ca_certs=os.environ["SSL_CERT_FILE"])
    todo, lock = iter(urls), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                url = next(todo, None)
            if url is None:
                return
            pool.request("GET", url)

    threads = [threading.Thread(target=work) for _ in range(PLACES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


CLIENTS = {
    "wdsprep": by_fetcher,
    "libcurl": by_libcurl,
    "aiohttp": by_aiohttp,
    "urllib3": by_urllib3,
}


def processor_s(pid: int) -> float:
    """What a process has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fetch(name: str, table: str, rules: dict[str, object], server: int) -> None:
    """All of a list, after a short one; only the fetcher takes rules."""
    work, urls = CLIENTS[name], Path(table).read_text().split()
    work([f"{urls[0].rsplit('/', 2)[0]}/now/{number}.jpg" for number in range(200)])
    cpu, servers, started = time.process_time(), processor_s(server), time.perf_counter()
    work(urls, **rules)
    took(time.perf_counter() - started)
    ms = [1000 * s / len(urls) for s in (time.process_time() - cpu, processor_s(server) - servers)]
    note(f"{ms[0]:.2f} ms of processor time an image, {ms[1]:.2f} of the server")
