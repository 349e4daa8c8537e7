"""Clients that fetch the same URLs: ours, and those that it might have been built on."""

import contextlib
import os
import threading
import time
from collections import deque
from pathlib import Path

from tools.benches import note, took

PLACES = 64


def by_fetcher(urls: list[str], **rules: object) -> None:
    from wdsprep.fetch.fetcher import Fetcher
    from wdsprep.fetch.rules import FetchRules

    defaults = {"allow_private": True, "in_flight": PLACES, "per_host": PLACES}
    room = threading.Semaphore(8 * PLACES)
    with contextlib.closing(Fetcher(FetchRules(**{**defaults, **rules}))) as fetcher:
        for url in urls:
            room.acquire()
            fetcher.submit(url).add_done_callback(lambda _: room.release())
        for _ in range(8 * PLACES):
            room.acquire()


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


def fetch(name: str, table: str, rules: dict[str, object]) -> None:
    """All of a list, once connections are open; only the fetcher takes rules."""
    work, urls = CLIENTS[name], Path(table).read_text().split()
    work([f"{urls[0].rsplit('/', 2)[0]}/now/{number}.jpg" for number in range(200)])
    cpu, started = time.process_time(), time.perf_counter()
    work(urls, **rules)
    took(time.perf_counter() - started)
    note(f"{1000 * (time.process_time() - cpu) / len(urls):.2f} ms of processor time an image")
