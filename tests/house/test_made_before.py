"""What version 0.1.0 wrote is read today: datasets, runs that were killed, states, a cache.

`kit/made_by_0_1_0` was made by these commands, all its files having the time `WHEN` before each of
them, since the inputs of a dataset say when its files were changed. KILLED runs were ended by
SIGKILL, on a machine called `elsewhere` whose fsync took 50 ms.

    pack downloads images --buckets 64,128 --samples-per-shard 3 --workers 1
    pack downloads images (the same) --overwrite                        # so it has an `edition`
    pack downloads images-begun (the same)                              # KILLED in slice 2
    encode images latents --resolution 64 MODEL
    encode images moments --resolution 128 --latents moments --text tokens MODEL
    encode images moments-begun (the same)                              # KILLED after a shard
    encode images trial --resolution 128 --text none --limit 1 MODEL
    pack tars from-tars --buckets 64 --workers 1                        # with 0.tar
    pack tars from-tars (the same) --append                             # and 1.tar
    index tars
    encode tars latents-of-tars --resolution 64 --text none MODEL
    pack tables from-tables --buckets 64 --workers 1 --filter 'similarity > 0.3'
    pack urls.csv from-urls --buckets 64 --workers 1 --compute-hash sha256 \\
        --allow-private-hosts --contact you@example.org
    pack urls.csv from-urls (the same) --retry-rejected                 # KILLED: planned, not done

MODEL is `--model tiny --device cpu --runner local --workers 1`. `states.json` has states of
`LOADERS` and the batches that came after each; `cache` is what `wdsprep.load(cache=)` left of
`moments`, served by a `Bucket`.
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import wdsprep
from tests.kit.made_before import (
    MODEL,
    WHEN,
    copied,
    damage,
    made_by,
    manifest,
    noted,
    run,
    run_here,
    same,
    shards,
    tree,
    untouched,
)
from wdsprep.errors import FingerprintError

OLD = made_by("0.1.0")
PACKED = {
    "images": ("downloads", "--buckets", "64,128", "--samples-per-shard", "3", "--workers", "1"),
    "from-tars": ("tars", "--buckets", "64", "--workers", "1"),
    "from-tables": ("tables", "--buckets", "64", "--workers", "1", "--filter", "similarity > 0.3"),
    "from-urls": (
        *("urls.csv", "--buckets", "64", "--workers", "1", "--compute-hash", "sha256"),
        *("--allow-private-hosts", "--contact", "you@example.org"),
    ),
}
MOMENTS = ("images", "--resolution", "128", "--latents", "moments", "--text", "tokens", *MODEL)
ENCODED = {
    "latents": ("images", "--resolution", "64", *MODEL),
    "moments": MOMENTS,
    "latents-of-tars": ("tars", "--resolution", "64", "--text", "none", *MODEL),
}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return copied(OLD, tmp_path / "old")


# --- datasets


@pytest.mark.parametrize(
    "names",
    [
        *(("images", "latents"), ("images", "moments"), ("images", "trial"), ("latents-of-tars",)),
        *(("from-tars",), ("from-tables",), ("from-urls",)),
        *(("images-begun",), ("images", "moments-begun")),
    ],
)
def test_what_was_sound_is_sound(old: Path, names: tuple[str, ...]) -> None:
    run(old, "verify", *names)
    run(old, "verify", "--quick", *names)
    receipt = json.loads(min((old / names[-1]).glob("receipts/**/*.json")).read_bytes())
    damage(old / names[-1] / receipt["shards"][0]["name"])
    run(old, "verify", *names, code=3)


@pytest.mark.parametrize("name", ["images", "from-tars", "from-tables"])
def test_what_is_packed_is_not_packed_again(old: Path, name: str) -> None:
    source, *options = PACKED[name]
    run(old, "pack", source, name, *options)
    assert tree(old / name) == tree(OLD / name)
    assert untouched(old / name) >= shards(OLD / name)
    refused = run(old, "pack", source, name, *options, "--min-size", "65", code=1)
    assert "--min-size 65 (was 0)" in refused.stderr


# --- runs that go on


def test_a_killed_pack_goes_on_to_the_bytes_of_one_that_was_not(old: Path) -> None:
    source, *options = PACKED["images"]
    begun = old / "images-begun"
    done = {f"64/{number}.tar" for number in ("000000", "000001")} | {"128/000001.tar"}
    assert list(begun.rglob("*.hold"))
    assert list(begun.rglob(".*.tmp"))
    run(old, "pack", source, begun.name, *options)
    whole = tree(OLD / "images")
    assert len(whole.pop("edition")) > 1
    assert tree(begun) == whole
    assert untouched(begun) & shards(begun) == done


@pytest.mark.system
def test_a_killed_encode_goes_on(old: Path) -> None:
    """To the last bits that a processor of another kind may give."""
    begun = old / "moments-begun"
    (done,) = (path.stem for path in begun.glob("receipts/128/*.json"))
    source, *options = MOMENTS
    run_here(old, "encode", source, begun.name, *options)
    assert tree(begun).keys() == tree(OLD / "moments").keys()
    assert untouched(begun) & shards(begun) == {f"128/{done}.tar"}
    run(old, "verify", "images", begun.name)
    for mine, theirs in zip(*(batches(root, 1) for root in (begun, OLD / "moments")), strict=True):
        assert mine["key"] == theirs["key"]
        assert torch.equal(mine["tokens"], theirs["tokens"])
        assert torch.allclose(mine["latent"].float(), theirs["latent"].float(), atol=1e-2)


def batches(root: Path, size: int) -> Iterator[dict[str, Any]]:
    return iter(wdsprep.load(str(root), global_batch=size))


def test_an_append_goes_on_from_an_append(old: Path) -> None:
    source, *options = PACKED["from-tars"]
    shutil.copy(old / "tars" / "0.tar", old / "tars" / "2.tar")
    run(old, "pack", source, "from-tars", *options, "--append")
    assert shards(OLD / "from-tars") < untouched(old / "from-tars")
    assert manifest(old / "from-tars")["generations"] == [0, 1, 2]
    run(old, "verify", "from-tars")


@pytest.mark.system
def test_rows_that_were_to_be_tried_again_are(old: Path) -> None:
    """Nobody listens at the URL of the one that failed, and no other is asked for."""
    source, *options = PACKED["from-urls"]
    tables = old / "from-urls"
    assert not list(tables.glob("receipts/1*"))
    run(old, "pack", source, "from-urls", *options)
    assert rejects(tables / "rejects" / "000000.jsonl") == {"urls.csv#1": "http_4xx"}
    assert rejects(tables / "rejects" / "1000000000.jsonl") == {"urls.csv#2": "refused"}
    assert shards(OLD / "from-urls") < untouched(tables)
    run(old, "verify", "from-urls")


def rejects(file: Path) -> dict[str, str]:
    lines = map(json.loads, file.read_bytes().splitlines())
    return {line["source"]: line["code"] for line in lines}


@pytest.mark.parametrize("name", sorted(ENCODED))
def test_what_is_encoded_is_not_encoded_again(old: Path, name: str) -> None:
    source, *options = ENCODED[name]
    run(old, "encode", source, name, *options)
    assert tree(old / name) == tree(OLD / name)
    assert untouched(old / name) >= shards(OLD / name)


@pytest.mark.system
def test_a_trial_is_finished(old: Path) -> None:
    options = ("--resolution", "128", "--text", "none", *MODEL)
    told = run(old, "plan", "images", "--trial", "trial", "--json").stdout
    assert "measured with tiny on cpu at 128" in told
    run_here(old, "encode", "images", "trial", *options)
    run(old, "verify", "images", "trial")
    assert len(shards(old / "trial")) == 2
    assert "limit" not in manifest(old / "trial")["extra"]


def test_a_damaged_slice_is_packed_again_to_the_same_bytes(old: Path) -> None:
    source, *options = PACKED["images"]
    damage(old / "images/64/000001.tar")
    run(old, "repair", "images", "--yes")
    run(old, "pack", source, "images", *options)
    assert tree(old / "images") == tree(OLD / "images")


def test_a_lost_manifest_is_made_again_of_old_receipts(old: Path) -> None:
    source, *options = PACKED["images"]
    (old / "images" / "wdsprep.json").unlink()
    run(old, "rebuild", "images")
    assert not manifest(old / "images")["complete"]
    run(old, "pack", source, "images", *options)
    assert tree(old / "images") == tree(OLD / "images")


def test_indexes_come_out_the_same(old: Path) -> None:
    for index in (old / "tars").glob("*.idx"):
        index.unlink()
    run(old, "index", "tars")
    assert tree(old / "tars") == tree(OLD / "tars")


# --- what is shown


@pytest.mark.system
def test_they_are_shown(old: Path) -> None:
    seen = json.loads(run(old, "inspect", "images", "--json").stdout)
    assert seen["samples"] == 8
    assert "latent.npy" in run(old, "inspect", "latents", "000001000001").stdout
    assert "too_small" in run(old, "inspect", "images", "000003000000").stdout
    assert "128/{000001..000002}.tar" in run(old, "inspect", "moments", "--urls").stdout
    run_here(old, "report", "images", "latents", "moments", "-o", "page.html")
    page = (old / "page.html").read_text()
    (caption,) = (path.read_text().strip() for path in old.glob("downloads/d/*.txt"))
    assert caption in page
    assert "l-small.jpg" in page


# --- states


ARRAYS = {"global_batch": 4, "epochs": 4, "seed": 5, "drop_text": 0.5}
HOW = wdsprep.Encode(resolution=64, model="tiny", device="cpu")
PASSED = {"global_batch": 2, "epochs": 2, "seed": 7}


def stored(home: Path, **options: Any) -> Any:
    return wdsprep.load(str(home / "latents"), fields=("latent", "emb", "key"), **ARRAYS, **options)


def mixed(home: Path) -> Any:
    """Latents of two shapes, some of which are drawn anew each time."""
    streams = [
        wdsprep.Stream(home / "latents", weight=3, buckets="64"),
        wdsprep.Stream(home / "moments", weight=1),
    ]
    return wdsprep.load(streams, global_batch=2, homogeneous=True, epochs=None, run=1, window=2)


def raw(home: Path) -> Any:
    return wdsprep.load(str(home / "images"), global_batch=3, raw=True, epochs=3)


def cropped(home: Path) -> Any:
    return wdsprep.load(str(home / "images"), global_batch=3, pixels=64, epochs=3)


def foreign(home: Path) -> Any:
    return wdsprep.load(str(home / "tars"), global_batch=1, raw=True, epochs=3)


def encoded(home: Path) -> Any:
    how = HOW
    return wdsprep.load(str(home / "images"), encode=how, **PASSED)


def passed(home: Path) -> Any:
    return wdsprep.load(str(home / "latents"), **PASSED)


LOADERS = {
    "stored": stored,
    "mixed": mixed,
    "raw": raw,
    "cropped": cropped,
    "foreign": foreign,
    "encoded": encoded,
    "streamed": encoded,  # by `wdsprep.stream`
    "passed": passed,
}


STATES = json.loads((OLD / "states.json").read_bytes())


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(LOADERS))
def test_a_loader_goes_on_from_its_state(old: Path, name: str) -> None:
    state, wanted = STATES[name]["state"], STATES[name]["next"]
    loader = LOADERS[name](old)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert same(noted(loader, len(wanted)), wanted)
    assert not same(noted(LOADERS[name](old), len(wanted)), wanted)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # which torchdata calls
def test_workers_of_a_data_loader_go_on_from_theirs(old: Path) -> None:
    """torchdata's own state holds one of our loader for each worker."""
    loader = in_workers(old)
    loader.load_state_dict(STATES["workers"]["state"])
    assert same(noted(loader, 3), STATES["workers"]["next"])


def in_workers(home: Path) -> Any:
    return StatefulDataLoader(stored(home), batch_size=None, num_workers=2)


def test_a_state_of_one_rank_goes_on_in_two(old: Path) -> None:
    wanted = STATES["stored"]["next"]
    ranks = [stored(old, rank=rank, world_size=2) for rank in range(2)]
    for loader in ranks:
        loader.load_state_dict(STATES["stored"]["state"])
    shares = [iter(loader) for loader in ranks]
    for batch in wanted:
        parts = [noted(share, 1)[0] for share in shares]
        assert same([{name: parts[0][name] + parts[1][name] for name in batch}], [batch])


def test_latents_on_their_way_into_a_dataset_have_its_states(old: Path) -> None:
    tee = str(old / "latents")
    made = wdsprep.load(str(old / "images"), encode=HOW, tee=tee, **PASSED)
    assert made.state_dict() == passed(old).state_dict()
    assert encoded(old).state_dict() != passed(old).state_dict()


@pytest.mark.parametrize("name", ["encoded", "streamed", "passed"])
def test_a_state_of_latents_on_their_way_goes_on_in_stored_ones(old: Path, name: str) -> None:
    loader = passed(old)
    loader.load_state_dict(STATES[name]["state"])
    assert same(noted(loader, len(STATES[name]["next"])), STATES[name]["next"])


def test_a_state_of_other_data_is_refused(old: Path) -> None:
    with pytest.raises(FingerprintError, match="homogeneous: true -> false"):
        passed(old).load_state_dict(STATES["mixed"]["state"])


# --- the cache


class Bucket:
    """A folder as an S3 bucket that is read, all of whose objects were written at `WHEN`: what the
    cache holds of an object counts only for its time and its ETag."""

    def __init__(self, root: Path) -> None:
        bucket, self.asked = self, []  # type: tuple[Bucket, list[str]]

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                bucket.answer(self, root)

            do_HEAD = do_GET  # noqa: N815  that is what it is called

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.server.daemon_threads = True
        self._thread = threading.Thread(target=self.server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "Bucket":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def answer(self, to: BaseHTTPRequestHandler, root: Path) -> None:
        """One object, or the range of it that is asked for."""
        name = to.path.partition("?")[0].split("/", 2)[2]
        self.asked.append(f"{to.command} {name}")
        path = root / name
        data = path.read_bytes() if path.is_file() else b"<Error><Code>NoSuchKey</Code></Error>"
        status, etag = (200 if path.is_file() else 404), hashlib.md5(data).hexdigest()
        start, end = 0, len(data)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", to.headers.get("Range", ""))
        if asked and status == 200:
            status, start, end = 206, int(asked[1]), min(end, int(asked[2] or end) + 1)
        to.send_response(status)
        to.send_header("Content-Length", str(end - start))
        to.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        to.send_header("ETag", f'"{etag}"')
        to.send_header("Last-Modified", formatdate(WHEN, usegmt=True))
        to.end_headers()
        if to.command == "GET":
            to.wfile.write(data[start:end])

    def tars(self) -> int:
        """How many reads of shards there were since this was last asked."""
        asked, self.asked = self.asked, []
        return sum(each.startswith("GET") and each.endswith(".tar") for each in asked)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with Bucket(OLD) as made:
        for name, value in credentials(made.url).items():
            monkeypatch.setenv(name, value)
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
            monkeypatch.delenv(name, raising=False)
        yield made


def credentials(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def from_bucket(cache: Path) -> Any:
    """The epochs that filled the cache."""
    names = ("latent", "tokens", "txt", "key")
    options = {"global_batch": 1, "epochs": 2, "fields": names}
    return wdsprep.load("s3://old/moments", cache=cache, cache_nbytes=1 << 30, **options)


def test_an_old_cache_serves_what_it_holds(old: Path, bucket: Bucket, tmp_path: Path) -> None:
    before = tree(old / "cache")
    wanted = noted(from_bucket(tmp_path / "new"), 6)
    assert bucket.tars() > 0
    assert same(noted(from_bucket(old / "cache"), 6), wanted)
    assert bucket.tars() == 0
    assert tree(old / "cache") == before == tree(tmp_path / "new")


def test_what_is_damaged_in_an_old_cache_is_fetched_again(old: Path, bucket: Bucket) -> None:
    before = tree(old / "cache")
    for path in (old / "cache").iterdir():
        with path.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"damage")
    assert len(noted(from_bucket(old / "cache"), 6)) == 4
    assert bucket.tars() > 0
    assert tree(old / "cache") == before
