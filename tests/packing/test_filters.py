"""Filters: a small language over a sample's facts, with no way to run code."""

import pickle
from typing import Any

import pytest

from wdsprep.errors import UsageError
from wdsprep.packing.filters import Filter

FACTS: dict[str, Any] = {
    "aesthetic": 5.0, "width": 640, "height": 480, "nsfw": False, "lang": "en",
    "caption": "a red car", "tags": ["car", "red"], "note": "", "none": None, "pwatermark": 0.5,
    "cell": "7",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("aesthetic >= 4.5 and pwatermark < 0.8", True),
        ("aesthetic >= 4.5 and pwatermark < 0.5", False),
        ("aesthetic == 5", True),
        ("width > height", True),
        ("lang != 'en'", False),
        # and binds closer than or, not closer than and
        ("aesthetic > 1 or width > 9999 and height > 9999", True),
        ("(aesthetic > 1 or width > 9999) and height > 9999", False),
        ("not nsfw and lang == 'en'", True),
        ("not (nsfw or lang == 'en')", False),
        ("not not width", True),
        # chained
        ("256 <= height <= 512 < width", True),
        ("256 <= height <= 400 < width", False),
        # in
        ("lang in ('en', 'de')", True),
        ("lang in ['fr']", False),
        ("lang not in ('fr',)", True),
        ("'car' in caption", True),
        ("'car' in tags and 'blue' not in tags", True),
        ("width in 5", False),
        # a name alone is true if it holds something
        ("lang", True),
        ("note", False),
        ("nsfw", False),
        # what is missing or null compares as false, whichever way round
        ("score > 1", False),
        ("score <= 1", False),
        ("score == 1", False),
        ("score != 1", False),
        ("1 < score", False),
        ("none != 1", False),
        ("score not in (1, 2)", False),
        ("score", False),
        ("not score", True),
        ("not score > 1", True),
        ("score > 1 or width > 1", True),
        # so does another type
        ("lang > 3", False),
        ("lang <= 3", False),
        ("width < 'x'", False),
        ("tags > 1", False),
        ("lang == 1", False),
        # but a text that is a number may be one: all columns of a CSV are texts
        ("cell > 4.5 and cell < 10", True),
        ("5.0 <= cell", True),
        ("cell == '7'", True),
        ("cell == 7", True),
        ("cell in ('7', '8')", True),
        ("aesthetic > -1.5", True),
        ("  aesthetic > 1  ", True),
    ],
)
def test_a_condition_means_what_it_says(text: str, kept: bool) -> None:
    assert Filter(text)(FACTS) is kept


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("__import__('os').system('true')", "__import__('os').system('true')"),
        ("len(caption) > 3", "len(caption)"),
        ("caption.lower() == 'x'", "caption.lower()"),
        ("aesthetic.real > 1", "aesthetic.real"),
        ("width * height > 1000", "width * height"),
        ("width > 2 * 300", "2 * 300"),
        ("-width < 3", "-width"),
        ("-'a' < lang", "-'a'"),
        ("- -1 < width", "- -1"),
        ("-True < width", "-True"),
        ("tags[0] == 'car'", "tags[0]"),
        ("lambda: 1", "lambda: 1"),
        ("[w for w in tags]", "[w for w in tags]"),
        ("width if nsfw else 1", "width if nsfw else 1"),
        ("(w := 1) > 0", "w := 1"),
        ("f'{width}' == '1'", "f'{width}'"),
        ("width is None", "width is None"),
        ("(width > 1) > 0", "width > 1"),
        ("lang in {'en'}", "{'en'}"),
        ("lang in (name, 'en')", "(name, 'en')"),
        ("width > {}", "{}"),
        ("~width", "~width"),
        ("*tags", None),
        ("True", "True"),
        ("1 and width", "1"),
        ("width; height", None),
        ("import os", None),
        ("width = 1", None),
        ("width >", None),
        ("aesthetic > 4.5 & width > 3", "4.5 & width"),
        ("", None),
        ("   ", None),
        ("width \0", None),
        ("not " * 50_000 + "x", None),
        ("(" * 5_000 + "x" + ")" * 5_000, None),
    ],
)
def test_all_else_is_refused_by_the_part_that_is_wrong(text: str, part: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        Filter(text)
    message = str(caught.value)
    assert message.startswith("--filter")
    assert "\n" not in message
    if part:
        assert f"{part!r} cannot be used: compare columns with constants" in message


def test_names_are_known_and_a_filter_travels_to_workers() -> None:
    condition = Filter("a > 1 and not (b in ('x', 'y') or 1 < c < d)")
    assert condition.names == {"a", "b", "c", "d"}
    again = pickle.loads(pickle.dumps(condition))
    assert (again.text, again.names) == (condition.text, condition.names)
