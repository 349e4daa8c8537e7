"""Whatever is changed in a file, it is one line or rejects: a case of each kind of `tools/fuzz`."""

from pathlib import Path

from tests.kit.fuzz.fuzzing import cases_of, fuzz
from tests.kit.fuzz.judge import wrong_words
from tests.kit.fuzz.kinds import KINDS

SEED = 40


def test_a_changed_file_of_each_kind_is_one_line_or_rejects(foreign_sets: Path) -> None:
    """In little memory and time, and nothing else is touched."""
    told: list[str] = []
    with fuzz(SEED, foreign=str(foreign_sets), told=told.append) as going:
        faults = going.play(cases_of([kind.name for kind in KINDS], len(KINDS)))
        table = going.table()
    assert not faults, "\n".join([*told, table])
    assert sum(tally.taken for tally in going.tallies.values()) > len(KINDS)


def test_the_judge_of_the_fuzz_hears_what_is_wrong() -> None:
    assert not wrong_words(0, "")
    assert not wrong_words(1, "2 of 3\nwdsprep: a.tar is cut: fetch it again\n")
    for code, said in (
        (1, "wdsprep: a bug: KeyError: 'x'"),
        (1, "Traceback (most recent call last):\nwdsprep: it failed"),
        (1, "wdsprep: out of memory: give it more"),
        (1, ""),
        (2, "wdsprep: one\nwdsprep: two"),
        (1, f"wdsprep: {'x' * 5000}"),
        (130, "wdsprep: interrupted"),
    ):
        assert wrong_words(code, said), said
