"""The settings that decide the bytes of a dataset: which of them differ from those of now.

What a table of URLs may be fetched from is the exception among settings: a later run may allow more
than the dataset was begun with, and never less. So the settings say what each slice was allowed at
least, and the receipt of a slice that was allowed more counts that (`ALLOWED_MORE`).
"""

import json
from collections.abc import Iterable
from typing import Any

from wdsprep.changed_settings import Changes
from wdsprep.dataset.receipts import Settings
from wdsprep.dataset.sealed_json import canonical_json

STRICT = ("opt_outs", "robots")
"""The policies that allow less where they are true."""
POLICIES = ("allow_s3", *STRICT, "max_bytes")
"""The settings that may be loosened."""
ALLOWED_MORE = "allowed_more:"


def as_json(settings: Settings) -> dict[str, Any]:
    """Return the settings as their file gives them back, with lists in place of tuples."""
    found: dict[str, Any] = json.loads(canonical_json(dict(settings)))
    return found


def is_same(old: Any, new: Any) -> bool:
    """Return whether two settings, or values of them, are the same in a file. NaN is NaN there."""
    if old == new:  # usual: a million receipts have the same
        return True
    before, now = canonical_json(old), canonical_json(new)
    return before == now or bool(json.loads(before) == json.loads(now))


def changed_settings(old: Settings, new: Settings) -> Changes:
    """Return the old and new value of each setting that differs, except loosened policies."""
    old, new = as_json(old), as_json(new)
    looser = loosened(old, new)
    both = {name: (old.get(name), new.get(name)) for name in sorted({*old, *new})}
    return {n: pair for n, pair in both.items() if n not in looser and not is_same(*pair)}


def loosened(old: Settings, new: Settings) -> tuple[str, ...]:
    """Return the policies by which the new settings allow more to be fetched than the old ones.

    There are none unless both are of a dataset from a table of URLs.
    """
    names = POLICIES if old.get("source") == new.get("source") == "urls" else ()
    return tuple(name for name in names if _laxity(name, new) > _laxity(name, old))


def allowed_more(policies: Iterable[str]) -> dict[str, int]:
    """Return the counts by which a receipt says that its slice was fetched with looser policies."""
    return {f"{ALLOWED_MORE}{name}": 1 for name in policies}


def _laxity(name: str, settings: Settings) -> int:
    value = int(settings.get(name, 0))
    return -value if name in STRICT else value
