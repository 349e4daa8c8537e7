"""What a robots.txt allows, as RFC 9309 reads it.

The groups that name us count, or else those for `*`; the longest pattern that matches decides, and
between equals the one that allows. Patterns are matched piece by piece rather than by regular
expressions, which a hostile file could make take for ever. `Crawl-delay` is no part of the standard
and is not obeyed: the bound on requests at a time per host does what it is for.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

TOKEN = "wdsprep"  # noqa: S105 (the name we answer to, not a secret)
MAX_NBYTES = 512_000  # of which the RFC wants 500 KiB to be read
_UNRESERVED = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~")
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})|[^!-~]")
_PRODUCT = re.compile(r"[A-Za-z_-]+|\*")


@dataclass(frozen=True, slots=True)
class Pattern:
    """The path of one rule, cut at its `*`."""

    pieces: tuple[str, ...]
    to_the_end: bool
    allow: bool

    def matches(self, path: str) -> bool:
        first, *others = self.pieces
        if not path.startswith(first):
            return False
        at = len(first)
        last = others.pop() if self.to_the_end and others else None
        for piece in others:
            found = path.find(piece, at)
            if found < 0:
                return False
            at = found + len(piece)
        if last is not None:
            return path.endswith(last) and len(path) - len(last) >= at
        return not self.to_the_end or at == len(path)


@dataclass(frozen=True, slots=True)
class Robots:
    """The rules for us, the longest first."""

    patterns: tuple[Pattern, ...] = ()
    nbytes: int = 0

    def allows(self, path: str) -> bool:
        plain = normal(path)
        for pattern in self.patterns:
            if pattern.matches(plain):
                return pattern.allow
        return True


def read_robots(data: bytes) -> Robots:
    """The rules in a robots.txt; whatever is no rule is passed over."""
    ours: list[tuple[bool, str]] = []
    anyone: list[tuple[bool, str]] = []
    named = False
    for agents, rules in _groups(data[:MAX_NBYTES].decode("utf-8", "replace")):
        if TOKEN in agents:
            named = True
            ours += rules
        elif "*" in agents:
            anyone += rules
    rules = ours if named else anyone
    longest_first = sorted(rules, key=lambda rule: (-len(rule[1]), not rule[0]))
    patterns = tuple(_pattern(allow, path) for allow, path in longest_first)
    return Robots(patterns, sum(len(path) for _, path in rules))


def _groups(text: str) -> Iterator[tuple[set[str], list[tuple[bool, str]]]]:
    agents: set[str] = set()
    rules: list[tuple[bool, str]] = []
    naming = False
    for key, value in _lines(text):
        if key == "user-agent":
            if not naming:
                yield agents, rules
                agents, rules = set(), []
            naming = True
            found = _PRODUCT.match(value)
            agents.add(found[0].lower() if found else "")
        elif key in ("allow", "disallow"):
            naming = False
            if value:
                rules.append((key == "allow", normal(value)))
    yield agents, rules


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in re.split(r"[\r\n]+", text.removeprefix("\ufeff")):
        key, _, value = line.partition("#")[0].partition(":")
        yield key.strip().lower(), value.strip()


def _pattern(allow: bool, path: str) -> Pattern:
    to_the_end = path.endswith("$")
    pieces = path.removesuffix("$").split("*")
    return Pattern(tuple(pieces), to_the_end, allow)


def normal(path: str) -> str:
    """One spelling of a path: escaped is what must be, and nothing else."""
    return _ESCAPE.sub(_respell, path)


def _respell(found: "re.Match[str]") -> str:
    if found[1] is None:
        return "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "replace"))
    byte = int(found[1], 16)
    return chr(byte) if byte in _UNRESERVED else f"%{byte:02X}"
