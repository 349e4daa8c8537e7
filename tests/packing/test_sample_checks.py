"""Whatever the input, each file is a sample or a reject with its code, and never both."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.corpus import CASES, LIMITS
from tests.kit.packs import (
    check_dataset,
    jpeg,
    outcome,
    pack,
    photos,
    rejects_of,
    samples_of,
    write_files,
    write_table,
)
from wdsprep.packing import slices

RATIO = ("--max-aspect-ratio", "10")


@pytest.mark.parametrize("kind", ["folder", "table"])
def test_every_bad_file_is_a_sample_or_a_reject_never_both(tmp_path: Path, kind: str) -> None:
    texts = {name: f"caption of {name}" for name in CASES}
    if kind == "folder":
        sources = {f"{name}.img.jpg": name for name in CASES}
        images: dict[str, bytes | str] = {s: CASES[name].data for s, name in sources.items()}
        captions = {f"{name}.img.txt": text for name, text in texts.items()}
        source = write_files(tmp_path / "in", images | captions)
    else:
        sources = {f"t.parquet#{n}": name for n, name in enumerate(CASES)}
        rows = [{"jpg": case.data, "text": texts[name]} for name, case in CASES.items()]
        source = write_table(tmp_path / "t.parquet", rows)
    out = pack(source, tmp_path / "out", "--max-area", str(LIMITS.max_area), *RATIO)
    codes = {n: case.code.value if case.code else "packed" for n, case in CASES.items()}
    assert outcome(out) == {place: codes[name] for place, name in sources.items()}
    for sample in samples_of(out):
        facts, name = sample["json"], sources[sample["json"]["source"]]
        case = CASES[name]
        assert sample["txt"] == texts[name]
        assert tuple(facts["changes"]) == case.changes
        assert (facts["width"], facts["height"]) == case.size
        assert case.changes or sample[case.extension] == case.data
        assert case.extension in sample
    check_dataset(out)


def test_a_name_is_suggested_for_a_missing_one_unless_there_are_very_many(tmp_path: Path) -> None:
    """To look for it among those of a large json would take longer than all else."""
    many = {f"field {number}": number for number in range(300)}
    facts = {"few": {"score": 1}, "many": {**many, "score": 1}}
    files = {f"{name}.json": json.dumps(said) for name, said in facts.items()}
    images = {f"{name}.jpg": jpeg(1) for name in facts}
    out = pack(
        write_files(tmp_path / "in", files | images), tmp_path / "out", "--filter", "scor > 0"
    )
    details = {reject["source"]: reject["detail"] for reject in rejects_of(out)}
    missing = "scor is missing"
    assert details == {"few.jpg": f"{missing} (did you mean score?)", "many.jpg": missing}


def test_a_file_that_vanishes_while_packing_is_a_reject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listed by the driver, gone when a worker comes to it."""
    source = photos(tmp_path / "in", 6)
    survey_source = slices.survey_source

    def survey_then_lose(*arguments: Any) -> Any:
        survey = survey_source(*arguments)
        for name in ("0/photo-00003.jpg", "1/photo-00001.txt"):
            (source / name).unlink()
        return survey

    monkeypatch.setattr(slices, "survey_source", survey_then_lose)
    found = outcome(pack(source, tmp_path / "out"))
    gone = [name for name, code in found.items() if code == "vanished"]
    assert sorted(gone) == ["0/photo-00003.jpg", "1/photo-00001.jpg"]
    assert list(found.values()).count("packed") == 4
    check_dataset(tmp_path / "out")
