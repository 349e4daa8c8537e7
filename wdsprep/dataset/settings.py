"""In what a dataset was made otherwise than is asked for now, in the words of the options.

What a table of URLs may be fetched from is the exception among settings: a later run may allow more
than the dataset was begun with, and never less. So the settings say what each slice was allowed at
least, and the receipt of a slice that was allowed more counts that (`ALLOWED_MORE`).
"""

import json
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from wdsprep.dataset.names import SELECTION
from wdsprep.dataset.receipts import Settings
from wdsprep.dataset.scores import SCORES
from wdsprep.dataset.sealed_json import canonical

POLICIES = {"allow_s3": "allow-s3", "opt_outs": "ignore-opt-outs", "robots": "ignore-robots"}
"""The settings that may be loosened, besides the size of a download, with the option that does
it."""
ALLOWED_MORE = "allowed_more:"
FOLLOWS = ("layers", "layout", "patch", "scale", "shift")
"""Settings that follow from the model, the resolution and the kinds of latents and text."""
OF_TEXT = ("template", "text_arguments", "weights")
"""Settings that follow from the pipeline, or from there being text."""
NO_OPTIONS = (*FOLLOWS, "crop", "digest", "format")
SHOWN = 4  # shapes
KINDS = {
    "folder": "images",
    "tars": "tars",
    "table": "tables of images",
    "urls": "tables of URLs",
    SELECTION: "datasets to select from",
}
OF_SELECTIONS = {
    "of": "the datasets that samples are selected from are others, or have changed",
    "join": "--join has other columns, or --where asks for other ones",
    "keys": "--keys has other keys",
    "part": "another part of --split",
    "split": "--split has other parts",
}


def as_json(settings: Settings) -> dict[str, Any]:
    """Return the settings as their file gives them back, with lists in place of tuples."""
    found: dict[str, Any] = json.loads(canonical(dict(settings)))
    return found


def is_same(old: Any, new: Any) -> bool:
    """Check that two settings, or values of them, are the same in a file. NaN is NaN there."""
    if old == new:  # usual: a million receipts have the same
        return True
    before, now = canonical(old), canonical(new)
    return before == now or bool(json.loads(before) == json.loads(now))


def changed_options(old: Settings, new: Settings) -> list[str]:
    """List what differs between two settings, one option each: `--resolution 512 (was 256)`.

    A policy that was only loosened is not listed.
    """
    old, new = as_json(old), as_json(new)
    looser = loosened(old, new)
    names = [name for name in sorted({*old, *new}) if not is_same(old.get(name), new.get(name))]
    names = [name for name in names if name not in looser]
    if "source" in names and {"source"} <= old.keys() & new.keys():
        names = ["source"]  # which decides what else is a setting
    follows = {*FOLLOWS, *(OF_TEXT if {"pipeline", "text"} & {*names} else ())}
    if "text_arguments" in names:
        follows.add("template")  # which is as long as they say
    decided = [name for name in names if name not in follows]
    return [_changed(name, old.get(name), new.get(name)) for name in decided or names]


def loosened(old: Settings, new: Settings) -> tuple[str, ...]:
    """Return the policies by which the new settings allow more to be fetched than the old ones."""
    names = (*POLICIES, "max_bytes") if old.get("source") == new.get("source") == "urls" else ()
    return tuple(name for name in names if _laxity(name, new) > _laxity(name, old))


def allowed_more(policies: Iterable[str]) -> dict[str, int]:
    """Return the counts by which a receipt says that its slice was fetched with looser policies."""
    return {f"{ALLOWED_MORE}{name}": 1 for name in policies}


def _laxity(name: str, settings: Settings) -> int:
    value = int(settings.get(name, 0))
    return -value if name in ("opt_outs", "robots") else value


def _changed(name: str, before: Any, now: Any) -> str:
    if name == "weights":
        return "--model has other weights than those it was made with"
    if name == "pipeline":
        return f"--model is {_kind(now)} (was {_kind(before)})"
    if name == "template":
        return "the diffusers here puts other words around a caption, or cleans it otherwise"
    if name == "text_arguments":
        return f"--text-length or diffusers gives encode_prompt {now} (was {before})"
    if name in POLICIES:
        return f"no --{POLICIES[name]} (was given)"
    if name == "source":
        return f"the source holds {KINDS.get(now, now)} (was {KINDS.get(before, before)})"
    if name in OF_SELECTIONS:
        return OF_SELECTIONS[name]
    if name == "shapes":
        return f"--shapes are {_listed(now)} (were {_listed(before)})"
    if name == "captions":
        return _captions(before, now)
    if name == "decode":
        return f"--decode {now or 'full'} (was {before or 'full'})"
    if name == SCORES:
        return _scores(before, now)
    if name in NO_OPTIONS:
        return f"another {name}"
    option, value = f"--{name.replace('_', '-')}", _value(now)
    if isinstance(now if now is not None else before, bool):
        return f"{option} (was not given)" if now else f"no {option} (was given)"
    wanted = f"{option} {value}" if value else f"no {option}"
    return f"{wanted} (was {_value(before) or 'not given'})"


def _kind(pipeline: str | None) -> str:
    return f"a {pipeline}" if pipeline else "none whose code is run"


def _captions(before: str | None, now: str | None) -> str:
    """Say how --captions has changed. Of a digest nobody knows what it is of."""
    if not before or not now:
        return "--captions is given (was not)" if now else "no --captions (was given)"
    return "--captions says other captions than those it was made with"


def _scores(before: Any, now: Any) -> str:
    """Say what of scores is another: the columns, or what made them."""
    were, are = ((each or {}).get("columns", {}) for each in (before, now))
    if {*were} != {*are}:
        shown = (", ".join(each) or "embeddings alone" for each in (are, were))
        return "the columns are {} (were {})".format(*shown)
    if (before or {}).get("language") != (now or {}).get("language"):
        return f"--language is by {now['language']} (was by {before['language']})"
    pairs = zip((before or {}).get("models", ()), (now or {}).get("models", ()), strict=False)
    for old, new in pairs:
        if names := [n for n in sorted({*old, *new}) if old.get(n) != new.get(n)]:
            what = {"weights": "other weights", "processor": f"the processor {new['processor']}"}
            return f"--model has {what.get(names[0], f'another {names[0]}')}"
    return "other models"


def _listed(shapes: Sequence[Sequence[int]] | None) -> str:
    """Return a list of shapes in few words."""
    names = ["x".join(map(str, size)) for size in shapes or ()]
    some = names if len(names) <= SHOWN else [names[0], "...", names[-1]]
    return f"{len(names)} ({', '.join(some)})" if names else "not given"


def _value(given: Any) -> str:
    """Return a value as a command line has it; empty where the option was not given."""
    if given is None:
        return ""
    value = ",".join(map(str, given)) if isinstance(given, list | tuple) else str(given)
    return shlex.quote(value) if value else ""
