"""What each command asks of S3, held against a table so that it does not grow unseen.

A proxy before a real gateway counts requests by kind, and the bytes of objects that are read.
When one falls, lower the table:

    python -m pytest tests/house/test_requests.py --basetemp /tmp/t; cat /tmp/t/*/requests.json
"""

import json
import random
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

import wdsprep
from tests.kit.encodes import in_this_process
from tests.kit.faultproxy import Answer, FaultProxy
from tests.kit.packs import jpeg, pack, packing_here, upload, write_files
from tests.kit.s3 import S3Server, create_bucket, set_s3_env
from tests.kit.small_sets import ENCODE, MODEL, PACK, date, run_in, write_pictures
from tests.kit.webserver import Request
from wdsprep.cli import main
from wdsprep.tables.stored_tables import WHOLE_NBYTES

GONE = ("--keys", "000000000002,000001000001", "--yes")
SOME = ("--where", "aesthetic > 2")
SHAPES = ("--resolution", "64", "--shapes", "nearest:8,3", "--text", "none", *MODEL)
LESS = ("images", "latents-64", "text")
"""Of these there are copies below `less`, from which samples are removed."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "pack a folder": ("pack", "AT/downloads", "AT/packed", *PACK),
    "pack nothing more": ("pack", "AT/downloads", "AT/packed", *PACK),
    "encode": ("encode", "AT/images", "AT/encoded", *ENCODE),
    "encode nothing more": ("encode", "AT/images", "AT/encoded", *ENCODE),
    "inspect": ("inspect", "AT/latents-64"),
    "inspect a sample": ("inspect", "AT/latents-64", "000001000002"),
    "verify": ("verify", "AT/images", "AT/latents-64", "AT/shaped"),
    "verify --quick": ("verify", "AT/images", "AT/latents-64", "AT/shaped", "--quick"),
    "repair nothing": ("repair", "AT/shaped", "--quick", "--yes"),
    "index": ("index", "AT/shaped"),
    "rebuild": ("rebuild", "AT/shaped"),
    "plan": ("plan", "AT/images", "--resolution", "64"),
    "report": ("report", "AT/images", "AT/latents-64", "--model", "none", "-o", "HERE/page.html"),
    "card": ("card", "AT/images", "AT/latents-64", "-o", "HERE/card.md"),
    "duplicates": ("duplicates", "AT/images", "--hashes", "AT/hashes"),
    "select": ("select", "AT/images", "AT/shaped", "AT/chosen/{name}", *SOME),
    "select nothing more": ("select", "AT/images", "AT/shaped", "AT/chosen/{name}", *SOME),
    "export": ("export", "AT/latents-64", "AT/mds", "--to", "mds", "--join", "AT/text"),
    "export heads": ("export", "AT/images", "AT/webshart", "--to", "webshart"),
    "import": (
        *("import", "AT/mds", "AT/imported", "--resolution", "64", "--scale", "1", "--shift", "0"),
    ),
    "remove": ("remove", "AT/images", "AT/latents-64", "AT/shaped", *GONE),
    "remove nothing more": ("remove", "AT/images", "AT/latents-64", "AT/shaped", *GONE),
}
"""In their order; AT is in the bucket, HERE is a folder."""
LOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "load": ("latents-64", {}),
    "load with a cache": ("latents-64", {"cache": True}),
    "load with what is cached": ("latents-64", {"cache": True}),
    "load where": ("images", {"where": "aesthetic > 2"}),
    "load where, kept": ("images", {"where": "aesthetic > 2"}),
    "load joined": ("latents-64", {"join": "text"}),
    "load joined with rows": ("less/latents-64", {"join": "less/text"}),
    "load shapes": ("shaped", {}),
}
UPLOADED = ("images", "latents-64", "shaped", "text", "less/latents-64", "less/text")
SLACK = 0.75
"""What a count may fall to before the table has to be lowered."""
MOST: dict[str, str] = {
    "load": "74998 bytes, 13 range",
    "load with a cache": "74998 bytes, 5 head, 13 range",
    "load with what is cached": "3318 bytes, 5 head, 6 range",
    "load where": "54949 bytes, 2 list, 15 range",
    "load where, kept": "40213 bytes, 9 range",
    "load joined": "257771 bytes, 26 range",
    "load joined with rows": "203979 bytes, 26 range",
    "load shapes": "39272 bytes, 12 range",
    "pack a folder": "25246 bytes, 6 delete, 31 list, 32 put, 58 range",
    "pack nothing more": "12796 bytes, 2 delete, 12 list, 3 put, 10 range",
    "encode": "73574 bytes, 8 delete, 37 list, 35 put, 30 range",
    "encode nothing more": "22634 bytes, 1 delete, 9 list, 2 put, 18 range",
    "inspect": "3174 bytes, 1 range",
    "inspect a sample": "13190 bytes, 5 range",
    "verify": "241899 bytes, 8 list, 80 range",
    "verify --quick": "23998 bytes, 8 list, 19 range",
    "repair nothing": "8964 bytes, 2 list, 7 range",
    "index": "3312 bytes, 1 list, 2 range",
    "rebuild": "8964 bytes, 1 delete, 5 list, 2 put, 8 range",
    "plan": "2749 bytes, 1 range",
    "report": "243420 bytes, 4 list, 109 range",
    "card": "54211 bytes, 2 list, 22 range",
    "duplicates": "88520 bytes, 3 list, 5 put, 19 range",
    "select": "120465 bytes, 10 delete, 63 list, 36 put, 82 range",
    "select nothing more": "41162 bytes, 4 delete, 30 list, 6 put, 36 range",
    "export": "254811 bytes, 1 delete, 2 list, 13 put, 26 range",
    "export heads": "68797 bytes, 2 list, 11 put, 6 range",
    "import": "294367 bytes, 8 delete, 41 list, 35 put, 32 range",
    "remove": "275510 bytes, 16 delete, 77 list, 47 put, 143 range",
    "remove nothing more": "75554 bytes, 20 list, 45 range",
}
"""The most that each may ask, where all receipts are as young as their manifest."""


class Counting(FaultProxy):
    """Tells the kind of each request, and how much of an object its answer has."""

    def __init__(self, url: str) -> None:
        super().__init__(url, lambda *_: None)
        self._lock, self._counts = threading.Lock(), Counter[str]()

    def passed(self, request: Request, answer: Answer) -> Answer:
        kind = kind_of(request.method, request.path, "Range" in request.headers)
        with self._lock:
            self._counts[kind] += 1
            if request.method == "GET" and kind != "list" and answer.status < 300:
                self._counts["bytes"] += len(answer.body)
        return answer

    def taken(self) -> "Counter[str]":
        """What was asked since this was last called."""
        found, self._counts = self._counts, Counter()
        return found


def kind_of(method: str, path: str, is_range: bool) -> str:
    names = parse_qs(urlsplit(path).query, keep_blank_values=True)
    if method == "GET":
        if names.keys() & {"list-type", "uploads", "prefix"}:
            return "list"
        return "range" if is_range else "get"
    return method.lower()


class Counted(NamedTuple):
    """A bucket behind a proxy."""

    proxy: Counting
    url: str


@pytest.fixture(scope="module")
def bucket_in_front(
    s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Counted]:
    """A bucket with what the commands begin with, behind a proxy that counts."""
    home = tmp_path_factory.mktemp("made")
    make_datasets(home)
    with pytest.MonkeyPatch.context() as patch:
        set_s3_env(patch, s3_server, home)
        bucket = create_bucket()
        for name in ("downloads", *UPLOADED):
            upload(home / name, f"s3://{bucket}/{name}")
        with Counting(s3_server.url) as proxy:
            patch.setenv("AWS_ENDPOINT_URL", proxy.url)
            patch.setenv("XDG_CACHE_HOME", str(home / "empty"))
            yield Counted(proxy, f"s3://{bucket}")
    shutil.rmtree(home)


def make_datasets(home: Path) -> None:
    write_pictures(home / "downloads", 13)
    date(home)
    run_in(home, "pack", "downloads", "images", *PACK)
    both = ("--resolution", "64,128", "--flip", "--text-out", "text", *MODEL)
    run_in(home, "encode", "images", "latents-{resolution}", *both)
    run_in(home, "encode", "images", "shaped", "--max-crop", "0.08", *SHAPES)
    for name in LESS:
        shutil.copytree(home / name, home / "less" / name)
    run_in(home, "remove", *(f"less/{name}" for name in LESS), *GONE)


def test_no_command_asks_more_of_s3_than_before(
    bucket_in_front: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receipts that may have changed with their manifest are read again: here all, at any speed."""
    monkeypatch.setattr("wdsprep.dataset.stored_dataset.SAME_MOMENT_S", 1e9)
    found: dict[str, str] = {}
    for name, (dataset, options) in LOADS.items():
        serve(bucket_in_front.url, dataset, tmp_path, **options)
        found[name] = told(bucket_in_front.proxy.taken())
    for name, words in COMMANDS.items():
        there = [
            word.replace("AT", bucket_in_front.url).replace("HERE", str(tmp_path)) for word in words
        ]
        with in_this_process(), packing_here():
            assert main(there) == 0, name
        found[name] = told(bucket_in_front.proxy.taken())
    (tmp_path / "requests.json").write_text(json.dumps(found, indent=1))
    assert found.keys() == MOST.keys()
    faults = [each for name in found for each in other(name, read(found[name]), read(MOST[name]))]
    assert not faults, "\n".join(faults)


def ask_where(counted: Counted, root: Path, samples: int, a_shard: int, meta: str = "{}") -> str:
    """Pack images of equal size, ask for their width, and tell what that asked of S3."""
    files: dict[str, bytes | str] = {f"{n}.jpg": jpeg(n, (64, 64)) for n in range(samples)}
    files |= {f"{n}.json": meta.replace("NOISE", noise(n)) for n in range(samples)}
    images = pack(
        write_files(root / "in", files), root / "out", "--samples-per-shard", f"{a_shard}"
    )
    upload(images, url := f"{counted.url}/{root.name}")
    counted.proxy.taken()
    found = wdsprep.inspect(url, where="width >= 64", limit=0)
    assert found.facts["matching"] == samples
    return told(counted.proxy.taken())


def noise(seed: int) -> str:
    return random.Random(seed).randbytes(30_000).hex()


def test_a_question_asks_s3_once_for_each_table_whatever_the_samples(
    bucket_in_front: Counted, tmp_path: Path
) -> None:
    """Beside its tables it reads the manifest twice, and lists the folder of the tables."""
    for samples, a_shard in ((50, 1), (100, 1), (100, 50)):
        asked = read(
            ask_where(bucket_in_front, tmp_path / f"{samples}-{a_shard}", samples, a_shard)
        )
        del asked["bytes"]
        assert asked == {"range": samples // a_shard + 2, "list": 1}


def test_of_a_large_table_s3_sends_only_the_columns_asked_for(
    bucket_in_front: Counted, tmp_path: Path
) -> None:
    asked = read(ask_where(bucket_in_front, tmp_path, 40, 40, '{"noise": "NOISE"}'))
    (table,) = (tmp_path / "out").rglob("*.parquet")
    assert table.stat().st_size > WHOLE_NBYTES
    assert asked["bytes"] < WHOLE_NBYTES / 4
    assert asked["range"] < 12


def serve(url: str, dataset: str, home: Path, *, cache: bool = False, **options: Any) -> None:
    """An epoch."""
    if "join" in options:
        options["join"] = f"{url}/{options['join']}"
    if cache:
        options.update(cache=home / "cache", cache_nbytes=1 << 30)
    made = wdsprep.load(f"{url}/{dataset}", global_batch=2, **options)
    assert [batch["key"] for batch in made]


def told(counts: "Counter[str]") -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts))


def read(counts: str) -> dict[str, int]:
    return {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", counts)}


def other(name: str, found: dict[str, int], most: dict[str, int]) -> Iterator[str]:
    for kind in sorted(found.keys() | most.keys()):
        now, before = found.get(kind, 0), most.get(kind, 0)
        if now > before:
            yield f"{name}: {now} {kind}, where there were {before}"
        if now < SLACK * before - 1:
            yield f"{name}: only {now} {kind} are left: lower the {before} of MOST"
