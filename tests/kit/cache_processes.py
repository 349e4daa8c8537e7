"""Processes that share a cache of the loader, for tests to kill: without torch, so they fork fast.

python -m tests.kit.cache_processes kills FOLDER COUNT    fill it and be killed, again and again
python -m tests.kit.cache_processes crowd FOLDER LIMIT    two datasets and a vandal in a full cache
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

from wdsprep.loading.sample_cache import Cache

SHARDS, SAMPLES = 6, 40


class Data:
    """Shards of samples whose bytes tell which they are."""

    def __init__(self, name: str) -> None:
        chance = random.Random(name)
        self.contents = [f"{name} {number}" for number in range(SHARDS)]
        self.bytes = {}
        self.offsets = {}
        for number in range(SHARDS):
            sizes = [512 * chance.randrange(1, 160) for _ in range(SAMPLES)]
            self.offsets[number] = [0, *accumulate(sizes)]
            self.bytes[number] = chance.randbytes(sum(sizes))
        self.nbytes = sum(map(len, self.bytes.values()))

    def part(self, shard: int, first: int, stop: int) -> bytes:
        offsets = self.offsets[shard]
        return self.bytes[shard][offsets[first] : offsets[stop]]

    def read(self, of: Cache, shard: int, first: int, stop: int, *, stamp: str = "") -> int:
        """The bytes that were not in the cache; what comes must be right."""
        fetched = []

        def fetch(low: int, buffer: memoryview) -> int:
            start = self.offsets[shard][low]
            fetched.append(self.bytes[shard][start : start + len(buffer)])
            buffer[:] = fetched[-1]
            return len(buffer)

        wanted = self.part(shard, first, stop)
        data = bytearray(len(wanted))
        offsets = self.offsets[shard]
        count = of.read(shard, offsets, first, stop, memoryview(data), fetch, stamp=stamp)
        assert data[:count] == wanted
        return sum(map(len, fetched))

    def read_all(self, of: Cache, *, stamp: str = "") -> int:
        return sum(self.read(of, shard, 0, SAMPLES, stamp=stamp) for shard in range(SHARDS))

    def read_some(self, of: Cache, chance: random.Random) -> int:
        first = chance.randrange(SAMPLES)
        return self.read(
            of, chance.randrange(SHARDS), first, min(SAMPLES, first + chance.randrange(1, 9))
        )


def forked(work: Callable[[], object]) -> int:
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def kills(folder: Path, count: int) -> None:
    """After each kill, all that is read is right, and by and by the cache fills."""
    data, chance = Data("a"), random.Random(0)
    left = [data.nbytes]

    def fill() -> None:
        own, filled = random.Random(os.getpid()), Cache(where, data.contents)
        while True:
            data.read_some(filled, own)

    for number in range(count):
        where = (folder / str(number % 4), 64 * 2 * data.nbytes)
        where[0].mkdir(parents=True, exist_ok=True)
        children = [forked(fill) for _ in range(2)]
        time.sleep(chance.random() * 0.02)  # any moment will do
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        probe = Cache(where, data.contents)
        left.append(sum(data.read_some(probe, chance) for _ in range(20)))
    assert data.read_all(Cache(where, data.contents)) < data.nbytes
    assert data.read_all(Cache(where, data.contents)) == 0


def crowd(folder: Path, limit: int) -> None:
    """Two datasets that together do not fit, while files age, vanish and are damaged."""
    where, chance = (folder, limit), random.Random(1)
    folder.mkdir()
    sets = [Data("a"), Data("b")]

    def use(number: int) -> None:
        data, own = sets[number % 2], random.Random(number)
        for _ in range(4):
            mine = Cache(where, data.contents)
            for _ in range(200):
                data.read_some(mine, own)

    with patch("wdsprep.loading.sample_cache.FULL_S", 0):
        children = [forked(lambda number=number: use(number)) for number in range(3)]
    most, gone = 0, 0
    while children:
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            assert status == 0
            children.remove(done)
        files = sorted(folder.iterdir())
        most = max(most, sum(filter(None, map(used, files))))
        if files:
            gone += disturb(chance.choice(files), chance)
        time.sleep(0.001)
    sys.stdout.write(f"{most} {gone}")


def used(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def disturb(path: Path, chance: random.Random) -> bool:
    try:
        what = chance.randrange(3)
        if what == 0:
            os.utime(path, (0, 0))
        elif what == 1:
            with path.open("r+b") as file:
                file.seek(chance.randrange(1 + path.stat().st_size))
                file.write(b"damage")
        else:
            path.unlink()
    except FileNotFoundError:
        return False
    return what == 2


if __name__ == "__main__":
    {"kills": kills, "crowd": crowd}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
