"""The loaders of MosaicML streaming and litdata for `tools/bench load`, which runs this file in an
environment of theirs: `load_peers.py make|rate|save|resume LIBRARY FOLDER MORE` says how long it
took. `save` leaves the state after so many steps, with which another process resumes.

Both read copies of the data in their own formats, in order, which is their fastest: no shuffling;
litdata once shuffled as well. It runs as its users found it fastest, with LITDATA_BATCH_DECODE=0.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
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
    def __init__(self, *, shuffle: bool = False) -> None:
        self.shuffle = shuffle

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

        data = StreamingDataset(folder, shuffle=self.shuffle)
        return StreamingDataLoader(data, batch_size=BATCH, num_workers=workers)

    def state(self, folder: str, step: int) -> Any:
        loader = self.loader(folder, 0)
        for _ in itertools.islice(loader, step):
            pass
        return loader.state_dict()


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

    def state(self, folder: str, step: int) -> Any:
        loader = self.loader(folder, 0)
        next(iter(loader))
        return loader.state_dict() | {"sample_in_epoch": step * BATCH}


PEERS: dict[str, Callable[[], Litdata | Streaming]] = {
    "litdata": Litdata,
    "litdata-shuffled": partial(Litdata, shuffle=True),
    "streaming": Streaming,
}


def read(batches: Iterable[Any]) -> float:
    started = time.perf_counter()
    if not sum(len(batch["latent"]) for batch in batches):
        raise SystemExit("nothing was read")
    return time.perf_counter() - started


def first_after(peer: Litdata | Streaming, folder: str, state: Any, step: int) -> float:
    """Imports are done, as they are in a trainer by the time that it loads data."""
    import litdata  # noqa: F401
    import streaming  # noqa: F401

    started = time.perf_counter()
    loader = peer.loader(folder, 0)
    loader.load_state_dict(state)
    batch = next(iter(loader))
    taken = time.perf_counter() - started
    shuffled = isinstance(peer, Litdata) and peer.shuffle
    if int(batch["key"][0]) != step * BATCH and not shuffled:
        raise SystemExit(f"resumed at {batch['key'][0]} instead of {step * BATCH}")
    return taken


def main() -> None:
    action, library, folder, *more = sys.argv[1:]
    peer = PEERS[library]()
    if action == "make":
        peer.make(folder, more[0])
    elif action == "rate":
        import torch

        print(f"took {read(peer.loader(folder, int(more[0])))}")
        print(f"note torch.set_num_threads({torch.get_num_threads()})")
    elif action == "save":
        Path(f"{folder}.{library}.state").write_text(json.dumps(peer.state(folder, int(more[0]))))
    else:
        state = json.loads(Path(f"{folder}.{library}.state").read_text())
        print(f"took {first_after(peer, folder, state, int(more[0]))}")


if __name__ == "__main__":
    main()
