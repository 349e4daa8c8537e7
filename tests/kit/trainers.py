"""Trainers, for tests: torch is imported once, and each trainer is a fork of this process.

python -m tests.kit.trainers kills DATA FOLDER COUNT    one after another, each killed
python -m tests.kit.trainers ranks DATA FOLDER WORLD... a group of so many ranks, for each number
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.kit.cache_processes import forked
from wdsprep.loading.loader import load

BATCH = 32
LINE_NBYTES = BATCH * 16
WORLDS = (1, 2, 4, 8)


def train(data: str, folder: Path, chance: random.Random) -> None:
    """All ranks of a world in one process; the state is written after the batch is used."""
    world, threads = chance.choice(WORLDS), chance.randrange(1, 3)
    state, new = folder / "state.json", folder / "state.new"
    ranks = [
        load(data, global_batch=BATCH, epochs=None, rank=rank, world_size=world, threads=threads)
        for rank in range(world)
    ]
    if state.exists():
        for loader in ranks:
            loader.load_state_dict(json.loads(state.read_text()))
    with (folder / "log").open("a") as log:
        for shares in zip(*ranks, strict=True):
            keys = [key for share in shares for key in share["key"]]
            print(json.dumps([ranks[0].step, keys]), file=log, flush=True)
            new.write_text(json.dumps(chance.choice(ranks).state_dict()))
            new.replace(state)


def kills(data: str, folder: Path, count: int) -> None:
    log = folder / "log"
    log.touch()
    for number in range(count):
        chance = random.Random(number)
        enough = log.stat().st_size + number % 4 * LINE_NBYTES
        child = forked(lambda chance=chance: train(data, folder, chance))
        while log.stat().st_size < enough:
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the trainer ended"
            time.sleep(0.001)
        time.sleep(chance.random() * 0.01)  # any moment will do
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        text = log.read_bytes()
        os.truncate(log, text.rfind(b"\n") + 1)  # the line that the kill cut


def rank_of(world: int, rank: int, data: str, folder: Path) -> None:
    meet = f"file://{folder}/meet-{world}"
    patience = timedelta(seconds=120)
    dist.init_process_group("gloo", meet, patience, rank=rank, world_size=world)
    found = []
    for batch in load(data, global_batch=BATCH, epochs=2):
        found.append(batch["key"])
        dist.barrier()
    (folder / f"{world}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def ranks(data: str, folder: Path, *worlds: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for world in worlds:

        def work(rank: int, world: int = world) -> Callable[[], Any]:
            return lambda: rank_of(world, rank, data, folder)

        children = [forked(work(rank)) for rank in range(world)]
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * world


if __name__ == "__main__":
    do = {"kills": kills, "ranks": ranks}[sys.argv[1]]
    do(sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
