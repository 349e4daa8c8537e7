"""What is encoded besides what pack left: tars of others, and shards that are damaged."""

import gzip
import io
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from PIL import Image

import wdsprep
from tests.kit import corpus
from tests.kit.damaged import findings
from tests.kit.encodes import (
    SHARDS,
    command,
    encode_here,
    latents_of,
    members,
    packed,
    pictures,
    rejected,
)
from tests.kit.packs import (
    decoded,
    jpeg,
    manifest_of,
    pack,
    photos,
    samples_of,
    tar_bytes,
    tars,
    temporaries,
    touch,
    tree,
    write_files,
)
from wdsprep.dataset.reindex import index as index_tars
from wdsprep.dataset.stored_dataset import read_receipt, write_rebuilt
from wdsprep.encoding.image_shards import find_image_shards
from wdsprep.errors import FingerprintError, FormatError, SourceError, UsageError
from wdsprep.reporting.report import report
from wdsprep.runners.job import JobListener
from wdsprep.store import open_store

# --- tars that something else packed

pytestmark = pytest.mark.usefixtures("stand_in")


def rotated() -> bytes:
    """160 x 190 as it is seen, 190 x 160 as it is stored."""
    out = io.BytesIO()
    image = Image.effect_noise((190, 160), 60).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(out, "JPEG", exif=exif)
    return out.getvalue()


def foreign(root: Path) -> Path:
    """Two tars: one with all that can be wrong with a sample, one that ends too soon."""
    good = tar_bytes(
        [
            ("one.jpg", jpeg(1, (80, 70))), ("one.txt", b"first"),
            ("turned.jpg", rotated()), ("turned.json", b'{"caption": "seen upright", "n": 1}'),
            ("small.jpg", jpeg(2, (40, 90))), ("small.txt", b"too small"),
            ("up/../../out.jpg", jpeg(3, (80, 70))), ("up/../../out.txt", b"leaves"),
            ("bad.jpg", jpeg(4, (80, 70))[:900]), ("bad.txt", b"damaged"),
            ("text.txt", b"no image"),
            ("deep/er.png", jpeg(5, (64, 64), "PNG")),
        ]
    )  # fmt: skip
    cut = tar_bytes([(f"{n}.jpg", jpeg(n, (70, 70))) for n in range(4)])
    return write_files(root, {"a/b.tar": good, "c.tar": cut[: len(cut) * 6 // 10]})


def test_tars_of_others_are_encoded_and_what_is_bad_is_told(tmp_path: Path) -> None:
    source = foreign(tmp_path / "in")
    encode_here(source, tmp_path / "out")
    manifest = manifest_of(tmp_path / "out")
    assert manifest.complete
    assert [shard.name for shard in manifest.shards] == ["64/a/b.tar", "64/c.tar"]
    found = latents_of(tmp_path / "out")
    assert list(members(tmp_path / "out/64/a/b.tar")) == ["one", "turned", "deep/er"]
    assert found["turned"]["txt"] == found["turned"]["json"]["caption"] == "seen upright"
    facts = found["turned"]["json"]
    assert (facts["width"], facts["height"], facts["original_width"]) == (160, 190, 160)
    assert found["deep/er"]["txt"] == ""
    lost = rejected(tmp_path / "out")
    assert lost == {
        "small": "too_small", "bad": "truncated", "text": "no_image", "2": "tar_truncated",
        "up/../../out": "bad_key",
    }  # fmt: skip
    assert list(members(tmp_path / "out/64/c.tar")) == ["0", "1"]
    assert sum(receipt.inputs for receipt in manifest.receipts) == len(found) + len(lost)
    assert set(tree(tmp_path)) >= {"out/rejects/64/a/b.jsonl", "out/receipts/64/a/b.json"}


def test_keys_of_foreign_tars_are_those_that_webdataset_gives_them(tmp_path: Path) -> None:
    """By `tar -C dir .`, of folders with dots, linked: pack and encode lose none of them."""
    names = ("f0", "d/sub.dir/a0", "v1.5/x/b", "..c/d")
    files = {f"{name}.jpg": jpeg(n, (70, 70)) for n, name in enumerate(names)}
    folder = write_files(tmp_path / "of", dict(files) | {f"{name}.txt": name for name in names})
    (tmp_path / "in").mkdir()
    tar = ["tar", "--sort=name", "-cf", tmp_path / "in/x.tar", "-C", folder, "."]
    subprocess.run(tar, check=True)
    encode_here(tmp_path / "in", tmp_path / "out")
    assert not manifest_of(tmp_path / "out").rejects
    theirs, ours = (
        {sample["__key__"]: sample["txt"] for sample in decoded(tmp_path / name)}
        for name in ("in/x.tar", "out/64/x.tar")
    )
    assert ours == theirs == {f"./{name}": name for name in names}
    (batch,) = wdsprep.load(str(tmp_path / "out"), global_batch=4)
    assert set(batch["key"]) == set(theirs)
    assert not findings(tmp_path / "out")
    index_tars(str(tmp_path / "in"))
    raw = wdsprep.load(str(tmp_path / "in"), global_batch=4, raw=True)
    assert {sample["__key__"] for sample in raw} == set(theirs)
    images = packed(tmp_path / "in", tmp_path / "images")
    packed_keys = {sample["json"]["source"] for sample in samples_of(images)}
    assert packed_keys == {f"x.tar/{key}" for key in theirs}


def test_gzipped_tars_are_encoded_as_they_are(tmp_path: Path) -> None:
    data = tar_bytes([("a.jpg", jpeg(1, (70, 70))), ("a.txt", b"x"), ("a.cls", b"1")])
    write_files(tmp_path / "in", {"0.tar": data, "d/1.tar.gz": gzip.compress(data)})
    encode_here(tmp_path / "in", tmp_path / "out")
    manifest = manifest_of(tmp_path / "out")
    assert [shard.name for shard in manifest.shards] == ["64/0.tar", "64/d/1.tar"]
    assert manifest.counts["left_out:.cls"] == 2
    one, other = (members(tmp_path / "out" / shard.name)["a"] for shard in manifest.shards)
    assert one["latent.npy"] == other["latent.npy"]
    write_files(tmp_path / "in", {"d/1.tgz": b""})
    with pytest.raises(SourceError, match=r"d/1.tar.gz and d/1.tgz would both become 64/d/1.tar"):
        encode_here(tmp_path / "in", tmp_path / "other")


@pytest.mark.parametrize("whole", [0, 2])
def test_an_encode_that_loses_a_part_of_a_tar_or_makes_nothing_exits_with_3(
    whole: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tar_bytes((f"{n}.jpg", jpeg(n, (70, 70))) for n in range(whole + 1))
    write_files(tmp_path / "in", {"0.tar": data[: data.rindex(b"%d.jpg" % whole) + 600]})
    assert command(tmp_path / "in", tmp_path / "out") == 3
    said = capsys.readouterr().out
    assert "1 tar cannot be read to the end" in said
    assert ("nothing was kept" in said) is (not whole)
    assert ("warning: no image has a caption" in said) is bool(whole)
    assert manifest_of(tmp_path / "out").samples == whole
    small = write_files(tmp_path / "small", {"0.tar": tar_bytes([("a.jpg", jpeg(1, (9, 9)))])})
    assert command(small, tmp_path / "none") == 3
    assert "nothing was kept" in capsys.readouterr().out


def test_the_users_own_limit_of_area_counts_not_the_datasets(tmp_path: Path) -> None:
    """Two pictures of 121 megapixels, in a dataset that says it may have any."""
    bomb = corpus.png_bomb(11_000)
    files: dict[str, bytes | str] = {"a.png": bomb, "b.jpg": jpeg(1, (70, 70)), "c.png": bomb}
    write_files(tmp_path / "in", files)
    images = packed(tmp_path / "in", tmp_path / "images", "--max-area", "9" * 12, "--check=header")
    assert manifest_of(images).samples == 3
    assert command(images, tmp_path / "out") == 0
    assert rejected(tmp_path / "out") == {"000000000000": "too_large", "000000000002": "too_large"}
    assert "max_area" not in manifest_of(tmp_path / "out").settings
    assert command(images, tmp_path / "less", "--max-area", "4899") == 3
    assert manifest_of(tmp_path / "less").settings["max_area"] == 4899

    how = wdsprep.Encode(resolution=64, model="tiny", device="cpu")
    for options in ({"encode": how}, {"pixels": 64}):
        (batch,) = wdsprep.load(str(images), global_batch=3, **options)  # type: ignore[arg-type]
        assert batch["key"] == ["000000000001"] * 3
    with pytest.raises(FormatError, match="16 samples in a row"):
        next(iter(wdsprep.load(str(images), global_batch=3, pixels=64, max_area=4899)))
    with pytest.raises(UsageError, match="Encode"):
        wdsprep.load(str(images), global_batch=3, encode=how, max_area=4899)
    report(str(images), output=str(tmp_path / "report.html"), max_area=10_000)
    page = (tmp_path / "report.html").read_text()
    assert page.count("too_large 11000 x 11000") == 2


def test_a_strangers_dataset_brings_no_number_that_json_cannot_hold(tmp_path: Path) -> None:
    """Nor does it lose a shard by facts that are missing."""
    images = packed(pictures(tmp_path / "in", [0]), tmp_path / "images")
    (shard,) = manifest_of(images).shards
    rows = [
        (
            f"{key}.{name}",
            data.replace(b'"original_height":80', b'"original_height":' + b"8" * 400 + b".0"),
        )
        for key, fields in members(images / shard.name).items()
        for name, data in fields.items()
    ]
    receipt = read_receipt(open_store(str(images)), "000000")
    data = tar_bytes(rows)
    (images / shard.name).write_bytes(data)
    shard = shard._replace(nbytes=len(data), digest=blake3(data).hexdigest())
    altered = replace(receipt, shards=(shard,)).to_bytes()
    (images / "receipts/000000.json").write_bytes(altered)
    write_rebuilt(str(images))
    assert not encode_here(images, tmp_path / "out").quarantined
    (sample,) = members(tmp_path / "out" / shard.name).values()
    assert json.loads(sample["json"], parse_constant=pytest.fail)["original_height"] == 80


def test_foreign_tars_of_another_date_are_not_encoded_again_unless_their_bytes_are_others(
    tmp_path: Path,
) -> None:
    files = {f"{c}.tar": [(f"{c}{n}.jpg", jpeg(n, (70, 70))) for n in range(3)] for c in "ab"}
    root = write_files(tmp_path / "in", {name: tar_bytes(files[name]) for name in files})
    out, whole = tmp_path / "out", tmp_path / "at once"
    encode_here(root, out, limit=4)
    touch(root)
    encode_here(root, out)  # the second tar was cut, and is made anew
    encode_here(root, whole)
    assert tars(out) == tars(whole)
    before = tree(out)
    compared: list[tuple[int, int]] = []
    touch(root)
    listener = JobListener(on_comparison=lambda done, of: compared.append((done, of)))
    encode_here(root, out, listener=listener)
    assert tree(out) == before
    assert compared == [(0, 2), (1, 2), (2, 2)]
    assert findings(out) == []
    flip(root / "a.tar")
    with pytest.raises(
        FingerprintError, match=r"1 image shard has changed or gone since .* \(64/a\)"
    ):
        encode_here(root, out)
    assert tree(out) == before


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3000] ^= 1
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9000])


@pytest.mark.system
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "is not what was packed"),
        (cut_short, "is truncated (expected"),
        (Path.unlink, "is not there"),
    ],
)
def test_a_damaged_shard_is_left_out_and_done_once_it_is_packed_anew(
    own: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    words: str,
) -> None:
    out, whole, shard = tmp_path / "out", tmp_path / "whole", "64/000001.tar"
    encode_here(own, whole)
    damage(own / shard)
    assert command(own, out) == 3
    told = capsys.readouterr().out
    assert f"shard {shard.removesuffix('.tar')} is left out: {shard} {words}" in told
    assert f'run "wdsprep repair {own}", then "wdsprep pack" again' in told
    assert "run the same command again" in told
    assert "next:" not in told
    assert not manifest_of(out).complete
    assert set(tree(whole)) - set(tree(out)) == {
        *(shard, f"{shard}.idx", f"{shard[:-4]}.parquet"),
        *(f"receipts/{shard[:-4]}.json", f"rejects/{shard[:-4]}.jsonl"),
    }
    assert not temporaries(out)

    (own / "receipts/000001.json").unlink()
    packed(own.parent / "downloads", own)
    assert command(own, out) == 0
    assert f"after {SHARDS - 1} shards encoded before" in capsys.readouterr().out
    assert tree(out) == tree(whole)


def test_a_dataset_that_kept_no_image_says_so_and_why(tmp_path: Path) -> None:
    out = pack(photos(tmp_path / "in", 2), tmp_path / "out", "--min-size", "4000")
    with pytest.raises(SourceError, match=r"as all were rejected \(too_small 2; .*rejects/ lists"):
        find_image_shards(str(out), 64)
    with pytest.raises(SourceError, match=r"as all were rejected \(too_small 2; "):
        find_image_shards(str(out), 4096)
