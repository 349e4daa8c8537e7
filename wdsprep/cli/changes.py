"""What `wdsprep remove` says on the way and at the end."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from wdsprep.changes.remove import Removal, RemovalPlace
from wdsprep.cli.output import Kept, Show, echo
from wdsprep.runners.job import JobListener
from wdsprep.store.places import place_scheme
from wdsprep.text import examples, human_bytes, plural, printed


class RemoveShow(Show[Removal]):
    """The output of `remove`.

    It says what would go out of which dataset, asks where somebody can answer, and says what
    was done.
    """

    unit = "unit"

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(as_json=as_json, waits=False)
        self.listener = JobListener(
            told=self.told,
            listed=self._searched,
            begun=self._planned,
            asked=self.asked,
            changed=self.changed,
        )

    def _searched(self, place: str, done: int, of: int) -> None:
        self.line.show(f"{place}: looks for them in {self.unit} {done + 1:,} of {of:,}")

    def _planned(self, removal: Removal) -> None:
        """Print what would go. With --json it is part of the result at the end."""
        self.line.clear()
        if not self.as_json:
            echo(printed(_found(removal)))

    def facts(self, removal: Removal) -> Iterator[dict[str, Any]]:
        yield asdict(removal)

    def summary(self, removal: Removal) -> Iterator[str]:
        return _outcome(removal)


def _found(removal: Removal) -> Iterator[str]:
    for place in removal.places:
        yield f"{place.shown}: {_place(place)}"
    if removal.known:
        yield f"{plural(removal.known, 'key')} removed before"
    if removal.nowhere:
        yield f"{plural(removal.nowhere, 'key')} in none of these ({examples(removal.examples)})"
    if removal.unmatched:
        yield f"{plural(removal.unmatched, 'line')} of the lists that no image here has"


def _place(place: RemovalPlace) -> str:
    parts = []
    if place.samples or place.rejects:
        parts.append(plural(place.samples, "sample"))
        parts += [f"what can be read of {plural(place.rejects, 'reject')}"] * bool(place.rejects)
        of = f"{place.shards:,} of {plural(place.shards_of, 'shard')}"
        parts.append(f"{human_bytes(place.nbytes)} in {of} to write again")
    elif place.shards:
        parts.append(f"none of the samples, but {plural(place.shards, 'receipt')} to write again")
    else:
        parts.append("none of the samples")
    parts += ["more to keep away"] if place.is_listed else []
    return ", ".join(parts)


def _outcome(removal: Removal) -> Iterator[str]:
    if not removal.is_needed:
        yield from _found(removal)
        if removal.is_unknown:
            yield Kept("nothing was removed: none of these datasets has these keys")
        else:
            has_ended = "the removal that was begun has ended"
            yield "nothing to remove" if not removal.ended else has_ended
        return
    if not removal.done:
        yield Kept("nothing was done: --yes does it, or run the same at a terminal")
        return
    samples = sum(place.samples for place in removal.places)
    yield f"removed: {plural(samples, 'sample')}; what is packed later leaves them out"
    kinds = {place.dataset for place in removal.places}
    if "latents" not in kinds:
        yield (
            "latents made of these images still have them: remove the same keys from each, then "
            "encode with --redo-changed"
        )
    yield from _beyond(removal)


def _beyond(removal: Removal) -> Iterator[str]:
    """Yield where removed bytes may still be, beyond the reach of this command."""
    schemes = {place_scheme(place.shown) for place in removal.places} - {""}
    if schemes - {"hf"}:
        yield Kept(
            "where the bucket keeps versions or what is deleted, it has the old objects still: "
            "delete their noncurrent versions there"
        )
    if "hf" in schemes:
        yield Kept(
            "the repository has the old files in its history still: squash that "
            "(super_squash_history of huggingface_hub), then delete its old LFS files on the hub"
        )
    if schemes:
        yield "delete the cache folders of loaders that have read from it, on their machines"
