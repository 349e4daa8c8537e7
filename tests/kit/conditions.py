"""Conditions drawn by chance, and rows of all kinds that they may meet."""

import math
import random
from typing import Any

import numpy as np

from wdsprep.dataset.condition_syntax import Condition
from wdsprep.dataset.samples import value_at_path

WIDE = [2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, -(2**53) - 1, -(2**63)]
HUGE = [2**63, 2**64 - 1, 2**64, 2**70, 2**70 + 1, -(2**70), 10**400]
FLOATS = [0.5, -1.5, 6.0, 1e-7, 5e-324, 2.0**53, 2.0**53 + 2, 1e22, 1e300, -1e308]
ODD_FLOATS = [math.inf, -math.inf, math.nan]
TEXTS = [
    *("", "car", "a red car", "en", "e", "e5", "truck", "\u00fc", "\u65e5\u672c\u8a9e"),
    *("\U0001f697 car", "7", "6.0", "-7", "07", ".5", "5.", "1e3", "+6", " 7", "7\n", "1_0"),
    *("\u0663", "0x10", "7 cars", "nan", "inf", "-inf", "infinity", "1e999", "true", "null"),
    *("None", ".", "-", "--7", "1-2", "1.2.3", "9007199254740993", "9007199254740992.0"),
    *("18446744073709551616", "0.1000000000000000055511", "it's", '"car"', "a\\b", "a/b"),
    *("100%", "a_b", "a\nb", "a\0b", "\x7f", "[1]", "{}", "'; drop table rows; --"),
]  # fmt: skip
INTS = [0, 1, -1, 2, 6, 7, 512, *WIDE]
KEYS = [
    *("lang", "cell", "aesthetic", "marks", "deep", "a name", "\u00fc", "7", 'q"k', "it's"),
    *("a*b", "a.b", "a/b", "car", "width"),
]  # fmt: skip
NAMES = [
    *("width", "height", "score", "caption", "source", "nsfw", "tags", "nothing", "small"),
    *("lang", "cell", "aesthetic", "marks", "deep", "meta", "meta.width", "meta.lang"),
    *("tags[0]", "captions[0]", "captions['1']", "captions", "captions.x", "captions[0].x"),
    *("caption.x", "width[0]", "marks[0]", "marks[1]", "meta.cell", "marks[2147483648]"),
    *("deep.lang", "deep.cell.car", "deep.marks[0]", "marks[0].lang", "deep['7']"),
    *("meta['7']", "meta['a name']", "meta['\u00fc']", "meta['q\"k']", "meta[\"it's\"]"),
    *("meta['a*b']", "meta['a.b']", "meta['a/b']", "meta['']", "meta['a\\\\']", "meta.meta"),
    *("meta[0]", "meta[0].lang", "rest", "rest.lang"),
]  # fmt: skip


def meets(text: str, facts: Any) -> bool:
    """Return whether the json of one sample meets a condition."""
    condition = Condition(text)
    return condition.holds([value_at_path(facts, path) for path in condition.names])


def json_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(13 if depth < 3 else 10)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind < 9:
        return rng.choice([*INTS, *INTS, *FLOATS, *HUGE, True, False])
    if kind == 9:
        return None
    if kind == 10:
        return {rng.choice(KEYS): json_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [json_value(rng, depth + 1) for _ in range(rng.randrange(4))]


def a_row(rng: random.Random) -> dict[str, Any]:
    """Return what is known of a sample; half of the values are as those of most datasets."""
    meta = {key: json_value(rng) for key in KEYS if rng.random() < 0.5}
    if rng.random() < 0.5:
        meta |= {"aesthetic": rng.randrange(100) / 10, "lang": rng.choice(["en", "de"])}
        meta |= {"marks": [rng.choice(TEXTS[:10]) for _ in range(rng.randrange(3))]}
    row: dict[str, Any] = {
        "width": rng.choice(INTS),
        "height": rng.choice([*INTS, None]),
        "score": rng.choice([*FLOATS, *ODD_FLOATS, 7.0, None]),
        "caption": rng.choice(TEXTS),
        "source": rng.choice([*TEXTS, None]),
        "nsfw": rng.choice([True, False, None]),
        "tags": rng.choice([None, [], ["car"], ["car", None, "7"]]),
        "small": rng.choice([0.1, 6.5, 1e30]),
        "meta": rng.choice([meta] * 20 + [None, [meta], "car"]),
    }
    row["small"] = float(np.float32(row["small"]))
    return row


# --- conditions
def constant(rng: random.Random) -> str:
    value = rng.choice(
        [*TEXTS, *TEXTS, 0, 1, 6, 7, 512, 0.5, 6.0, True, False, *INTS, *FLOATS, *HUGE, math.inf]
    )
    return repr(value).replace("inf", "1e999") if isinstance(value, float) else repr(value)


def a_list(rng: random.Random) -> str:
    return "[" + ", ".join(constant(rng) for _ in range(rng.randrange(5))) + "]"


def a_value(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(10)
    if depth and kind < 2:
        sign = rng.choice("+-*/")
        return f"({a_value(rng, depth - 1)} {sign} {a_value(rng, depth - 1)})"
    if depth and kind == 2:
        return f"({rng.choice('+-')} {a_value(rng, depth - 1)})"
    if depth and kind == 3:
        return f"({a_condition(rng, depth - 1)})"
    return rng.choice(NAMES) if kind < 8 else constant(rng)


def a_condition(rng: random.Random, depth: int = 3) -> str:
    kind = rng.randrange(12)
    if depth and kind < 3:
        return rng.choice([" and ", " or "]).join(
            f"({a_condition(rng, depth - 1)})" for _ in range(rng.randrange(2, 4))
        )
    if depth and kind == 3:
        return f"not ({a_condition(rng, depth - 1)})"
    value = a_value(rng, max(depth - 1, 0))
    if kind == 4:
        return value
    if kind == 5:
        return f"{value} is {rng.choice(['', 'not '])}None"
    if kind == 6:
        pieces = ["%", "%", "_", "car", "a", "7", " ", "\\", "'"]
        pattern = "".join(rng.choice(pieces) for _ in range(4))
        return f"like({value}, {pattern!r})"
    links = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if rng.randrange(4) == 0:
            links.append(f"{rng.choice(['in', 'not in'])} {a_list(rng)}")
        else:
            sign = rng.choice(["<", "<=", ">", ">=", "==", "!=", "in", "not in"])
            links.append(f"{sign} {a_value(rng, max(depth - 1, 0))}")
    return " ".join([value, *links])
