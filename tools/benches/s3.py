"""Reads and listings of our S3 store beside those of the obstore library, on a Ceph gateway.

What counts is the client's processor time: a loader shares its cores with decoding, and the gateway
with both. Notes say how long it took. Ranges come into a buffer that is used again, as in a loader.
A forked child is a DataLoader's worker: it needs connections of its own, and obstore also a copy of
its library, since the runtime of the parent hangs there.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tools.benches import Group, Rival, Role, call, note, took
from tools.benches.load import start_gateway
from wdsprep.store.base import Entry

URL, BIG = "s3://bench/data", "big.tar"
BIG_NBYTES = 256 << 20
RANGES = {170_000: 4_000, 2_700_000: 600}
"""Lengths of ranges, and how many are read."""
THREADS = (1, 8)
KEYS = 100_000
PEOPLE = {"ours": "wdsprep.store", "obstore": "obstore"}
ReadRange = Callable[[memoryview, int], object]


def groups(home: Path, scale: float) -> Iterator[Group]:
    from tests.kit.s3 import OTHER_SETTINGS, run_tool, s3_client
    from wdsprep.store import open_store

    for name in OTHER_SETTINGS:
        os.environ.pop(name, None)
    try:
        start_gateway(home / "server")
        with s3_client() as client:
            client.create_bucket(Bucket="bench")
        with open_store(URL).write(BIG) as sink:
            for _ in range(BIG_NBYTES >> 20):
                sink.write(os.urandom(1 << 20))
        for nbytes, ranges in RANGES.items():
            count = max(8, round(ranges * scale))
            for threads in THREADS:
                yield _group(
                    f"s3-range-{nbytes // 1000}-{threads}",
                    f"ranges of {nbytes / 1e6:g} MB from S3, threads: {threads}, CPU time",
                    "ranges",
                    count,
                    partial(call, read, nbytes, count, threads),
                )
        yield _group(
            "s3-fork", "the first 64 ranges in a forked child", "ranges", 64, partial(call, fork)
        )
        count = max(1_000, round(KEYS * scale))
        make_keys(count)
        listing = f"a listing of {count:,} keys from S3, CPU time"
        yield _group("s3-list", listing, "keys", count, partial(call, list_keys, count))
    finally:
        run_tool("stop", "--dir", home / "server")


def _group(
    name: str, title: str, unit: str, count: int, command: Callable[[str], list[str]]
) -> Group:
    rivals = [
        Rival(name=shown, command=command(who), role=Role.OURS if who == "ours" else Role.RIVAL)
        for who, shown in PEOPLE.items()
    ]
    return Group(name=name, title=title, unit=unit, count=count, rivals=rivals)


def make_keys(count: int) -> None:
    from wdsprep.store import open_store
    from wdsprep.store.base import write_bytes

    store = open_store(f"{URL}/keys")
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: write_bytes(store, f"256/{n:09d}.tar", b""), range(count)))


# --- in processes of their own


def obstore_client(prefix: str = "") -> tuple[object, object]:
    """The library as this process may use it, and a client of the bucket."""
    from wdsprep.store.gcs_azure import own_library

    library = own_library()
    options = {
        "endpoint": os.environ["AWS_ENDPOINT_URL"],
        "client_options": {"allow_http": True, "timeout": "300s"},
    }
    return library, library._store.S3Store("bench", prefix=f"data{prefix}", **options)


def reader(who: str) -> ReadRange:
    if who == "ours":
        from wdsprep.store import open_store

        store = open_store(URL)
        return lambda buffer, start: store.read_into(BIG, buffer, start=start)
    library, client = obstore_client()

    def read_range(buffer: memoryview, start: int) -> None:
        buffer[:] = memoryview(
            library.get_range(client, BIG, start=start, length=len(buffer))  # type: ignore[attr-defined]
        )

    return read_range


def read(nbytes: int, count: int, threads: int, who: str) -> None:
    read_range, step = reader(who), BIG_NBYTES // count

    def work(first: int) -> None:
        buffer = memoryview(bytearray(nbytes))
        for number in range(first, count, threads):
            read_range(buffer, min(number * step, BIG_NBYTES - nbytes))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: read_range(memoryview(bytearray(nbytes)), 0), range(threads)))
        _took_cpu(lambda: list(pool.map(work, range(threads))))


def fork(who: str) -> None:
    buffer = memoryview(bytearray(170_000))
    reader(who)(buffer, 0)
    started, child = time.perf_counter(), os.fork()
    if child == 0:
        read_range = reader(who)
        for number in range(64):
            read_range(buffer, number << 20)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"{who}: the child failed")
    took(time.perf_counter() - started)


def list_keys(count: int, who: str) -> None:
    if who == "ours":
        from wdsprep.store import open_store

        store = open_store(f"{URL}/keys")
        _took_cpu(lambda: _check(sum(1 for _ in store.list()), count))
        return
    library, client = obstore_client("/keys")
    pages = library.list(client, chunk_size=1_000)  # type: ignore[attr-defined]
    _took_cpu(lambda: _check(sum(1 for page in pages for _ in map(entry_of, page)), count))


def entry_of(meta: dict[str, Any]) -> Entry:
    return Entry(
        name=meta["path"],
        nbytes=meta["size"],
        stamp=meta["e_tag"].strip('"'),
        written_s=meta["last_modified"].timestamp(),
    )


def _check(found: int, count: int) -> None:
    if found != count:
        raise SystemExit(f"{found:,} keys of {count:,}")


def _took_cpu(work: Callable[[], object]) -> None:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    took(time.process_time() - cpu)
    note(f"{time.perf_counter() - wall:.2f} s")
