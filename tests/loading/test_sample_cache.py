"""The cache of S3 datasets: right under kills, crowds and damage, bounded, never stale."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import wdsprep
from tests.kit.batches import assert_same, damage
from tests.kit.cache_processes import Data
from tests.kit.faultproxy import FaultProxy
from tests.kit.latent_sets import write_latents
from tests.kit.packs import tar_bytes, upload
from tests.kit.paths import ROOT
from wdsprep.dataset.reindex import index
from wdsprep.errors import NotFoundError
from wdsprep.loading.sample_cache import CLAIM_S, STALE_S, Cache
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes

WORK = (sys.executable, "-m", "tests.kit.cache_processes")
BATCH, ROOM = 32, 1 << 30


def load(url: str, **options: Any) -> Any:
    return wdsprep.load(url, **({"global_batch": BATCH, "rank": 0, "world_size": 1} | options))


class Counted:
    """A server that counts the bytes of tars that are asked for."""

    def __init__(self, url: str) -> None:
        self.nbytes = 0
        self.proxy = FaultProxy(url, self._count)

    def _count(self, method: str, path: str, _number: int, headers: Any) -> None:
        if method == "GET" and path.partition("?")[0].endswith(".tar"):
            first, _, last = headers["Range"].removeprefix("bytes=").partition("-")
            self.nbytes += int(last) - int(first) + 1

    def taken(self) -> int:
        nbytes, self.nbytes = self.nbytes, 0
        return nbytes


@pytest.fixture
def counted(s3_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    server = Counted(s3_env["AWS_ENDPOINT_URL"])
    with server.proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.proxy.url)
        yield server


def test_s3_gives_what_a_folder_gives(data: str, bucket: str) -> None:
    url = f"s3://{bucket}/latents"
    upload(Path(data), url)
    names = ("latent", "emb", "key", "txt", "json")
    there = load(url, fields=names, epochs=2)
    assert_same(there, load(data, fields=names, epochs=2))
    there.load_state_dict(load(data, step=5).state_dict())
    assert_same(there, load(data, fields=names, step=5, epochs=2))
    workers = DataLoader(load(url, threads=1), batch_size=None, num_workers=2)
    assert_same(workers, load(data))
    open_store(url).delete("256/000002.tar")
    with pytest.raises(NotFoundError, match="skip_missing"):
        list(load(url))
    assert len(list(load(url, skip_missing=True))) == 9


@pytest.mark.parametrize("value", [0, 1536, 1 << 62, (1 << 64) - 512])
def test_a_damaged_index_costs_its_own_samples_alone(
    data: str, bucket: str, tmp_path: Path, value: int
) -> None:
    """Though a range of several samples begins or ends with it."""
    url, local = f"s3://{bucket}/latents", shutil.copytree(data, tmp_path / "data")
    damage(local / "256/000003.tar.idx", 8 * 20, value.to_bytes(8, "little"))
    upload(local, url)
    lost = {f"{number:012d}" for number in (199, 200)}
    cached = {"cache": tmp_path / "cache", "cache_nbytes": ROOM}
    texts = {"fields": ("emb", "txt", "key")}
    for place, options in ((url, {}), (url, cached), (str(local), {}), (str(local), texts)):
        for found, wanted in zip(load(place, **options), load(data), strict=True):
            kept = [n for n, key in enumerate(wanted["key"]) if key not in lost]
            assert [found["key"][n] for n in kept] == [wanted["key"][n] for n in kept]
            assert torch.equal(found["emb"][kept], wanted["emb"][kept])


def test_the_second_time_is_read_from_the_cache(
    data: str, bucket: str, counted: Counted, tmp_path: Path
) -> None:
    """And whatever vanished or was damaged there is fetched again, alone. Only what batches need
    is asked for, so a resumed run begins with little."""
    url, cache = f"s3://{bucket}/latents", tmp_path / "cache"
    upload(Path(data), url)
    tars = list(Path(data).glob("256/*.tar"))
    whole = sum(path.stat().st_size for path in tars)
    sample = whole // 300
    options = {"cache": cache, "cache_nbytes": ROOM, "fields": ("latent", "emb", "txt", "key")}
    local = {"fields": options["fields"]}

    counted.taken()
    assert_same(load(url, step=4, **options), load(data, step=4, **local))
    assert 0 < counted.taken() < 2 * 5 * BATCH * sample
    assert_same(load(url, epochs=3, **options), load(data, epochs=3, **local))
    assert 0 < counted.taken() < whole
    files = sorted(cache.iterdir())
    assert len(files) == len(tars)
    assert_same(load(url, epochs=2, seed=1, **options), load(data, epochs=2, seed=1, **local))
    assert counted.taken() == 0

    files[0].unlink()
    damage(files[1], files[1].stat().st_size // 2, b"damage")
    assert_same(load(url, epochs=2, **options), load(data, epochs=2, **local))
    one = tars[0].stat().st_size
    assert one < counted.taken() < 2 * one
    state = load(url, step=3, **options).state_dict()
    assert state == load(data, step=3).state_dict()


def test_a_changed_dataset_is_never_served_from_the_cache(bucket: str, tmp_path: Path) -> None:
    url, options = f"s3://{bucket}/a", {"cache": tmp_path / "cache", "cache_nbytes": ROOM}
    for base in (0, 1000):
        local = write_latents(str(tmp_path / str(base)), [40, 40], base=base)
        upload(Path(local), url)
        assert_same(load(url, **options), load(local))
    foreign = f"s3://{bucket}/foreign"
    for text in (b"old", b"new"):
        folder = tmp_path / text.decode()
        folder.mkdir()
        (folder / "0.tar").write_bytes(tar_bytes((f"{n}.txt", text) for n in range(BATCH)))
        upload(folder, foreign)
        dict(index(foreign))
        assert {sample["txt"] for sample in load(foreign, raw=True, **options)} == {text}


def test_a_repaired_shard_is_never_served_as_it_was_when_damaged(
    data: str, bucket: str, tmp_path: Path
) -> None:
    """The manifest says the same of both."""
    url, names = f"s3://{bucket}/latents", ("latent", "key")
    options = {"cache": tmp_path / "cache", "cache_nbytes": ROOM, "fields": names}
    upload(Path(data), url)
    name = "256/000002.tar"
    whole = (Path(data) / name).read_bytes()
    damaged = bytearray(whole)
    for start in range(600, len(whole), 5000):
        damaged[start] ^= 1
    store = open_store(url)
    write_bytes(store, name, bytes(damaged))
    for _ in range(2):
        with pytest.raises(AssertionError):
            assert_same(load(url, **options), load(data, fields=names))
    write_bytes(store, name, whole)
    assert_same(load(url, **options), load(data, fields=names))


@pytest.mark.system
def test_kills_while_it_fills_leave_nothing_that_is_read_as_whole(tmp_path: Path) -> None:
    subprocess.run([*WORK, "kills", tmp_path, "60"], cwd=ROOT, check=True, timeout=300)


@pytest.mark.system
def test_processes_share_a_full_cache_that_is_disturbed(tmp_path: Path) -> None:
    limit = Data("a").nbytes
    command = [*WORK, "crowd", tmp_path / "cache", str(limit)]
    done = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    most, gone = map(int, done.stdout.split())
    assert limit // 4 < most <= limit
    assert gone > 10


def age(folder: Path, seconds: float) -> None:
    for path in folder.iterdir():
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))


def test_what_nobody_claims_gives_way_and_what_is_claimed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wdsprep.loading.sample_cache.SHARERS", 4)
    monkeypatch.setattr("wdsprep.loading.sample_cache.FULL_S", 0)
    old, new = Data("old"), Data("new")
    where = (tmp_path, old.nbytes)
    (tmp_path / "of the user").write_bytes(b"0" * 100_000)

    def opened(data: Data) -> Cache:
        return Cache(where, data.contents)

    def fill(data: Data) -> int:
        """What still has to be fetched when there is no room left."""
        cache = opened(data)
        for _ in range(50):
            data.read_all(cache)
        return data.read_all(opened(data))

    lacking = fill(old)
    assert lacking < old.nbytes / 2
    age(tmp_path, CLAIM_S + 1)
    old.read_all(opened(old))  # which claims its files
    age(tmp_path, STALE_S - CLAIM_S)
    fill(new)
    assert old.read_all(opened(old)) <= lacking
    age(tmp_path, STALE_S + 1)
    assert fill(new) < new.nbytes / 2
    assert (tmp_path / "of the user").exists()


def test_a_cache_that_fails_is_told_of_and_does_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = Data("a")
    folder = tmp_path / "cache"
    folder.mkdir()
    cache = Cache((folder, ROOM), data.contents)
    assert data.read_all(cache) == data.nbytes
    shutil.rmtree(folder)
    folder.write_bytes(b"a file now")
    assert data.read_all(cache) == data.nbytes
    assert caplog.text.count("the cache failed") == 1
    assert str(folder) in caplog.text


def test_a_smaller_limit_removes_what_is_too_much(tmp_path: Path) -> None:
    data = Data("a")
    data.read_all(Cache((tmp_path, 100 * data.nbytes), data.contents))
    limit = data.nbytes // 2
    data.read_all(Cache((tmp_path, limit), data.contents))
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) <= limit
