"""Changes to the bytes of a file, as damage or a hostile stranger makes them.

Each is a pure function of bytes and of a `random.Random`, so that a seed tells again what failed.
`mutate` changes any bytes, `mutate_json` the values of a JSON document, whose text stays JSON.
"""

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

Mutator = Callable[[bytes, Random], bytes]

NUMBERS = (0, 1, 0x7F, 0xFF, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
"""Sizes and counts at which arithmetic turns over."""
DIGITS = (b"-1", b"0", b"9", b"1.5", b"9" * 12, b"9" * 30, b"1e9", b"NaN", b"")
DEEP = "@deep@"
"""A value that is written as lists nested more than Python can read."""


def mutate(data: bytes, rng: Random, *, ways: int = 8) -> bytes:
    """Change a file in one to three ways."""
    for _ in range(rng.randint(1, 3)):
        data = _change_bytes(data, rng, rng.randrange(ways)) if data else data
    return data


mutate_in_place = partial(mutate, ways=3)
"""Change a file so that all else lies where it was."""


def change_digit(data: bytes, rng: Random) -> bytes:
    """Make another number of one that is written in digits."""
    places = [at for at, byte in enumerate(data[:100_000]) if chr(byte).isdigit()]
    if not places:
        return mutate_in_place(data, rng)
    at = rng.choice(places)
    return data[:at] + rng.choice(DIGITS) + data[at + 1 :]


def _change_bytes(data: bytes, rng: Random, way: int) -> bytes:
    """Change bytes anywhere, or near an end, where formats keep what they claim."""
    near = rng.randrange(min(len(data), 100))
    at = rng.choice((rng.randrange(len(data)), near, len(data) - 1 - near))
    run, width = rng.randint(1, 64), rng.choice((1, 2, 4, 8))
    if way == 7:
        return change_digit(data, rng)
    number = (rng.choice(NUMBERS) & (256**width - 1)).to_bytes(width, "little")
    part, after = (
        (bytes([data[at] ^ rng.randint(1, 255)]), at + 1),
        (rng.choice((number, number[::-1])), at + width),
        (bytes(run), at + run),
        (b"", len(data)),
        (b"", at + run),
        (rng.randbytes(run), at),
        (data[at : at + run], at),
    )[way]
    return data[:at] + part[: len(data) - at if way < 3 else run] + data[after:]


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def odd_values() -> tuple[Any, ...]:
    """Values of another type or size than anybody expects."""
    return (
        *(None, True, False, 0, 1, -1, 0.5, -0.0, float("nan"), float("inf")),
        *(3, 10**9, 2**31, 2**32, 10**11, 2**53 + 1, 2**63, 10**18, 10**40, 10**300, -(2**63)),
        *(1e308, float("-inf"), "a", "transformers", "stranger/kernel", "9" * 50),
        *("", " ", "0", "1", "x" * 100_000, "../../etc/passwd", "/etc/passwd", "a/../../b"),
        *("\0", "\ud800", "\u202e", "\x1b[2J", "é" * 100, "\n", "[1]", "None"),
        *([], {}, [None], [[]], {"": None}, [0] * 1000, nested(60), nested(300), DEEP),
    )


def mutate_json(data: bytes, rng: Random, *, times: int = 0) -> bytes:
    """Change one to three values, names or lists of a JSON document, which stays JSON."""
    found = [json.loads(data)]
    for _ in range(times or rng.randint(1, 3)):
        if places := _places(found):
            _change(*rng.choice(places), rng)
    depth = 100_000
    text = json.dumps(found[0] if found else None)
    return text.replace(json.dumps(DEEP), "[" * depth + "]" * depth).encode()


def mutate_json_line(data: bytes, rng: Random) -> bytes:
    """Change one line of JSON lines."""
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at] = mutate_json(lines[at], rng) + b"\n"
    return b"".join(lines)


def mutate_text(data: bytes, rng: Random) -> bytes:
    """Change one to three lines or cells of a text, which stays UTF-8."""
    lines = data.decode().split("\n")
    for _ in range(rng.randint(1, 3)):
        at, way = rng.randrange(len(lines)), rng.randrange(6)
        if way == 0:
            del lines[at]
            lines = lines or [""]
        elif way == 1:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif way == 2:
            place = rng.randrange(len(lines[at]) + 1)
            mark = rng.choice("\"',;\t \r\0\ufeff\u202e-x0é")
            lines[at] = lines[at][:place] + mark + lines[at][place:]
        else:
            mark = rng.choice([mark for mark in ",\tx" if mark in lines[at]] or [","])
            cells = lines[at].split(mark)
            texts = [str(value) for value in odd_values()[:44] if value != "\ud800"]
            cells[rng.randrange(len(cells))] = rng.choice(texts)
            lines[at] = mark.join(cells)
    return "\n".join(lines).encode()


def _places(value: list[Any]) -> list[tuple[Any, Any]]:
    """Return each place in lists and objects within each other, by what holds it."""
    found: list[tuple[Any, Any]] = []
    holders: list[Any] = [value]
    for holder in holders:
        for name in [*holder] if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, name))
            if isinstance(holder[name], dict | list):
                holders.append(holder[name])
    return found


def _change(holder: Any, name: Any, rng: Random) -> None:
    kind = rng.randrange(8)
    if kind == 0:
        del holder[name]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(name, copy.deepcopy(holder[name]))
    elif kind == 1:
        holder[name + rng.choice((" ", "_", "x"))] = holder.pop(name)
    elif kind == 2:
        other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[name], holder[other] = holder[other], holder[name]
    elif kind == 3 and isinstance(holder[name], int | float):
        holder[name] = rng.choice((-holder[name], holder[name] * 10**9, str(holder[name]), 1))
    elif kind == 3 and isinstance(holder[name], str):
        holder[name] = mutate(holder[name].encode("utf-8", "replace"), rng).decode(
            "utf-8", "replace"
        )
    elif kind == 4:
        holder[name] = [holder[name]]
    else:
        holder[name] = rng.choice(odd_values())


ANY: tuple[Mutator, ...] = (mutate_in_place, mutate_in_place, mutate, change_digit)
WAYS: dict[str, tuple[Mutator, ...]] = {
    ".json": (mutate_json,) * 4,
    **dict.fromkeys((".csv", ".tsv", ".list"), (mutate_text,) * 3),
    ".jsonl": (mutate_json_line,) * 3,
}
"""How files of a kind change beside their bytes."""


def changed(data: bytes, name: str, rng: Random) -> bytes:
    """Change a file in a way that its name allows."""
    return rng.choice((*ANY, *WAYS.get(Path(name).suffix, ())))(data, rng)
