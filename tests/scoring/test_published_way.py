"""The whole way of the published run, on drawn pictures: URLs, images, scores, phases."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import wdsprep
from tests.kit.encodes import encode_here
from tests.kit.scores import columns_in, score_here
from tests.kit.webserver import Connection, Request, WebServer, ok, status
from tools.tiny.drawings import draw
from wdsprep.cli.demo.pictures import KINDS

pytestmark = pytest.mark.system
CAPTIONS = ("a dog on a beach", "ein Hund am Strand", "red car in front of a house", "")


def test_urls_become_chosen_latents_of_both_phases(models: Path, tmp_path: Path) -> None:
    pytest.importorskip("py3langid")
    sizes = ((96, 80), (200, 150))
    drawn = [
        KINDS[kind](draw(f"{kind} {number}", sizes[number % 2]).image)
        for number in range(2)
        for kind in KINDS
    ]

    def answer(connection: Connection, request: Request) -> bool:
        name = request.path.strip("/")
        behave = ok(drawn[int(name)]) if name.isdecimal() else status(404)  # of robots.txt
        return behave(connection, request)

    with WebServer(answer) as server:
        rows = [
            {"url": f"{server.url}/{number}", "caption": CAPTIONS[number % len(CAPTIONS)]}
            for number in range(len(drawn))
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "urls.parquet")
        images = tmp_path / "images"
        wdsprep.pack(
            str(tmp_path / "urls.parquet"),
            str(images),
            buckets=(64, 128),
            samples_per_shard=6,
            allow_private_hosts=True,
        )
    given = {"model": str(models / "clip"), "head": f"aesthetic={models / 'head.safetensors'}"}
    score_here(images, tmp_path / "scores", language=True, **given)
    columns = columns_in(tmp_path / "scores")
    least = sorted(each["aesthetic"] for each in columns.values())[len(columns) // 3]
    condition = f"language == 'en' and aesthetic >= {least}"
    good = {
        key
        for key, each in columns.items()
        if each["language"] == "en" and each["aesthetic"] >= least
    }
    wdsprep.select(
        [str(images), str(tmp_path / "scores")], str(tmp_path / "good/{name}"), where=condition
    )
    assert columns_in(tmp_path / "good/scores").keys() == good
    for resolution in (64, 128):
        latents = tmp_path / f"good/latents-{resolution}"
        encode_here(tmp_path / "good/images", latents, resolution=resolution)
        loader = wdsprep.load(str(latents), join=str(tmp_path / "good/scores"), global_batch=1)
        for batch in loader:
            assert batch["key"][0] in good
            assert batch["aesthetic"].item() >= least - 1e-6
    assert len(list(wdsprep.load(str(tmp_path / "good/latents-64"), global_batch=1))) == len(good)
