"""Files in parts on S3, and what becomes of uploads that somebody left."""

import contextlib
import os
import re
import signal
import tempfile
import threading
from pathlib import Path

import pytest

from tests.kit.faultproxy import Status, first
from tests.kit.latent_sets import write_latents
from tests.kit.stores import BIG, MIB, begin_uploads, one_line_error, opened, uploads, writing
from tests.store.conftest import Through
from wdsprep.dataset.chunks import Chunks
from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.stored_dataset import read_manifest
from wdsprep.errors import StoreError
from wdsprep.runners.run import sweep
from wdsprep.store import open_store
from wdsprep.store.base import write_bytes
from wdsprep.store.remote import ATTEMPTS
from wdsprep.store.s3 import uploads as s3_uploads
from wdsprep.store.s3.s3_store import S3Store


@pytest.mark.parametrize("nbytes", [5 * MIB - 1, 5 * MIB, 5 * MIB + 1, 11 * MIB])
def test_file_in_parts_is_whole(parted: S3Store, bucket: str, nbytes: int) -> None:
    data, at = memoryview(BIG)[:nbytes], 0
    with parted.write("big") as sink:
        while at < nbytes:
            sink.write(bytes(data[at : at + 999_983]))
            at += 999_983
    assert parted.read("big") == data
    assert uploads(bucket) == []
    with Chunks(parted, "big", chunk_nbytes=4 * MIB).as_stream() as file:
        assert file.read() == data


def test_several_parts_are_in_flight(through: Through) -> None:
    """Three parts meet at a barrier: one after the other, they would wait for ever."""
    together = threading.Barrier(3, timeout=20)

    def rule(_method: str, path: str, _n: int, _headers: object) -> None:
        if "partNumber" in path:
            together.wait()

    with through(rule) as (_, store):
        write_bytes(store, "big", BIG)
        assert store.read("big") == BIG


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
def test_exception_aborts_the_upload(parted: S3Store, bucket: str, error: BaseException) -> None:
    with pytest.raises(type(error)):
        break_off(parted, bucket, error)
    assert uploads(bucket) == []
    assert list(parted.list()) == []


def test_part_that_fails_for_good_aborts_the_upload(through: Through, bucket: str) -> None:
    rule = first(99, Status(500), part="partNumber=2")
    with through(rule) as (proxy, store):
        with one_line_error(StoreError, f"{store.url}/big", "500 InternalError", "try later"):
            write_bytes(store, "big", BIG)
        assert len([path for _, path in proxy.seen if "partNumber=2" in path]) == ATTEMPTS
        assert uploads(bucket) == []
        assert list(store.list()) == []


def test_failed_part_is_fatal_even_to_a_caller_that_goes_on(through: Through, bucket: str) -> None:
    rule = first(ATTEMPTS, Status(503), part="uploads")
    with through(rule) as (_, store):
        going_on = contextlib.suppress(Exception)
        with pytest.raises(StoreError), store.write("big") as sink, going_on:
            sink.write(BIG)
        assert list(store.list()) == []
        assert uploads(bucket) == []


def test_uploads_of_nobody_knows_whom_are_aborted_when_old_and_under_names_of_ours(
    parted: S3Store, bucket: str, request: pytest.FixtureRequest
) -> None:
    theirs = ["256/000000.tar", "data/theirs", "data/x/theirs", "database", "other"]
    begin_uploads(bucket, "data/256/000000.tar", "data/x/000000.tar", *theirs)
    ours = re.compile(r"\w+/\d+\.tar").fullmatch
    assert parted.sweep(ours) == (0, 2)
    request.getfixturevalue("aged")
    assert parted.sweep()[0] == 0
    assert parted.sweep(ours) == (2, 0)
    assert uploads(bucket) == theirs


@pytest.mark.usefixtures("aged")
def test_a_dataset_aborts_what_could_be_a_part_of_it_alone(bucket: str) -> None:
    """At the root of a bucket, where others write too."""
    theirs = ["2024/backup.tar", "256/notes.txt", "backup.tar", "rejects/2024/a.jsonl"]
    shards = ["256/000000.tar", "512/000001_01.tar"]
    images = Manifest(dataset="images", settings={"buckets": [256, 512]})
    begin_uploads(bucket, *theirs, *shards, "wdsprep.json")
    with opened(f"s3://{bucket}") as store:
        latents = read_manifest(open_store(write_latents(store.url, (2,))))
        assert latents is not None
        sweep(store, images)
        assert uploads(bucket) == theirs
        begin_uploads(bucket, "256/what the tar was called.tar", "2023/x.tar")
        sweep(store, images)
        assert len(uploads(bucket)) == len(theirs) + 2
        sweep(store, latents)
        assert uploads(bucket) == sorted(["2023/x.tar", *theirs])


@pytest.mark.usefixtures("aged")
def test_the_upload_of_a_dead_writer_is_aborted_at_once_that_of_a_living_one_never(
    parted: S3Store, bucket: str
) -> None:
    """However old, and whether or not the writer runs just now."""
    with writing(parted, BIG, "alive", "dead", "stopped") as writers:
        alive, dead, stopped = writers
        os.kill(stopped[0].pid, signal.SIGSTOP)
        assert parted.sweep(lambda _name: True) == (0, 3)
        dead[0].kill()
        dead[0].join()
        assert parted.sweep(lambda _name: True) == (1, 2)
        assert uploads(bucket) == ["data/alive", "data/stopped"]
        os.kill(stopped[0].pid, signal.SIGCONT)
        for writer, go_on in (alive, stopped):
            go_on.set()
            writer.join()
            assert writer.exitcode == 0
    assert parted.read("alive") == parted.read("stopped") == BIG
    assert uploads(bucket) == []


def test_an_upload_that_could_not_be_aborted_is_so_by_the_next_sweep(
    through: Through, bucket: str
) -> None:
    rule = first(ATTEMPTS, Status(503), "DELETE")
    with through(rule) as (_, store):
        with pytest.raises(ZeroDivisionError):
            break_off(store, bucket, ZeroDivisionError())
        assert uploads(bucket) == ["data/big"]
        assert store.sweep()[0] == 1
        assert uploads(bucket) == []


def test_notes_of_uploads_are_few_and_of_this_user_alone(
    tmp_path: Path, parted: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write_bytes(parted, "big", BIG)
    (folder,) = tmp_path.iterdir()
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in ("old", "young"):
        (folder / name).touch()
    os.utime(folder / "old", (0, 0))
    parted.sweep()
    assert [path.name for path in folder.iterdir()] == ["young"]
    folder.chmod(0o777)
    assert s3_uploads.write_note("bucket/key/1") is None
    assert s3_uploads.has_living_writer("young") is None
    write_bytes(parted, "big", BIG)


def break_off(store: S3Store, bucket: str, error: BaseException) -> None:
    with store.write("big") as sink:
        sink.write(BIG)
        assert uploads(bucket) == ["data/big"]
        raise error
