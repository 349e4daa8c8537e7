"""The tables of options on the pages, from the declarations: `python -m tools.option_tables`.

A page has them between two remarks, of which the first names the class, and headings or options:

    <!-- options: wdsprep.packing.options:PackOptions: Source, Images, max_attempts -->
    <!-- end of options -->
"""

import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from wdsprep.options import Option, options_of

ROOT = Path(__file__).parents[1]
TABLE = re.compile(
    r"(<!-- options: (?P<place>[\w.]+:\w+): (?P<which>[^>]*) -->\n)(?P<rows>.*?)"
    r"(<!-- end of options -->)",
    re.DOTALL,
)


def pages() -> list[Path]:
    return sorted({ROOT / "README.md", *(ROOT / "wdsprep").glob("*/README.md")})


def shown(option: Option) -> str:
    """An option with a value, as it may be typed."""
    about, name = option.about, option.spelled
    value = about.example or "|".join(filter(None, about.choices))
    if not value and option.usual is True:
        value = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
    value = value or about.metavar
    if not option.is_command:
        usual = "" if option.is_required or option.default in (None, "") else repr(option.default)
        return f"{name}={about.example or usual}"
    return f"{name} {value}" if value and not option.is_flag else name


def _row(option: Option) -> str:
    first, second = shown(option).replace("|", "\\|"), _said(option).replace("|", "\\|")
    return f"| `{first}` | {second} |"


def _said(option: Option) -> str:
    """What a row says."""
    if option.about.page:
        return option.about.page
    said = option.about.help.rstrip(".")
    return said[0].lower() + said[1:]


def rows(place: str, which: Sequence[str]) -> Iterator[str]:
    """Those of a table; the options of each of several headings under it."""
    module, _, name = place.partition(":")
    options = options_of(getattr(importlib.import_module(module), name))
    options = tuple(sorted(options, key=lambda option: option.about.order))
    yield "| option | meaning |"
    yield "| --- | --- |"
    headings = [each for each in which if any(each == option.about.heading for option in options)]
    for each in which:
        if each in headings and len(headings) > 1:
            yield f"| **{each.lower()}** | |"
        found = [o for o in options if each in (o.about.heading, o.name)]
        if not found:
            raise SystemExit(f"{place} has no {each!r}")
        yield from map(_row, found)


def rewritten(text: str) -> str:
    """The text of a page with its tables as they are declared now."""

    def made(found: re.Match[str]) -> str:
        which = [each.strip() for each in found["which"].split(",")]
        lines = "".join(f"{line}\n" for line in rows(found["place"], which))
        return f"{found[1]}{lines}{found[5]}"

    return TABLE.sub(made, text)


def main() -> int:
    for page in pages():
        before = page.read_text()
        if (after := rewritten(before)) != before:
            page.write_text(after)
            sys.stdout.write(f"{page.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
