"""Downloading beside img2dataset and other clients, from loopback servers that share the cores.

JPEGs of about 100 KB, over HTTP and HTTPS, by servers in a process of their own. Bytes as they are:
`pack` with header check beside img2dataset that neither checks nor encodes. Decoded: full check
beside `resize_mode=no`. Both have the same four slices, as many requests at a time, and the
machine's certificates. Fetching alone decides which library we use: all clients run in the same
Python, with the same libcurl, and what the server takes meanwhile is told apart. With 100 ms of
latency and 1 % black holes, the limit is the least time that one pool of as many places can take.
"""

import heapq
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.benches import Group, Rival, Role, call, ours, peers, took
from tools.benches.fetch_clients import CLIENTS, PLACES, fetch
from tools.benches.pack import jpeg

IMAGES, ROWS, MEMORY_S = 5_000, 3_000_000, 60.0
LATENCY_S, HOLES_IN_A_HUNDRED, PATIENCE_S = 0.1, 1, 3.0
UNTOUCHED, DECODED = ["--disable_all_reencoding=True"], ["--resize_mode=no"]
CASES = (
    ("http", "HTTP, bytes as they are", "http", "header", UNTOUCHED, 2.0),
    ("decoded", "HTTP, decoded", "http", "full", DECODED, 1.5),
    ("https", "HTTPS, bytes as they are", "https", "header", UNTOUCHED, 15.0),
)


def groups(home: Path, scale: float) -> Iterator[Group]:
    count = round(IMAGES * scale)
    with servers(home) as (urls, server):
        env = {"SSL_CERT_FILE": str(home / "bundle.pem"), "NO_ALBUMENTATIONS_UPDATE": "1"}
        for name, title, scheme, check, theirs, target in CASES:
            table = listed(
                home / f"{scheme}.txt", [f"{urls[scheme]}/now/{n}.jpg" for n in range(count)]
            )
            yield Group(
                name=f"fetch-{name}",
                title=title,
                unit="images",
                count=count,
                rivals=[
                    Rival(
                        name=f"wdsprep pack --check {check}",
                        command=call(pack, table, home, count, ["--check", check]),
                        role=Role.OURS,
                        env=env,
                    ),
                    Rival(
                        name=f"img2dataset {theirs[0]}",
                        command=call(peer, table, home, count, theirs),
                        env=env,
                    ),
                ],
                targets={f"img2dataset {theirs[0]}": target},
            )
        for scheme in urls:
            yield _clients(scheme, home / f"{scheme}.txt", count, env, server)
        yield _holes(home, urls["http"], count, env, server)
        drip = listed(home / "drip.txt", [f"{urls['http']}/drip/0.jpg"])
        yield Group(
            name="fetch-drip",
            title="a server that drips is let go, --timeout 3",
            rivals=[
                Rival(
                    name="wdsprep's fetcher",
                    command=call(fetch, "wdsprep", drip, patient(), server),
                    role=Role.OURS,
                )
            ],
        )
        yield from _memory(home, urls["http"], scale)


def patient() -> dict[str, object]:
    return {"timeout": PATIENCE_S, "retries": 0}


def _clients(scheme: str, table: Path, count: int, env: dict[str, str], server: int) -> Group:
    return Group(
        name=f"fetch-clients-{scheme}",
        title=f"fetching alone, {scheme}, {PLACES} at a time",
        unit="images",
        count=count,
        rivals=[
            Rival(
                name=name,
                command=call(fetch, name, table, {}, server),
                role=Role.OURS if name == "wdsprep" else Role.RIVAL,
                env=env,
            )
            for name in CLIENTS
        ],
        targets={"libcurl": 0.6},
    )


def _holes(home: Path, url: str, count: int, env: dict[str, str], server: int) -> Group:
    chance = random.Random(0)
    holes = [chance.random() < HOLES_IN_A_HUNDRED / 100 for _ in range(count)]
    urls = [f"{url}/{'hole' if hole else 'late'}/{n}.jpg" for n, hole in enumerate(holes)]
    table = listed(home / "holes.txt", urls)
    ideal_s = pool_s([PATIENCE_S if hole else LATENCY_S for hole in holes])
    words = ["--check", "header", "--timeout", str(PATIENCE_S), "--retries", "0"]
    words += ["--requests", str(PLACES), "--samples-per-shard", str(max(1, count // 10))]
    return Group(
        name="fetch-holes",
        title="100 ms of latency and 1 % black holes",
        unit="images",
        count=count,
        rivals=[
            Rival(
                name="wdsprep's fetcher alone",
                command=call(fetch, "wdsprep", table, patient(), server),
                role=Role.OURS,
                env=env,
            ),
            Rival(
                name="wdsprep pack of ten slices",
                command=call(pack, table, home, count - sum(holes), words),
                role=Role.OURS,
                env=env,
            ),
            Rival(name="an ideal pool", command=call(ideal, ideal_s), role=Role.LIMIT),
        ],
    )


def _memory(home: Path, url: str, scale: float) -> Iterator[Group]:
    for kind in ("parquet", "csv"):
        table = long_table(home / f"long.{kind}", url, round(ROWS * scale))
        yield Group(
            name=f"fetch-memory-{kind}",
            title=f"{kind} of {round(ROWS * scale):,} rows, its first minute",
            rivals=[
                Rival(
                    name="wdsprep pack",
                    command=call(for_a_while, table, home / "long"),
                    role=Role.OURS,
                    leaves=home / "long",
                )
            ],
        )
        table.unlink()


def listed(path: Path, urls: list[str]) -> Path:
    path.write_text("".join(f"{url}\n" for url in urls))
    return path


def pool_s(durations: list[float]) -> float:
    """What a pool takes in which each place takes the next as soon as it is free."""
    free = [0.0] * PLACES
    for duration in durations:
        heapq.heappush(free, heapq.heappop(free) + duration)
    return max(free)


def long_table(path: Path, url: str, rows: int) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    links = [f"{url}/now/{n}.jpg" for n in range(rows)]
    if path.suffix == ".parquet":
        column = pa.array(links)
        pq.write_table(pa.table({"url": column, "caption": column}), path, row_group_size=100_000)
    else:
        lines = (f'{link},"a caption, {n}"\n' for n, link in enumerate(links))
        path.write_text("url,caption\n" + "".join(lines))
    return path


# --- the servers


@contextmanager
def servers(home: Path) -> Iterator[tuple[dict[str, str], int]]:
    """Their URLs by scheme, and the number of their process."""
    with subprocess.Popen(
        call(serve, home), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline()), process.pid
        finally:
            process.stdin.close()
            process.wait()


def serve(place: str) -> None:
    """Two servers, until our input ends; their URLs on our output."""
    from tests.kit.webserver import Authority, WebServer, ok, stall, status

    home = Path(place)
    pictures = [ok(jpeg(seed, 100_000, noise=0.12)) for seed in range(20)]

    def behave(connection: Any, request: Any) -> Any:
        kind, _, number = request.path[1:].partition("/")
        if kind == "robots.txt":
            return status(404)(connection, request)
        if kind == "late":
            connection.rest(LATENCY_S)
        if kind == "hole":
            return stall(connection, request)
        if kind == "drip":
            connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while connection.rest(0.2):
                connection.send(b"x")
        return pictures[int(number.partition(".")[0]) % 20](connection, request)

    authority = Authority.create(home)
    trust(home, authority.bundle)
    with WebServer(behave) as plain, WebServer(behave, tls=authority.context()) as safe:
        print(json.dumps({"http": plain.url, "https": safe.url}), flush=True)
        sys.stdin.read()


def trust(home: Path, authority: Path) -> None:
    """The machine's certificates and ours, as a machine that trusts its own company has them."""
    from wdsprep.fetch.transfer import certificates_path

    (home / "bundle.pem").write_bytes(
        Path(certificates_path()).read_bytes() + authority.read_bytes()
    )


# --- in processes of their own


def ideal(seconds: float) -> None:
    took(seconds)


def pack(table: str, home: str, count: int, words: list[str]) -> None:
    command = ours(
        "pack", table, Path(home, "ours"), "--allow-private-hosts", "--overwrite", "--json"
    )
    command += ["--per-host", str(PLACES), *words]
    if "--samples-per-shard" not in words:
        command += ["--samples-per-shard", str(-(-count // 4))]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    check(json.loads(done.stdout)["samples"], count)


def peer(table: str, home: str, count: int, words: list[str]) -> None:
    out = Path(home, "theirs")
    shutil.rmtree(out, ignore_errors=True)
    command = [peers.program("fetch", "img2dataset"), f"--url_list={table}"]
    command += [f"--output_folder={out}"]
    command += ["--output_format=webdataset", "--processes_count=2", f"--thread_count={PLACES}"]
    command += [f"--number_sample_per_shard={-(-count // 4)}", "--compute_hash=None"]
    subprocess.run([*command, "--enable_wandb=False", *words], check=True)
    check(sum(json.loads(p.read_text())["successes"] for p in out.glob("*_stats.json")), count)


def check(found: int, count: int) -> None:
    if found != count:
        sys.exit(f"{found} of {count} images came through: the machine is too busy to measure")


def for_a_while(table: str, out: str) -> None:
    words = ours("pack", table, out, "--allow-private-hosts", "--per-host", str(PLACES))
    with subprocess.Popen(words) as process:
        until = time.monotonic() + MEMORY_S
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
