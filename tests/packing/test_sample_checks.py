"""Whatever the input, each file is a sample or a reject with its code, and never both."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.kit.corpus import CASES, LIMITS, damaged_strip
from tests.kit.packs import (
    check_dataset,
    command,
    jpeg,
    outcome,
    pack,
    photos,
    run_pack,
    samples_of,
    write_files,
)

LIMIT_OPTIONS = ("--max-area", str(LIMITS.max_area), "--max-aspect-ratio", "10")


def corpus_files() -> dict[str, bytes | str]:
    files: dict[str, bytes | str] = {}
    for name, case in CASES.items():
        files[f"{name}.img.jpg"] = case.data
        files[f"{name}.img.txt"] = f"caption of {name}"
    return files


def test_libtiff_says_nothing_of_a_damaged_tiff(tmp_path: Path) -> None:
    """In a worker, whose stderr is the command's."""
    write_files(tmp_path / "in", {"good.jpg": jpeg(1), "bad.tif": damaged_strip()})
    done = run_pack(tmp_path / "in", tmp_path / "out")
    assert done.returncode == 0
    assert "ZIPDecode" not in done.stderr
    assert outcome(tmp_path / "out")["bad.tif"] == "corrupt"


def check_corpus(out: Path, sources: dict[str, str]) -> None:
    """All that came of the corpus; `sources` says where each of its files was put."""
    found = outcome(out)
    expected = {n: c.code.value if c.code else "packed" for n, c in CASES.items()}
    assert found == {sources[name]: code for name, code in expected.items()}
    names = {source: name for name, source in sources.items()}
    for sample in samples_of(out):
        name = names[sample["json"]["source"]]
        assert sample["txt"] == f"caption of {name}"
        assert CASES[name].extension in sample
        assert tuple(sample["json"]["changes"]) == CASES[name].changes
        assert (sample["json"]["width"], sample["json"]["height"]) == CASES[name].size
        if not CASES[name].changes:
            assert sample[CASES[name].extension] == CASES[name].data
    check_dataset(out)


def test_every_bad_file_of_a_folder_is_a_sample_or_a_reject_never_both(tmp_path: Path) -> None:
    write_files(tmp_path / "in", corpus_files())
    out = pack(tmp_path / "in", tmp_path / "out", *LIMIT_OPTIONS)
    check_corpus(out, {name: f"{name}.img.jpg" for name in CASES})


def test_every_bad_file_of_a_table_is_a_sample_or_a_reject_never_both(tmp_path: Path) -> None:
    rows = [{"jpg": case.data, "text": f"caption of {name}"} for name, case in CASES.items()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    out = pack(tmp_path / "t.parquet", tmp_path / "out", *LIMIT_OPTIONS)
    codes = [c.code.value if c.code else "packed" for c in CASES.values()]
    assert outcome(out) == {f"t.parquet#{n}": code for n, code in enumerate(codes)}
    check_dataset(out)


def test_a_file_that_vanishes_while_packing_is_a_reject(tmp_path: Path) -> None:
    """Listed by the driver, gone when a worker comes to it."""
    source = photos(tmp_path / "in", 6)
    lost = source / "0/photo-00003.jpg"
    program = """
import sys
from pathlib import Path
from wdsprep.packing import slices
from wdsprep.cli import main
survey_source = slices.survey_source
def then_lose(*arguments):
    seen = survey_source(*arguments)
    for name in sys.argv[1].split(":"):
        Path(name).unlink()
    return seen
slices.survey_source = then_lose
sys.exit(main(sys.argv[2:]))
"""
    names = f"{lost}:{source / '1/photo-00001.txt'}"
    words = [sys.executable, "-c", program, names, *command(source, tmp_path / "out")[1:]]
    subprocess.run(words, check=True, capture_output=True)
    found = outcome(tmp_path / "out")
    gone = [name for name, code in found.items() if code == "vanished"]
    assert sorted(gone) == ["0/photo-00003.jpg", "1/photo-00001.jpg"]
    assert list(found.values()).count("packed") == 4
    check_dataset(tmp_path / "out")
