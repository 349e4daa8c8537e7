"""The settings that decide the bytes of a dataset: which of them differ from those of now.

What a table of URLs may be fetched from is the exception among settings: a later run may allow more
than the dataset was begun with, and never less. So the settings say what each slice was allowed at
least, and the receipt of a slice that was allowed more counts that (`ALLOWED_MORE`).
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from wdsprep.dataset.receipts import Settings
from wdsprep.dataset.sealed_json import canonical_json

Changes: TypeAlias = Mapping[str, tuple[Any, Any]]
"""The settings that have changed, each with its old and its new value."""
SAID = {"of": "the datasets to select from", "weights": "the weights of the model"}
"""The words for settings whose names say too little."""
DIGEST = re.compile(r"[0-9a-f]{64}")
OTHER = ": other"
MOST_SHOWN = 8
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


def say_changes(changes: Changes, between: str = ", now ") -> str:
    """Return what differs, such as `buckets: 256,512, now 512`, each setting with both values.

    Another kind of source has other settings, so it is named alone. Mappings are compared by their
    names. Digests and lists of more than texts and numbers say nothing to people: they are named
    last, without their values. Of more than MOST_SHOWN differences the first are named, and the
    others counted.
    """
    if "source" in changes:
        changes = {"source": changes["source"]}
    said = [_say_change(*change, between) for change in _flat(changes)]
    said.sort(key=lambda text: text.endswith(OTHER))
    more = len(said) - MOST_SHOWN
    return "; ".join([*said[:MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _flat(changes: Changes) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of each change, with mappings taken apart."""
    for name, (old, new) in changes.items():
        if isinstance(old, Mapping | None) and isinstance(new, Mapping | None):
            inner = changed_settings(old or {}, new or {})
            yield from _flat({f"{name}.{part}": both for part, both in inner.items()})
        else:
            yield name, old, new


def _say_change(name: str, old: Any, new: Any, between: str) -> str:
    shown = SAID.get(name, name.replace("_", "-"))
    if not (_is_plain(old) and _is_plain(new)):
        return shown + OTHER
    return f"{shown}: {_say_value(old)}{between}{_say_value(new)}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str | int | float) for item in value)
    return not isinstance(value, Mapping) and not DIGEST.fullmatch(str(value))


def _say_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return "none" if value is None else shlex.quote(text)


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
