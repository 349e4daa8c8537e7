"""HTML that cannot forget to escape: plain text is escaped where it is put in, elements are not.

Captions, names, hosts and keys come from the web. What looks like an element, a comment or an
attribute's end in them is text on the page, and characters that no text should have are shown as
what they are: unreadable.
"""

import html
import re
from collections.abc import Iterable
from typing import TypeAlias

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
TIMES, MINUS, DASH = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}", "\N{EN DASH}"
# Control characters but tab and line feed, and halves of surrogate pairs, which JSON may bring.
_BAD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset(("img", "input", "link", "meta"))


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Child: TypeAlias = "str | int | Iterable[Child] | None"


def escaped(text: object) -> Html:
    """Any text as HTML that shows it, inside an attribute too."""
    if isinstance(text, Html):
        return text
    return Html(html.escape(_BAD.sub(UNREADABLE, str(text))))


def joined(*children: Child) -> Html:
    """Children one after another: what is not Html is escaped, None is nothing."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, str | int):
            parts.append(escaped(child))
        elif child is not None:
            parts.append(joined(*child))
    return Html("".join(parts))


def by(*sides: object) -> str:
    """Measures such as 640 by 480, as one writes them."""
    return f" {TIMES} ".join(map(str, sides))


def el(tag: str, /, *children: Child, **attributes: "str | int | float | None") -> Html:
    """Make an element.

    `class_` is the attribute class, and `aria_label` is aria-label. True makes an attribute
    without a value; None and False make none.
    """
    parts = [tag]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        shown = key.rstrip("_").replace("_", "-")
        parts.append(shown if value is True else f'{shown}="{escaped(value)}"')
    start = f"<{' '.join(parts)}>"
    return Html(start if tag in _VOID else f"{start}{joined(*children)}</{tag}>")
