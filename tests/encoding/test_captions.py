"""Other captions: out of a table or a field of the json, in place of the samples' own."""

import io
import json
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit.encodes import command, encode_here, latents_of, pictures, run_encode, samples_in
from tests.kit.packs import manifest_of, pack, tree, upload, write_files
from wdsprep.checks.findings import Kind
from wdsprep.checks.repair import repair
from wdsprep.checks.verify import verify
from wdsprep.dataset.file_names import CAPTION_TABLE
from wdsprep.dataset.reindex import index
from wdsprep.dataset.sample_table import open_writer
from wdsprep.encoding.captions import join_captions
from wdsprep.encoding.captions.table import CaptionRecord, CaptionTable
from wdsprep.encoding.encode import EncodePlan
from wdsprep.errors import FingerprintError, SourceError, UsageError, WdsprepError
from wdsprep.runners.job import JobListener
from wdsprep.runners.run import Outcome
from wdsprep.store import open_store

FEW = 12

pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve pictures in shards of 6, with digests, and facts of most."""
    root = tmp_path_factory.mktemp("few")
    source = pictures(root / "downloads", range(FEW))
    write_files(source, {
        f"photo-{n:04d}.json": json.dumps(
            {"url": f"https://a.example/{n}", "long": f"a long text {n}", "more": [f"more {n}"]}
        )
        for n in range(1, FEW)
    })  # fmt: skip
    options = ("--buckets", "64", "--samples-per-shard", "6", "--compute-hash", "sha256")
    return pack(source, root / "images", *options)


def facts_of(images: Path) -> dict[str, dict[str, Any]]:
    return {key: json.loads(fields["json"]) for key, fields in samples_in(images).items()}


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def text_here(images: Path, out: Path, **options: Any) -> Outcome:
    return encode_here(images, out, **{"latents": "none", "resolution": 0, **options})


def captions_in(out: Path) -> dict[str, str]:
    samples = latents_of(out)
    assert all(sample["json"]["caption"] == sample["txt"] for sample in samples.values())
    return {key: sample["txt"] for key, sample in samples.items()}


def reported(images: Path, out: Path, **options: Any) -> tuple[int, CaptionRecord]:
    """How many samples a table names, and the record of the table, as a listener gets them."""
    plans: list[EncodePlan] = []
    listener = JobListener(on_begin=plans.append)
    outcome = text_here(images, out, listener=listener, **options)
    assert plans[0].captions
    (record,) = plans[0].captions.records.values()
    assert record
    return outcome.manifest.counts["named"], record


# --- whom a table names


def test_what_a_table_names_has_its_caption_and_all_else_keeps_its_own(
    few: Path, tmp_path: Path
) -> None:
    """In latents as in text alone, whose arrays are the same."""
    keys = sorted(facts_of(few))
    own = {key: fields["txt"].decode() for key, fields in samples_in(few).items()}
    table = parquet(
        tmp_path / "new.parquet",
        score=[1.0, 2.0, 3.0],
        caption=[" a new text ", "", "another: 雪"],
        key=[keys[3], keys[4], keys[7]],
    )
    encode_here(few, tmp_path / "latents", captions=table)
    made = encode_here(few, tmp_path / "text", latents="none", captions=table)
    assert captions_in(tmp_path / "latents") == captions_in(tmp_path / "text") == {
        **own, keys[3]: "a new text", keys[7]: "another: 雪"
    }  # fmt: skip
    assert made.manifest.counts["named"] == 2
    text, latents = latents_of(tmp_path / "text"), latents_of(tmp_path / "latents")
    assert all((text[key]["emb.npy"] == latents[key]["emb.npy"]).all() for key in keys)
    assert not verify(few, tmp_path / "latents").findings


def test_a_table_is_found_by_number_source_url_and_digest_in_any_format(
    few: Path, tmp_path: Path
) -> None:
    facts = facts_of(few)
    keys = sorted(facts)
    six = facts[keys[6]]
    tables = tmp_path / "tables"
    write_files(tables, {
        "by-source.csv": f'caption,source\n"one, two",{facts[keys[2]]["source"]}\n',
        "by-url.jsonl": json.dumps({"caption": "six", "url": six["meta"]["url"]}) + "\n",
        "by-digest.tsv": f"sha256\tother\ttext\n{six['sha256']}\t\tsixth\n",
    })  # fmt: skip
    parquet(tables / "by-number.parquet", key=[int(keys[8])], caption=["eight"])
    named: dict[str, dict[str, Any]] = {
        "by-source.csv": {}, "by-url.jsonl": {}, "by-number.parquet": {},
        "by-digest.tsv": {"caption_column": "text", "captions_by": "sha256"},
    }  # fmt: skip
    found: dict[str, set[tuple[str, str]]] = {}
    own = {(key, fields["txt"].decode()) for key, fields in samples_in(few).items()}
    for name, options in named.items():
        text_here(few, tmp_path / name, captions=tables / name, **options)
        found[name] = {*captions_in(tmp_path / name).items()} - own
    assert found == {
        "by-source.csv": {(keys[2], "one, two")},
        "by-url.jsonl": {(keys[6], "six")},
        "by-digest.tsv": {(keys[6], "sixth")},
        "by-number.parquet": {(keys[8], "eight")},
    }


def test_rows_of_samples_that_are_refused_are_taken_and_no_text_breaks_a_worker(
    tmp_path: Path,
) -> None:
    """A caption file that is no UTF-8, and halves of characters in a json."""
    jpg = (pictures(tmp_path / "in", range(1)) / "photo-0000.jpg").read_bytes()
    members = {
        "a.txt": b"ok", "b.txt": b"\xff\xfe bad",
        "c.json": b'{"caption": "own \\ud800", "long": "long \\ud800"}',
    }  # fmt: skip
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars/a.tar", "w") as tar:
        for name, data in members.items():
            for each, held in ((f"{name[0]}.jpg", jpg), (name, data)):
                (info := tarfile.TarInfo(each)).size = len(held)
                tar.addfile(info, io.BytesIO(held))
    csv = tmp_path / "new.csv"
    csv.write_text("key,caption\na,A\nb,B\nnobody,C\n")
    named, record = reported(tmp_path / "tars", tmp_path / "out", resolution=64, captions=csv)
    assert (named, record.unused, record.unused_examples) == (1, 1, ("nobody",))
    assert captions_in(tmp_path / "out") == {"a": "A", "c": "own ?"}
    text_here(tmp_path / "tars", tmp_path / "long", resolution=64, caption_field="long")
    assert captions_in(tmp_path / "long") == {"a": "ok", "c": "long ?"}


# --- what is told, whatever runs it takes


def test_the_end_counts_and_names_what_table_and_samples_lack_after_a_resume_too(
    few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = sorted(facts_of(few))
    rows = [*((key, f"new {key}") for key in keys[1:]), (keys[5], "a later row"), (keys[5], "2")]
    rows += [("none", "nobody's"), ("nobody", "nobody's"), (keys[0], " "), ("", "of no sample")]
    table = tmp_path / "new.csv"
    table.write_text("key,caption\n" + "".join(f"{key},{text}\n" for key, text in rows))
    named, record = reported(few, tmp_path / "whole", captions=table)
    assert (named, record.unnamed_examples) == (11, (keys[0],))
    assert (record.unused, record.unused_examples) == (2, ("none", "nobody"))
    assert (record.rows, record.blank) == (17, 2)
    assert (record.twice, record.twice_examples) == (1, (keys[5],))
    assert captions_in(tmp_path / "whole")[keys[5]] == f"new {keys[5]}"

    words = ("--latents", "none", "--captions", str(table))
    assert command(few, tmp_path / "again", *words, "--limit", "6", "--json") == 0
    captions_facts = json.loads(capsys.readouterr().out)["captions"]
    assert captions_facts == {"named": 5, "twice": 1, "unmatched": None, "unnamed": 1}
    assert command(few, tmp_path / "again", *words) == 0
    told = capsys.readouterr().out
    assert (
        f"11 captions from {table}, by key; 1 sample not in it kept their own ({keys[0]})" in told
    )
    assert "2 keys of it that no sample has (none, nobody)" in told
    assert f"1 key twice in it, of which the first row counts ({keys[5]})" in told
    assert "2 rows of the table without a key or a caption" in told
    assert tree(tmp_path / "again") == tree(tmp_path / "whole")

    (captions := tmp_path / "again/captions/64/000001.parquet").write_bytes(b"x")
    (finding,) = verify(few, tmp_path / "again").findings
    assert (finding.name, finding.kind) == ("captions/64/000001.parquet", Kind.DAMAGED)
    assert repair(tmp_path / "again", yes=True).is_whole
    assert not captions.exists()
    text_here(few, tmp_path / "again", captions=table)
    assert tree(tmp_path / "again") == tree(tmp_path / "whole")


def test_a_table_is_read_once_and_again_only_where_it_or_the_images_have_changed(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, read = sorted(facts_of(few)), list[str]()
    whole = CaptionTable.read
    monkeypatch.setattr(CaptionTable, "read", lambda self: (read.append("read"), whole(self))[1])
    table = parquet(tmp_path / "new.parquet", key=keys[:2], caption=["a", "b"])
    out, trial = tmp_path / "out", tmp_path / "trial"
    text_here(few, out, captions=table)
    made = tree(out)
    _kill_before(out, "64/000001")
    assert {finding.name for finding in verify(out).findings} == {"wdsprep.json"}
    text_here(few, out, captions=table)
    assert (tree(out), len(read)) == (made, 1)
    # Of a trial only the captions of its samples are laid out.
    text_here(few, trial, captions=table, limit=6)
    assert not (trial / "captions/64/000001.parquet").exists()
    text_here(few, trial, captions=table)
    assert len(read) == 3
    # The same in another order, with more beside it, is the same table.
    parquet(table, caption=["b", "a"], score=[1, 2], key=[keys[1], keys[0]])
    text_here(few, out, captions=table)
    assert len(read) == 4
    before = tree(out)
    parquet(table, key=keys[:2], caption=["a", "c"])
    with pytest.raises(FingerprintError, match="captions: other"):
        text_here(few, out, captions=table)
    with pytest.raises(FingerprintError, match="captions: other"):
        text_here(few, out)
    assert tree(out) == before
    text_here(few, out, captions=table, overwrite=True)
    assert captions_in(out)[keys[1]] == "c"


def _kill_before(out: Path, unit: str) -> None:
    """Leave a dataset as a run leaves it that is killed before it makes a unit."""
    for path in (*out.glob(f"{unit}.*"), out / f"receipts/{unit}.json", out / "wdsprep.json"):
        path.unlink()
    (out / f"rejects/{unit}.jsonl").unlink()


@pytest.mark.parametrize("damage", ["cut", "flipped", "of the other shard", "of other samples"])
def test_captions_that_are_not_those_of_the_shard_end_its_unit_with_a_line(
    few: Path, tmp_path: Path, damage: str
) -> None:
    keys, out = sorted(facts_of(few)), tmp_path / "out"
    table = parquet(tmp_path / "new.parquet", key=keys, caption=[f"new {key}" for key in keys])
    text_here(few, out, captions=table)
    _kill_before(out, "64/000001")
    captions = out / "captions/64/000001.parquet"
    sound, other = captions.read_bytes(), (out / "captions/64/000000.parquet").read_bytes()
    rows = pq.read_table(io.BytesIO(other))
    with open_writer(mixed := io.BytesIO(), rows.schema, _metadata_of(sound)) as writer:
        writer.write_table(rows)
    at = sound.rindex(b"new 0") + 4
    data, why = {
        "cut": (sound[:-100], "it is no sound Parquet file"),
        "flipped": (sound[:at] + b"1" + sound[at + 1 :], "it is no sound Parquet file"),
        "of the other shard": (other, "it is not of this table and of 64/000001.tar as it is"),
        "of other samples": (mixed.getvalue(), f"it has other samples .* such as no {keys[6]}"),
    }[damage]
    captions.write_bytes(data)
    (failed,) = text_here(few, out, captions=table).quarantined
    assert re.search(f"captions/64/000001.parquet is damaged: {why}: delete it", failed.reason)
    captions.unlink()
    assert text_here(few, out, captions=table).manifest.counts["named"] == FEW
    assert captions_in(out) == {key: f"new {key}" for key in keys}
    assert captions.read_bytes() == sound


def _metadata_of(data: bytes) -> dict[str, str]:
    metadata = pq.read_schema(io.BytesIO(data)).metadata or {}
    return {name.decode(): value.decode() for name, value in metadata.items()}


def test_tables_of_foreign_tars_spare_reading_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, tars = pictures(tmp_path / "in", range(3)), tmp_path / "tars"
    tars.mkdir()
    with tarfile.open(tars / "a.tar", "w") as tar:
        for number in range(3):
            (source / f"{number}.json").write_text(json.dumps({"url": f"u://{number}"}))
            tar.add(source / f"photo-{number:04d}.jpg", f"{number:09d}.jpg")
            tar.add(source / f"{number}.json", f"{number:09d}.json")
    table = tmp_path / "new.csv"
    table.write_text("key,source,url,caption\n1,a.tar/000000002,u://0,new\n")
    for by in ("key", "source", "url"):
        text_here(tars, tmp_path / by, resolution=64, captions=table, captions_by=by)
    index(str(tars))
    monkeypatch.setattr(join_captions, "_read_tar", None)
    for by, number in (("key", 1), ("source", 2), ("url", 0)):
        out = tmp_path / f"{by}-2"
        text_here(tars, out, resolution=64, captions=table, captions_by=by)
        assert captions_in(out) == captions_in(tmp_path / by)
        assert captions_in(out)[f"{number:09d}"] == "new"


def test_a_table_for_tars_of_which_none_can_be_read_leaves_it_to_workers_to_say_so(
    tmp_path: Path,
) -> None:
    write_files(tmp_path, {"tars/a.tar": b"no tar" * 1_000, "new.csv": "key,caption\n1,new\n"})
    outcome = text_here(
        tmp_path / "tars", tmp_path / "out", resolution=64, captions=tmp_path / "new.csv"
    )
    assert outcome.is_damaged


@pytest.mark.usefixtures("real_models")
def test_workers_of_a_dataset_on_s3_read_the_captions_of_their_units(
    few: Path, bucket: str, tmp_path: Path
) -> None:
    """Two real ones, which make what is made here."""
    keys, url = sorted(facts_of(few)), f"s3://{bucket}"
    (tables := tmp_path / "tables").mkdir()
    table = parquet(tables / "new.parquet", key=keys, caption=[f"new {key}" for key in keys])
    upload(few, f"{url}/images")
    upload(tables, f"{url}/tables")
    options = ("--latents", "none", "--captions", f"{url}/tables/*.parquet", "--workers", "2")
    done = run_encode(f"{url}/images", f"{url}/text", *options)
    assert done.returncode == 0, done.stderr
    text_here(few, tmp_path / "here", captions=table, resolution=64)
    store = open_store(f"{url}/text")
    here = {name: data for name, data in tree(tmp_path / "here").items() if name != CAPTION_TABLE}
    assert {name: store.read(name) for name in here} == here


# --- out of the json


def test_several_fields_at_once_make_what_a_run_for_each_makes(few: Path, tmp_path: Path) -> None:
    facts = facts_of(few)
    fields = ("caption", "meta.long", "meta.more.0")
    made = text_here(few, tmp_path / "text-{caption}", caption_fields=",".join(fields))
    assert isinstance(made, list)
    assert [outcome.manifest.settings.get("caption_name") for outcome in made] == [
        None,
        "long",
        "0",
    ]
    for field in fields:
        name = field.rpartition(".")[2]
        text_here(few, tmp_path / name, caption_field=field)
        assert tree(tmp_path / f"text-{name}") == tree(tmp_path / name)
    text_here(few, tmp_path / "own")
    assert tree(tmp_path / "own") == tree(tmp_path / "caption")
    assert captions_in(tmp_path / "long") == {
        key: said["meta"].get("long", said["caption"]) for key, said in facts.items()
    }


def test_a_field_that_a_sample_lacks_is_counted_and_its_name_is_kept(
    few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--latents", "none", "--caption-field", "long", "--caption-name", "qwen")
    assert command(few, tmp_path / "text-{caption}", *words) == 0
    settings = manifest_of(tmp_path / "text-qwen").settings
    assert (settings["caption_field"], settings["caption_name"]) == ("long", "qwen")
    told = capsys.readouterr().out
    assert "11 captions from the field long; 1 sample not in it kept their own" in told


def test_what_the_first_samples_lack_is_told_and_others_may_have_it(
    few: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    listener = JobListener(on_message=told.append)
    done = text_here(few, tmp_path / "lnog", caption_field="meta.lnog", listener=listener)
    assert done.manifest.counts.get("named", 0) == 0
    (line,) = (line for line in told if "none of the first" in line)
    assert "none of the first 6 samples of" in line
    assert "has a caption in meta.lnog" in line
    assert "meta.long" in line
    images, told[:] = tmp_path / "images", []
    shutil.copytree(few, images)
    (images / "64/000000.tar").unlink()  # whoever encodes it says so
    done = text_here(images, tmp_path / "out", caption_field="long", listener=listener)
    assert "000000.tar is not there" in done.quarantined[0].reason
    assert not [line for line in told if "none of the first" in line]


# --- what cannot be


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"captions": "t/none.csv"}, SourceError, "t/none.csv does not exist"),
        ({"captions": "t/empty.csv"}, SourceError, "empty.csv is empty: give the path"),
        ({"captions": "t/head.csv"}, SourceError, "head.csv has no row: give the path"),
        ({"captions": "t/text.parquet"}, SourceError, "is not a valid Parquet file"),
        ({"captions": "t/a.jpg"}, SourceError, "a.jpg is not a table: give .parquet, .csv"),
        ({"captions": "t/pictures"}, SourceError, "pictures holds no table"),
        ({"captions": "t/mixed"}, UsageError, r"Parquet and other tables \(b.csv, a.parquet\): g"),
        ({"captions": "t/mixed/x*"}, SourceError, "is empty or does not exist: give .parquet"),
        ({"captions": "t/two/*.csv"}, UsageError, "b.csv has no column 'caption' .--caption-col"),
        ({"captions": "t/huge.parquet"}, SourceError, "row 1 of .* has a caption of 9.0 MB, more"),
        ({"out": "x-{caption}"}, UsageError, "x-{caption} lacks a caption for"),
        ({"out": "x-{resolution}", "resolution": 0}, UsageError, "lacks a resolution for"),
        ({"captions": "t/names.csv"}, UsageError, "has no column 'key or source or url or sha256'"),
        ({"captions": "t/text.csv"}, UsageError, "has no column 'caption' .--caption-column.: it"),
        ({"captions": "t/text.csv", "model": "./none"}, UsageError, "has no column 'caption'"),
        ({"captions": "t/good.csv", "captions_by": "url"}, UsageError, "no column 'url' .--captio"),
        ({"captions": "t/good.csv", "captions_by": "id"}, UsageError, "give one of key, source"),
        ({"captions": "t/list.jsonl"}, SourceError, "row 1 of .* has a list for its caption, not"),
        ({"captions": "t/true.jsonl"}, SourceError, "row 0 of .* has a bool for its key, not a te"),
        ({"captions": "t/broken.jsonl"}, SourceError, "row 1 of .* cannot be read"),
        ({"captions": "t/blank.csv"}, SourceError, "has no row with a key and a caption"),
        ({"captions": "t/by.csv"}, UsageError, "no sample of .* has a sha256, by which --capt"),
        (
            {"captions": "t/far.csv"},
            UsageError,
            "lists no sample of .*: each source is such as '/a.jpg' there, and such as 'photo-0000",
        ),
        ({"caption_field": "meta..long"}, UsageError, "is not a path in a json"),
        ({"caption_field": "long", "caption_name": "a/b"}, UsageError, "cannot be named 'a/b'"),
        ({"caption_fields": "a,meta.a"}, UsageError, "captions cannot be named 'a': give"),
        ({"caption_fields": "a,b"}, UsageError, "write {caption} where their names differ"),
        ({"caption_fields": "a,b", "latents": "mean"}, UsageError, "give --latents none"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_anything_is_written(
    undigested: Path, tmp_path: Path, options: dict[str, Any], error: type[WdsprepError], words: str
) -> None:
    if "captions" in options:
        options = {**options, "captions": undigested.parent / options["captions"]}
    out = tmp_path / options.get("out", "out")
    options = {name: value for name, value in options.items() if name != "out"}
    with pytest.raises(error, match=words) as refused:
        text_here(undigested, out, **{"resolution": 64, **options})
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="module")
def undigested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images without digests, and tables of which most are of no use."""
    root = tmp_path_factory.mktemp("undigested")
    source = pictures(root / "downloads", range(2))
    write_files(source, {f"photo-{n:04d}.json": json.dumps({"long": "text"}) for n in range(2)})
    rows = [{"key": "1", "caption": "a"}, {"key": "2", "caption": ["b"]}]
    write_files(root / "t", {
        "empty.csv": "", "head.csv": "key,caption\n", "text.parquet": "key,caption\n1,a\n",
        "a.jpg": "1", "pictures/a.jpg": "1", "names.csv": "name,caption\n1,a\n",
        "text.csv": "key,text\n1,a\n", "good.csv": "key,caption\n1,a\n",
        "list.jsonl": "".join(f"{json.dumps(row)}\n" for row in rows),
        "true.jsonl": '{"key": true, "caption": "a"}\n', "blank.csv": "key,caption\n1,\n,a\n",
        "broken.jsonl": '{"key": "1", "caption": "a"}\n{"key"\n', "by.csv": "sha256,caption\nf,a\n",
        "mixed/a.parquet": "x", "mixed/b.csv": "key,caption\n1,a\n",
        "far.csv": "source,caption\n/a.jpg,a\n",
        "two/a.csv": "key,caption\n1,a\n", "two/b.csv": "key,text\n1,a\n",
    })  # fmt: skip
    parquet(root / "t/huge.parquet", key=["1", "2"], caption=["a", "w" * 9_000_000])
    return pack(source, root / "images", "--buckets", "64")
