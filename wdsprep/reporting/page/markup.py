"""Build HTML in which plain text is always escaped, and elements never twice.

Captions, names, hosts and keys come from the web. What looks like an element, a comment or the end
of an attribute in them becomes text on the page, and characters that no text should have become
replacement characters.
"""

import html
import re
from collections.abc import Iterable
from typing import TypeAlias

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
TIMES, MINUS, DASH = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}", "\N{EN DASH}"
# Control characters except tab and line feed, and halves of surrogate pairs, which JSON may have.
_BAD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset(("img", "input", "link", "meta"))


class Html(str):
    """A text that is HTML already, and is not escaped again."""

    __slots__ = ()


Child: TypeAlias = "str | int | Iterable[Child] | None"


def escape(text: object) -> Html:
    """Return a value as HTML that shows it, in an attribute too. Html stays as it is."""
    if isinstance(text, Html):
        return text
    return Html(html.escape(_BAD.sub(UNREADABLE, str(text))))


def join(*children: Child) -> Html:
    """Join children as HTML: texts are escaped, lists are flattened, None is left out."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, str | int):
            parts.append(escape(child))
        elif child is not None:
            parts.append(join(*child))
    return Html("".join(parts))


def format_sides(*sides: object) -> str:
    """Return sides as people write them: 640 times 480, with the sign for times."""
    return f" {TIMES} ".join(map(str, sides))


def el(tag: str, /, *children: Child, **attributes: "str | int | float | None") -> Html:
    """Return an HTML element with its children and attributes.

    `class_` is the attribute class, and `aria_label` is aria-label. True makes an attribute without
    a value; None and False make none.
    """
    parts = [tag]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = key.rstrip("_").replace("_", "-")
        parts.append(shown if value is True else f'{shown}="{escape(value)}"')
    start = f"<{' '.join(parts)}>"
    return Html(start if tag in _VOID else f"{start}{join(*children)}</{tag}>")
