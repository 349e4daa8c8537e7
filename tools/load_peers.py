"""The loaders of MosaicML streaming and litdata for tools/bench-load, which runs this file in an
environment of theirs: `load_peers.py make|rate|resume LIBRARY FOLDER [NUMBER]` prints a number.

Both read copies of the data in their own formats, in order, which is their fastest: no shuffling.
litdata runs as its users found it fastest, with LITDATA_BATCH_DECODE=0.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["LITDATA_BATCH_DECODE"] = "0"

BATCH = 64
SHAPES = {"latent": (4, 32, 32), "emb": (77, 1024)}


def samples(folder: str) -> Iterator[dict[str, Any]]:
    """The samples of our shards."""
    import io
    import tarfile

    import numpy as np

    for path in sorted(Path(folder).glob("*/*.tar")):
        sample: dict[str, Any] = {}
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, name = member.name.partition(".")
                if name.endswith(".npy"):
                    sample[name[:-4]] = np.load(io.BytesIO(tar.extractfile(member).read()))
                if set(sample) == set(SHAPES):
                    yield {"key": key, **sample}
                    sample = {}


def copied(sample: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {n: v if isinstance(v, str) else torch.from_numpy(v) for n, v in sample.items()}


class Litdata:
    def make(self, source: str, folder: str) -> None:
        from litdata.streaming.cache import Cache
        from litdata.streaming.item_loader import PyTreeLoader

        cache = Cache(folder, chunk_bytes="64MB", item_loader=PyTreeLoader())
        for number, sample in enumerate(samples(source)):
            cache[number] = copied(sample)
        cache.done()
        cache.merge(1)

    def loader(self, folder: str, workers: int) -> Any:
        from litdata import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(folder)
        return StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)

    def first_after(self, folder: str, step: int) -> float:
        before = self.loader(folder, 0)
        for number, _ in enumerate(before, 1):
            if number == step:
                break
        state = before.state_dict()
        started = time.perf_counter()
        loader = self.loader(folder, 0)
        loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - started


class Streaming:
    def make(self, source: str, folder: str) -> None:
        from streaming import MDSWriter

        sizes = {n: f"ndarray:float16:{','.join(map(str, s))}" for n, s in SHAPES.items()}
        with MDSWriter(out=folder, columns={"key": "str", **sizes}) as out:
            for sample in samples(source):
                out.write(sample)

    def loader(self, folder: str, workers: int) -> Any:
        from streaming import StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        data = StreamingDataset(local=folder, batch_size=BATCH, shuffle=False)
        return StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)

    def first_after(self, folder: str, step: int) -> float:
        before = self.loader(folder, 0)
        next(iter(before))
        state = before.state_dict() | {"sample_in_epoch": step * BATCH}
        del before
        started = time.perf_counter()
        loader = self.loader(folder, 0)
        loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - started


def rate(batches: Iterable[Any]) -> float:
    started = time.perf_counter()
    count = sum(len(batch["latent"]) for batch in batches)
    return count / (time.perf_counter() - started)


def main() -> None:
    action, library, folder, *more = sys.argv[1:]
    peer = {"litdata": Litdata, "streaming": Streaming}[library]()
    if action == "make":
        peer.make(folder, more[0])
    elif action == "rate":
        print(f"result {rate(peer.loader(folder, int(more[0])))}")
    else:
        print(f"result {peer.first_after(folder, int(more[0]))}")


if __name__ == "__main__":
    main()
