"""`wdsprep.load` beside webdataset, MosaicML streaming and litdata, warm cache, batches of 64.

20 shards of 500 samples, each a latent (4, 32, 32) and an embedding (77, 1024) in fp16, 166 KB
together. wdsprep reads in its global order; the others in order, which is their fastest, and
webdataset once with shuffle(1000) and litdata once shuffled. MosaicML streaming and litdata read
copies in their own formats.
A resume is the time from opening the dataset to the first batch; webdataset has none but reading
everything before. Imports and making the data are left out. Below a table stands how many threads
torch has for itself in each of them. The limit is a thread for each core that does nothing but read
the same samples, in a random order, into the rows of a few batches of fresh memory; of a resume,
one batch of them from shards that are open.

Captions of true length have embeddings of 2304 numbers for each of their tokens, 60 of them in the
mean and 300 at most, in bfloat16, beside a latent (16, 32, 32). The rival has the same bytes in
embeddings of one length.

Of 40 shapes each has latents of 3,600 cells, as the square (60 x 60) of the rival has, so that both
read the same bytes. A dataset of 100,000 shards of 40 shapes is its manifest alone, of 72 MB.

Latents (4, 60, 60) and embeddings stand in one dataset, and in two that are joined, read in batches
of 64 and of 256. Pairs are targets and sources (16, 60, 60), in one dataset and in two that are
joined, beside latents (32, 60, 60). The tars of rivals are copied in turns: memory is up to a fifth
faster in one place than in another, and so they share the places.

From S3 (a Ceph gateway on the same cores) wdsprep reads batches of 256, without a cache and from a
full one; the limit is 16 threads that fetch the tars whole and throw them away. Both begin with
making a client of S3.
"""

import io
import itertools
import mmap
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tools.benches import CORES, TOOLS, Group, Rival, Role, call, note, peers, took
from tools.benches.order import peak_kb

SHARDS, SAMPLES, BATCH, LARGE, S3_SHARDS = 20, 500, 64, 256, 34
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
AHEAD = 4  # batches, where reading alone is measured
EPOCHS, TOKENS, LENGTH, WIDTH = 8, 60, 300, 2304  # where captions are of true length
SHAPES, SIDE, SHAPE_EPOCHS, MANY = 40, 60, 4, 100_000  # cells a side of the square; shards
JOIN_EPOCHS = 4
PEERS, SHUFFLED = ("litdata", "streaming"), "litdata-shuffled"


def groups(home: Path, scale: float) -> Iterator[Group]:
    shards = max(1, round(SHARDS * scale))
    data, steps = home / "wdsprep", shards * SAMPLES // BATCH
    make(str(data), shards)
    for name in PEERS:
        subprocess.run(_peer("make", name, data, home / name), check=True, capture_output=True)
    yield _reading(home, data, shards, workers=0)
    yield _reading(home, data, shards, workers=2)
    yield _resuming(home, data, steps)
    yield from _lengths(home / "lengths", shards)
    yield from _shapes(home / "shapes", shards)
    yield from _joined(home / "joined", shards)
    yield from _pairs(home / "pairs", shards)
    yield _opening(home / "wide", max(1, round(MANY * scale)))
    yield from _from_s3(home / "s3", max(1, round(S3_SHARDS * scale)))


def _peer(*words: object) -> list[str]:
    python = peers.program("load", "python")
    return [str(python), "-E", str(TOOLS / "benches/load_peers.py"), *map(str, words)]


def _reading(home: Path, data: Path, shards: int, *, workers: int) -> Group:
    def rival(name: str, kind: str, *more: object, role: Role = Role.RIVAL) -> Rival:
        return Rival(name=name, command=call(read, kind, data, workers, *more), role=role)

    theirs = [
        Rival(
            name="litdata, shuffled" if kind == SHUFFLED else f"{kind}, in order",
            command=_peer("rate", kind, home / kind.partition("-")[0], workers),
        )
        for kind in (*PEERS, SHUFFLED)
    ]
    return Group(
        name=f"load-{workers}",
        title=f"an epoch, {workers} worker processes" if workers else "an epoch, threads or none",
        count=shards * SAMPLES,
        rivals=[
            rival("wdsprep.load, global order", "wdsprep", role=Role.OURS),
            *theirs,
            rival("webdataset, in order", "webdataset"),
            rival("webdataset, shuffle(1000)", "webdataset", 1000),
            Rival(name="reading alone, all cores", command=call(copy, data), role=Role.LIMIT),
        ],
        targets={one.name: 1.2 if workers else 3.0 for one in theirs},
    )


def _resuming(home: Path, data: Path, steps: int) -> Group:
    at = steps * 90 // 100
    theirs = []
    for name in (*PEERS, SHUFFLED):
        data_of = home / name.partition("-")[0]
        subprocess.run(_peer("save", name, data_of, at), check=True, capture_output=True)
        command = _peer("resume", name, data_of, at)
        theirs.append(Rival(name=f"{name} at 90 %", command=command))
    return Group(
        name="load-resume",
        title="from opening to the first batch",
        rivals=[
            *(
                Rival(
                    name=f"wdsprep at {percent} %",
                    command=call(first, "wdsprep", data, steps * percent // 100, BATCH),
                    role=Role.OURS,
                )
                for percent in (90, 0, 50, 99)
            ),
            *theirs,
            Rival(name="webdataset at 90 %", command=call(first, "webdataset", data, at, BATCH)),
            Rival(name="reading a batch alone", command=call(copy, data, 1), role=Role.LIMIT),
        ],
        targets={rival.name: 3.0 for rival in theirs},
    )


def _lengths(home: Path, shards: int) -> Iterator[Group]:
    varied, even = home / "varied", home / "even"
    lengths = make_captions(str(varied), shards)
    make_captions(str(even), shards, round(sum(lengths) / len(lengths)))
    one = Rival(name="all of one length, the same bytes", command=call(read_captions, even, "full"))
    yield Group(
        name="load-lengths",
        title="epochs of captions of true length",
        count=EPOCHS * len(lengths),
        rivals=[
            Rival(
                name="padded to 300 tokens",
                command=call(read_captions, varied, "full"),
                role=Role.OURS,
            ),
            Rival(
                name="padded to the batch's longest",
                command=call(read_captions, varied, "longest"),
                role=Role.OURS,
            ),
            one,
        ],
        targets={one.name: 0.8},
    )
    shutil.rmtree(home)


def _shapes(home: Path, shards: int) -> Iterator[Group]:
    many, square = home / "many", home / "square"
    make_shapes(str(many), shards, SHAPES)
    make_shapes(str(square), shards, 1)
    one = Rival(name="one shape, the same bytes", command=call(read_shapes, square))
    ours = Rival(name=f"{SHAPES} shapes", command=call(read_shapes, many), role=Role.OURS)
    yield Group(
        name="load-shapes",
        title=f"epochs of {SHAPES} shapes",
        count=SHAPE_EPOCHS * (shards * SAMPLES // BATCH) * BATCH,
        rivals=[ours, one],
        targets={one.name: 0.9},
    )
    shutil.rmtree(home)


def _joined(home: Path, shards: int) -> Iterator[Group]:
    places = [str(home / name) for name in ("both", "latents", "text")]
    make_joined(places, shards)
    for batch in (BATCH, LARGE):
        both, joined = (call(read_joined, batch, 0, *some) for some in (places[:1], places[1:]))
        one = Rival(name="one dataset, the same bytes", command=both)
        yield Group(
            name=f"load-join-{batch}",
            title=f"epochs of two datasets beside each other, batches of {batch}",
            count=JOIN_EPOCHS * (shards * SAMPLES // batch) * batch,
            rivals=[Rival(name="latents and text, joined", command=joined, role=Role.OURS), one],
            targets={one.name: 0.9},
        )
    shutil.rmtree(home)


def _pairs(home: Path, shards: int) -> Iterator[Group]:
    places = [str(home / name) for name in ("latents", "pairs", "targets", "sources")]
    make_pairs(places, shards)
    forms = {"in one dataset": places[1:2], "joined": places[2:]}
    for (form, own), workers in itertools.product(forms.items(), (0, 2)):
        one = Rival(
            name="latents, the same bytes", command=call(read_joined, BATCH, workers, places[0])
        )
        command = call(read_joined, BATCH, workers, *own)
        yield Group(
            name=f"load-pairs-{form.split()[-1]}-{workers}",
            title=f"epochs of pairs, {workers} worker processes",
            count=JOIN_EPOCHS * (shards * SAMPLES // 4 // BATCH) * BATCH,
            rivals=[
                Rival(name=f"targets and sources {form}", command=command, role=Role.OURS),
                one,
            ],
            targets={one.name: 0.9},
        )
    shutil.rmtree(home)


def _opening(home: Path, shards: int) -> Group:
    make_manifest(str(home), shards, SHAPES)
    name = f"{shards:,} shards of {SHAPES} shapes"
    return Group(
        name="load-shapes-open",
        title="opening a dataset, and the samples of its first step",
        rivals=[Rival(name=name, command=call(open_wide, home), role=Role.OURS)],
    )


def _from_s3(home: Path, shards: int) -> Iterator[Group]:
    from tests.kit.s3 import OTHER_SETTINGS, run_tool, s3_client

    for name in OTHER_SETTINGS:
        os.environ.pop(name, None)
    try:
        start_gateway(home / "server")
        with s3_client() as client:
            client.create_bucket(Bucket="bench")
        url = make("s3://bench/latents", shards)
        cache = home / "cache"
        subprocess.run(call(read_s3, url, cache), check=True, capture_output=True)
        steps = shards * SAMPLES // LARGE
        yield Group(
            name="load-s3",
            title="an epoch from S3",
            unit="MB",
            count=shards * SAMPLES * 0.1664,
            rivals=[
                Rival(name="wdsprep.load", command=call(read_s3, url, ""), role=Role.OURS),
                Rival(
                    name="wdsprep.load, full cache",
                    command=call(read_s3, url, cache),
                    role=Role.OURS,
                ),
                Rival(
                    name="whole tars, 16 threads", command=call(whole_tars, url), role=Role.LIMIT
                ),
            ],
            targets={"whole tars, 16 threads": 0.8},
        )
        yield Group(
            name="load-s3-first",
            title="from opening to the first batch at 90 %, from S3",
            rivals=[
                Rival(
                    name=f"wdsprep, batch of {batch}",
                    command=call(first, "wdsprep", url, steps * 9 // 10 * LARGE // batch, batch),
                    role=Role.OURS,
                )
                for batch in (BATCH, LARGE)
            ],
        )
    finally:
        run_tool("stop", "--dir", home / "server")


def start_gateway(home: Path) -> None:
    """With the metadata cache that gateways have by default; tools/s3-server leaves it out, for
    tests that kill it."""
    from tests.kit.s3 import start_server

    server = start_server(home)
    os.environ.update(server.env)
    conf = home / "ceph.conf"
    conf.write_text(conf.read_text().replace("rgw_cache_enabled = false\n", ""))
    server.restart_gateway()


def make(url: str, shards: int) -> str:
    """Every array has bytes of its own, so that no cache serves it."""
    from tests.kit import latent_sets

    def random_array(_key: str, item: Any) -> Any:
        return np.frombuffer(os.urandom(item.array_nbytes), item.dtype).reshape(item.shape)

    latent_sets.array_of = random_array
    fields = (latent_sets.field("latent", (4, 32, 32)), latent_sets.field("emb", (77, 1024)))
    return latent_sets.write_latents(url, [SAMPLES] * shards, fields=fields)


def make_captions(url: str, shards: int, length: int = 0) -> list[int]:
    """Of so many tokens each, or of as many as captions have; how many they are."""
    from tests.kit import latent_sets

    chance, lengths = random.Random(0), []

    def random_array(_key: str, item: Any) -> Any:
        count = item.shape[0]
        if item.is_variable:
            count = min(LENGTH, 1 + int(chance.gammavariate(4, TOKENS / 4)))
            lengths.append(count)
        kind = "<u2" if item.dtype == "bfloat16" else item.dtype
        nbytes = count * item.row_nbytes
        return np.frombuffer(os.urandom(nbytes), kind).reshape(count, *item.shape[1:])

    latent_sets.array_of = random_array
    emb = latent_sets.field("emb", (length or LENGTH, WIDTH), "bfloat16", is_variable=not length)
    fields = (latent_sets.field("latent", (16, 32, 32)), emb)
    latent_sets.write_latents(url, [SAMPLES // 4] * shards, fields=fields)
    return lengths


def make_shapes(url: str, shards: int, count: int) -> None:
    """Shapes of as many cells as the square, each with its own part of the samples."""
    from tests.kit import joined_sets, latent_sets, shape_sets

    def random_array(_key: str, item: Any) -> Any:
        return np.frombuffer(os.urandom(item.array_nbytes), item.dtype).reshape(item.shape)

    joined_sets.array_of = random_array
    cells = SIDE**2
    widths = [width for width in range(1, cells + 1) if not cells % width]
    first = widths.index(SIDE) - count // 2
    weights = np.random.default_rng(0).dirichlet(np.ones(count))
    fields = (latent_sets.field("latent", (4, SIDE, SIDE)), latent_sets.field("emb", (77, 1024)))
    shape_sets.write_shapes(
        url,
        [np.random.default_rng(n).multinomial(SAMPLES, weights).tolist() for n in range(shards)],
        shapes=[(width * 8, cells // width * 8) for width in widths[first : first + count]],
        fields=fields,
        resolution=SIDE * 8,
    )


def make_manifest(url: str, shards: int, shapes: int, *, samples: int = 10) -> None:
    """That of a dataset of so many shards and shapes without the shards: each has up to so many
    samples of each shape, none of a fifth of them."""
    from tests.kit.latent_sets import publish, receipt_of
    from tests.kit.shape_sets import CELL, FIELDS, RESOLUTION
    from wdsprep.dataset.manifest import Shard
    from wdsprep.dataset.npy_arrays import layout
    from wdsprep.dataset.shapes import shape_name
    from wdsprep.store import open_store

    chance = np.random.default_rng(0)
    sizes = [(CELL * (n + 1), CELL * (shapes - n)) for n in range(shapes)]
    settings = {
        "layout": layout(FIELDS),
        "resolution": RESOLUTION,
        "shapes": [list(size) for size in sizes],
    }
    receipts = []
    for number in range(shards):
        row = chance.integers(-samples // 4, samples, shapes, endpoint=True).clip(0).tolist()
        shard = Shard(f"64/{number:06d}.tar", sum(row), sum(row) << 17, f"{number:064x}")
        counts = {shape_name(size): n for size, n in zip(sizes, row, strict=True) if n}
        files = {f"rejects/64/{number:06d}.jsonl": shard.digest}
        more = {"input": shard.digest, "counts": counts, "files": files}
        receipts.append(receipt_of(shard, settings, **more))
    publish(open_store(url), settings, receipts, FIELDS)


def make_joined(places: Sequence[str], shards: int) -> None:
    """Latents and embeddings in one dataset, and each in one of its own."""
    from tests.kit.latent_sets import field

    latents, text = field("latent", (4, SIDE, SIDE)), field("emb", (77, 1024))
    _write_parts(places, [SAMPLES] * shards, [(latents, text), (latents,), (text,)])


def make_pairs(places: Sequence[str], shards: int) -> None:
    """Latents, pairs of half their size, and the targets and the sources of such pairs."""
    from tests.kit.latent_sets import field

    latents, target = (field("latent", (channels, SIDE, SIDE)) for channels in (32, 16))
    source = replace(target, name="source.npy", is_of_role=True)
    parts = [(latents,), (target, source), (target,), (source,)]
    _write_parts(places, [SAMPLES // 4] * shards, parts)


def _write_parts(places: Sequence[str], sizes: Sequence[int], parts: Sequence[Any]) -> None:
    """Datasets of the same images, each with its own fields, which lie alike in memory."""
    from tests.kit import joined_sets

    def random_array(_key: str, item: Any) -> Any:
        return np.frombuffer(os.urandom(item.array_nbytes), item.dtype).reshape(item.shape)

    joined_sets.array_of = random_array
    side = SIDE * 8
    images = joined_sets.Images(sizes=sizes, resolution=side)
    for place, fields in zip(places, parts, strict=True):
        roles = [item.name.removesuffix(".npy") for item in fields if item.is_of_role]
        joined_sets.write_part(
            place,
            images,
            fields,
            more={"roles": ["target", *roles][-len(fields) :]} if roles else {},
            roles=(lambda _key: {"source": (side, side)}) if roles else None,
        )
    for tars in zip(*(sorted(Path(place).glob("*/*.tar")) for place in places), strict=True):
        for tar in tars:
            shutil.copyfile(tar, copy := tar.with_suffix(".copy"))
            copy.replace(tar)


# --- in processes of their own


def _ours(url: str, batch: int, **options: Any) -> Iterable[Any]:
    import wdsprep

    return wdsprep.load(url, global_batch=batch, rank=0, world_size=1, **options)


def _webdataset(folder: str, shuffle: int = 0) -> Any:
    import torch
    import webdataset

    def array(data: bytes) -> torch.Tensor:
        return torch.from_numpy(np.load(io.BytesIO(data)))

    def stacked(samples: list[Any]) -> dict[str, Any]:
        keys, latents, embs = zip(*samples, strict=True)
        return {"latent": torch.stack(latents), "emb": torch.stack(embs), "key": list(keys)}

    urls = sorted(map(str, Path(folder).glob("*/*.tar")))
    data = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    data = data.shuffle(shuffle) if shuffle else data
    data = data.to_tuple("__key__", "latent.npy", "emb.npy")
    return data.map_tuple(str, array, array).batched(BATCH, collation_fn=stacked)


def read(kind: str, folder: str, workers: int, shuffle: int = 0) -> None:
    import torch
    from torch.utils.data import DataLoader

    batches = (
        _webdataset(folder, shuffle)
        if kind == "webdataset"
        else _ours(folder, BATCH, **({"threads": 1} if workers else {}))
    )
    if workers:
        batches = DataLoader(batches, batch_size=None, num_workers=workers)
    started = time.perf_counter()
    for _ in batches:
        pass
    took(time.perf_counter() - started)
    note(f"torch.set_num_threads({torch.get_num_threads()})")


def read_captions(folder: str, pad: str) -> None:
    import wdsprep.loading.loader  # noqa: F401  torch, which says nothing of reading

    started = time.perf_counter()
    for _ in _ours(folder, BATCH, pad=pad, epochs=EPOCHS):
        pass
    took(time.perf_counter() - started)


def read_shapes(folder: str) -> None:
    import wdsprep.loading.loader  # noqa: F401  torch, which says nothing of reading

    started = time.perf_counter()
    for _ in _ours(folder, BATCH, epochs=SHAPE_EPOCHS):
        pass
    took(time.perf_counter() - started)


def read_joined(batch: int, workers: int, folder: str, *join: str) -> None:
    from torch.utils.data import DataLoader

    import wdsprep.loading.loader  # noqa: F401  torch, which says nothing of reading

    options = {"threads": 1} if workers else {}
    batches = _ours(folder, batch, epochs=JOIN_EPOCHS, join=join, **options)
    if workers:
        batches = DataLoader(batches, batch_size=None, num_workers=workers)
    started = time.perf_counter()
    for _ in batches:
        pass
    took(time.perf_counter() - started)


def open_wide(folder: str) -> None:
    import wdsprep.loading.loader  # noqa: F401

    before, started, cpu = peak_kb(), time.perf_counter(), time.process_time()
    opened: Any = _ours(folder, 1024)
    opened.plan.order.step(0)
    took(time.perf_counter() - started)
    cpu_s = time.process_time() - cpu
    note(f"{cpu_s:.1f} s of processor time, {(peak_kb() - before) / 1024:.0f} MB")


def copy(folder: str, batches: int = 0) -> None:
    """What all cores together bring out of the page cache into batches, with nothing else to do:
    all samples, or so many batches of them."""
    reads = []
    for path in sorted(Path(folder).glob("*/*.tar")):
        fd, ends = os.open(path, os.O_RDONLY), np.fromfile(f"{path}.idx", "<u8").tolist()
        reads += [(fd, start, end - start) for start, end in itertools.pairwise(ends)]
    random.Random(0).shuffle(reads)
    most = max(nbytes for _, _, nbytes in reads)
    del reads[batches * BATCH or len(reads) :]

    def some(first: int) -> None:
        made: list[memoryview] = []
        for number, (fd, start, nbytes) in enumerate(reads[first::CORES]):
            if number % BATCH == 0 and len(made) < AHEAD:
                made.append(memoryview(mmap.mmap(-1, min(BATCH, len(reads)) * most, PRIVATE)))
            row = number % BATCH * most
            os.preadv(fd, [made[number // BATCH % AHEAD][row : row + nbytes]], start)

    started = time.perf_counter()
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(some, range(CORES)))
    took(time.perf_counter() - started)


def first(kind: str, url: str, step: int, batch: int) -> None:
    import boto3  # noqa: F401
    import torch  # noqa: F401
    import webdataset  # noqa: F401

    import wdsprep.loading.loader  # noqa: F401

    started = time.perf_counter()
    if kind == "webdataset":
        next(itertools.islice(_webdataset(url), step, None))
    else:
        next(iter(_ours(url, batch, step=step)))
    took(time.perf_counter() - started)


def read_s3(url: str, cache: str) -> None:
    import boto3  # noqa: F401

    import wdsprep.loading.loader  # noqa: F401  torch, which says nothing of reading
    from wdsprep.store.s3.s3_store import S3Store

    asked, plain = [0], S3Store.read_into

    def counted(self: S3Store, name: str, buffer: memoryview, /, *, start: int) -> int:
        asked[0] += len(buffer)
        return plain(self, name, buffer, start=start)

    S3Store.read_into = counted  # type: ignore[method-assign]
    options = {"cache": cache, "cache_nbytes": 8 << 30} if cache else {}
    started = time.perf_counter()
    samples = sum(len(batch["key"]) for batch in _ours(url, LARGE, **options))
    took(time.perf_counter() - started)
    note(f"{asked[0] / samples / 1e3:.0f} KB were asked of S3 for each sample of 166 KB")


def whole_tars(url: str) -> None:
    import boto3  # noqa: F401

    from wdsprep.store import open_store

    started = time.perf_counter()
    store = open_store(url)
    names = [entry.name for entry in store.list() if entry.name.endswith(".tar")]
    with ThreadPoolExecutor(16) as pool:
        for data in pool.map(store.read, names):
            del data
    took(time.perf_counter() - started)
