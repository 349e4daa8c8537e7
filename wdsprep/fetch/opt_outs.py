"""The headers by which the owner of an image says that it is not to be used for training.

These opt-outs are those that img2dataset obeys by default, and three more: `noml`, `none` (which
includes `noindex`) and the header of the TDM reservation protocol. A directive can be for one robot
only, as in `X-Robots-Tag: otherbot: noindex`; it binds us when it is for all, or for our name.
"""

from collections.abc import Iterator, Mapping, Sequence

from wdsprep.fetch.robots import TOKEN

OPT_OUTS = frozenset({"noai", "noimageai", "noml", "noindex", "noimageindex", "none"})

Headers = Mapping[str, Sequence[str]]


def opt_out(headers: Headers) -> str:
    """Return the header by which the owner reserves the image, or "" if there is none."""
    for value in headers.get("x-robots-tag", ()):
        for directive in _directives(value):
            if directive in OPT_OUTS:
                return f"X-Robots-Tag: {directive}"
    if "1" in headers.get("tdm-reservation", ()):
        return "TDM-Reservation: 1"
    return ""


def _directives(value: str) -> Iterator[str]:
    """Yield the directives that are for all robots or for us.

    The name of a robot holds for the directives after it, until the next name.
    """
    ours = True
    for part in value.lower().split(","):
        name, colon, rest = part.partition(":")
        if colon and not name.strip().startswith(("max-", "unavailable_after")):
            ours = name.strip() in (TOKEN, "*")
            part = rest
        if ours:
            yield part.strip()
