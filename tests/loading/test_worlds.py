"""One order for every number of ranks, threads and workers, and after a resume, of every kind."""

import itertools
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import wdsprep
from tests.kit.batches import assert_same
from tests.kit.joined_sets import LATENTS, TEXT, VARIED, Images, write_part
from tests.kit.latent_sets import EMB, LATENT, field, write_latents
from tests.kit.packs import pack, photos
from tests.kit.role_sets import SQUARE, random_samples, write_roles
from tests.kit.shape_sets import write_shapes
from wdsprep.errors import FingerprintError
from wdsprep.loading.options import Stream

BATCH, STEPS, STATE_NBYTES = 16, 17, 1024
VARIABLE = (field("latent", LATENT), field("emb", (40, 24), "bfloat16", is_variable=True))
MIRRORED = (field("latent", LATENT), field("latent_flipped", LATENT), field("emb", EMB))
ALL = {"fields": ("latent", "emb", "txt", "json", "key"), "drop_text": 0.25}
Kind = tuple[Any, dict[str, Any]]


def joined(folder: Path, *, text: Any, shapes: Any = (), captions: Any = None) -> Kind:
    """Latents, and texts that lack some samples, beside others if captions are picked."""
    images = Images(shapes=shapes, sizes=(60, 33, 50))
    own = (*LATENTS, *text) if captions else LATENTS
    latents = write_part(str(folder / "latents"), images, own, rejects={0: (0, 7)})
    rejects = {1: (5,), 2: (3, 4)}
    texts = [
        write_part(str(folder / n), images, text, tag=n, more={"caption_name": n}, rejects=rejects)
        for n in [*(captions or ("caption", "long"))][1:]
    ]
    return latents, {"join": texts, "captions": captions}


def empties(folder: Path) -> Kind:
    """Empty captions of each sample, for the texts that are dropped."""
    latents, options = joined(folder, text=VARIED, captions=("caption", "empty"))
    return latents, {**options, "captions": None, "drop_text": 0.4}


def table(folder: Path) -> str:
    lines = ["key,score", *(f"{number:012d},{number / 8}" for number in range(0, 300, 2))]
    (folder / "scores.csv").write_text("\n".join(lines))
    return str(folder / "scores.csv")


def mixture(folder: Path) -> Kind:
    other = write_latents(str(folder / "other"), [50, 7], base=10**6)
    latents = write_latents(str(folder / "latents"))
    return [Stream(latents, weight=3), Stream(other, weight=1)], {}


def images_in_roles(folder: Path) -> Kind:
    samples = random_samples(4, 60, shapes=((48, 80), SQUARE))
    return write_roles(str(folder), samples), {"global_batch": 8}


def crops(folder: Path) -> Kind:
    images = pack(photos(folder / "photos", 48), folder / "packed", "--samples-per-shard", "10")
    return str(images), {"pixels": 32, "fields": ("pixels", "txt", "json", "key")}


SHAPED = {"fields": ("latent", "emb", "shape", "key")}
PICKED = {"caption": 0.2, "long": 0.5, "alt": 0.3}
KINDS: dict[str, Any] = {
    "latents": lambda folder: (write_latents(str(folder)), ALL),
    "moments": lambda folder: (write_latents(str(folder), moments=True), ALL),
    "mirror images": lambda folder: (write_latents(str(folder), fields=MIRRORED), {"flip": 0.5}),
    "captions of true length": lambda folder: (write_latents(str(folder), fields=VARIABLE), ALL),
    "shapes": lambda folder: (write_shapes(str(folder)).url, SHAPED),
    "groups of a shape": lambda folder: (write_shapes(str(folder)).url, {"shape_batch": 16}),
    "a mixture": mixture,
    "joined text": lambda folder: joined(folder, text=VARIED),
    "joined shapes": lambda folder: joined(folder, text=TEXT, shapes=((48, 80), (64, 64))),
    "picked captions": lambda folder: joined(folder, text=VARIED, captions=PICKED),
    "empty captions of samples": empties,
    "a table": lambda folder: (write_latents(str(folder)), {"join": table(folder)}),
    "a condition": lambda folder: (write_latents(str(folder)), {"where": "key >= '000000000100'"}),
    "images in roles": images_in_roles,
    "crops": crops,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns each kind as it is served to a single rank, in the same steps of the same data."""

    @cache
    def make(kind: str) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
        url, options = KINDS[kind](tmp_path_factory.mktemp("worlds"))
        options = {"global_batch": BATCH, "epochs": None, **options}
        return url, options, list(itertools.islice(load(url, **options), STEPS))

    return make


def load(url: Any, **options: Any) -> Any:
    return wdsprep.load(url, **({"rank": 0, "world_size": 1} | options))


def together(shares: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The shares of all ranks as one batch."""
    whole = {}
    for name, value in shares[0].items():
        values = [share[name] for share in shares]
        if isinstance(value, torch.Tensor):
            whole[name] = torch.cat(values)
        else:
            whole[name] = value if name == "shape" else [*itertools.chain(*values)]
    return whole


LONG = pytest.mark.system


@pytest.mark.parametrize(
    ("stop", "before", "after"),
    [
        pytest.param(0, 1, 2, marks=LONG),
        *((1, 2, 4), (9, 2, 1)),
        pytest.param(1, 4, 8, marks=LONG),
        pytest.param(12, 8, 4, marks=LONG),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_go_on_together_where_others_have_stopped(
    made: Any, kind: str, stop: int, before: int, after: int
) -> None:
    url, options, whole = made(kind)
    ranks = [load(url, rank=n, world_size=before, threads=1, **options) for n in (0, before - 1)]
    for loader in ranks if stop else ():
        loader.step = stop - 1
        next(iter(loader))
    first, last = (json.dumps(loader.state_dict()) for loader in ranks)
    assert first == last
    assert len(first) < STATE_NBYTES
    ranks = [load(url, rank=n, world_size=after, threads=n % 3, **options) for n in range(after)]
    for loader in ranks:
        loader.load_state_dict(json.loads(first))
    shares = itertools.islice(zip(*ranks, strict=True), STEPS - stop)
    assert_same(map(together, shares), whole[stop:])


@pytest.mark.parametrize(
    "kind", ["latents", "captions of true length", pytest.param("shapes", marks=LONG)]
)
def test_what_is_selected_is_served_once_a_pass_with_the_rows_of_the_whole(
    made: Any, kind: str
) -> None:
    """Any samples of some shards, in an order that is no other selection's."""
    url = made(kind)[0]
    names = ("latent", "emb", "key")
    epochs = 9 if kind == "shapes" else 1  # until each sample has come
    rows = {b["key"][0]: b for b in load(url, global_batch=1, epochs=epochs, fields=names)}
    chance = random.Random(0)
    chosen = [{key for key in rows if chance.random() < 0.6 and key[-3] != "1"} for _ in range(2)]
    first, second = (f"key in ({', '.join(map(repr, sorted(keys)))})" for keys in chosen)
    options = {"where": first, "global_batch": 1, "fields": names}
    both = chosen[0] & chosen[1]
    served = list(load(Stream(url, where=second), **options, epochs=epochs))
    assert {batch["key"][0] for batch in served} == both
    if kind != "shapes":
        assert len(served) == len(both)
    assert_same(served, [rows[batch["key"][0]] for batch in served])
    state = load(url, **options).state_dict()
    for other in ({}, {"where": second}):
        with pytest.raises(FingerprintError, match="stream 0"):
            load(url, **{"global_batch": 1, **other}).load_state_dict(state)


@pytest.mark.parametrize(("threads", "ahead"), [(0, 0), (1, 30), (7, 1), (2, 0)])
@pytest.mark.parametrize("kind", ["latents", "shapes", "joined text"])
def test_threads_change_nothing(made: Any, kind: str, threads: int, ahead: int) -> None:
    url, options, whole = made(kind)
    batches = load(url, threads=threads, ahead=ahead, **options)
    assert_same(itertools.islice(batches, STEPS), whole)


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("kind", "workers"),
    [("latents", 1), ("latents", 3), ("captions of true length", 2), ("picked captions", 2)],
)
def test_workers_of_a_dataloader_change_nothing(made: Any, kind: str, workers: int) -> None:
    url, options, whole = made(kind)
    for step in (0, 7):
        loader = load(url, step=step, **options)
        batches = DataLoader(loader, batch_size=None, num_workers=workers)
        assert_same(itertools.islice(batches, STEPS - step), whole[step:])
