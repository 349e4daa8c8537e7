"""Add what chance decides to a batch: noise for moments, mirror images, picked or empty captions.

Chance is a function of the step, the place in the global batch and the key. So it is the same for
any number of ranks and threads, and after a resume. Each pass over the data gets its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import torch

from wdsprep.dataset.file_names import IMPORTER, empty_name
from wdsprep.dataset.npy_arrays import LATENT, is_imported, normalise, text_fields
from wdsprep.dataset.random_numbers import Ints, Words, draw, key_of
from wdsprep.dataset.receipts import fingerprint
from wdsprep.encoding.models.base import TENSORS
from wdsprep.encoding.models.noise import noise_keys, normal
from wdsprep.errors import FormatError, NotFoundError, UsageError
from wdsprep.images.nearest_shape import Shapes
from wdsprep.limits import MAX_AREA, MAX_NBYTES
from wdsprep.loading.batch_memory import Batch
from wdsprep.loading.options import LoadOptions
from wdsprep.loading.sample_layout import batch_name
from wdsprep.loading.served_datasets import Dataset
from wdsprep.loading.wanted_arrays import TEXTS, select_rows
from wdsprep.loading.where import shorten_for_state
from wdsprep.text import brief, real_number

NAMED = 8  # joined datasets that a state lists one by one
Empty = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Effects:
    """The random changes that a loader makes to the samples of a batch, with their settings.

    `drop_text` is the rate at which captions are left out, `flip` the rate at which images are
    mirrored, `pixels` the side of a crop, and `cut` how images are cropped for the models.
    `captions` has names of text datasets, or paths in the json, each with its share; one of them
    is picked at random for each sample. `empty` has the arrays of the empty caption, by
    stream and choice.
    """

    datasets: tuple[Dataset, ...]
    seed: int
    global_batch: int
    drop_text: float = 0.0
    flip: float = 0.0
    pixels: int = 0
    cut: Shapes | None = None
    max_area: int = MAX_AREA
    max_nbytes: int = MAX_NBYTES
    captions: tuple[tuple[str, float], ...] = ()
    empty: tuple[tuple[Empty, ...], ...] = field(default=())

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings that a saved state must agree with, among them how latents were made."""
        made = [fingerprint(d.settings) for d in self.datasets if d.kind == "latents"]
        latents = {"latents": f"{key_of(*made):016x}"} if made else {}
        area = {"max_area": self.max_area} if self.max_area != MAX_AREA else {}  # of pixels alone
        flip = {"flip": self.flip} if self.flip else {}
        shown = ", ".join(f"{name} {share!r}" for name, share in self.captions)
        picked = {"captions": shorten_for_state(shown)} if shown else {}
        usual = {"drop_text": self.drop_text, "pixels": self.pixels}
        conditions = [*{dataset.whole: dataset.where for dataset in self.datasets}.values()]
        several = f"several, together {key_of(*conditions):016x}"
        condition = conditions[0] if len({*conditions}) == 1 else several
        where = {"where": condition} if condition else {}
        return usual | flip | latents | area | where | picked | self._joined_digests

    @property
    def joined(self) -> "dict[str, Dataset]":
        """The joined datasets, by the names under which a saved state lists them."""
        each = dict.fromkeys(part.whole for d in self.datasets for part in d.with_joined[1:])
        return {f"joined {number}": part for number, part in enumerate(each)}

    @property
    def _joined_digests(self) -> dict[str, str]:
        lines = {
            name: f"{key_of(fingerprint(d.settings), d.digest):016x}, {d.samples:,} samples"
            for name, d in self.joined.items()
        }
        tables = dict.fromkeys(table for d in self.datasets for table in d.tables)
        for number, table in enumerate(tables):
            lines[f"table {number}"] = table.digest[:16]
        if len(lines) > NAMED:
            return {"joined": f"{len(lines)}, together {key_of(*lines.values()):016x}"}
        return lines

    @cached_property
    def choices(self) -> tuple[str, ...]:
        """The names of the text datasets from which one is picked for each sample.

        They are ("",) if no captions are picked, or if they are picked by `paths`.
        """
        names = tuple(name for name, _ in self.captions)
        return names if names and self._has_arrays else ("",)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths in the json to the captions from which one is picked for each sample.

        They are () if datasets have arrays of text: then arrays are picked, by `choices`.
        """
        return () if self._has_arrays else tuple(name for name, _ in self.captions)

    @property
    def _has_arrays(self) -> bool:
        return any(text_fields(dataset.served) for dataset in self.datasets)

    def pick_captions(self, step: int, first: int, count: int) -> Ints:
        """Return the number of the caption that is picked at random for each row.

        The rows begin at place `first` of the global batch.
        """
        places = np.arange(count) + (step * self.global_batch + first)
        chance = draw(key_of("captions", self.seed), places)
        return np.searchsorted(self._bounds, chance, side="right")

    @cached_property
    def _bounds(self) -> Words:
        """The 64-bit numbers at which one caption's share ends and the next begins."""
        ends = np.cumsum([weight for _, weight in self.captions]).tolist()
        words = [min(int(end / ends[-1] * 2.0**64), 2**64 - 1) for end in ends[:-1]]
        return np.array(words, np.uint64)

    def finish(self, batch: Batch, rows: range) -> None:
        """Make the random changes to these rows of a batch; write table columns and masks."""
        self._put_columns(batch, rows)
        if batch.flipped is not None:
            self._flip(batch, batch.flipped, rows)
        if batch.moments is not None:
            self._sample(batch, batch.moments, rows)
        if self.drop_text:
            self._drop(batch, rows)
        batch.mask(rows)

    def _put_columns(self, batch: Batch, rows: range) -> None:
        """Write the values that joined tables have for these rows into the batch."""
        for number in {*batch.stream[rows.start : rows.stop]}:
            if not (tables := self.datasets[number].tables):
                continue
            some = batch.stream[rows.start : rows.stop]
            is_all = some.count(number) == len(some)
            own = rows if is_all else [row for row in rows if batch.stream[row] == number]
            where = slice(rows.start, rows.stop) if is_all else own  # tensors are slow with lists
            shards, indices = (select_rows(column, own) for column in (batch.shard, batch.index))
            for table in tables:
                for name, values in table.values_of(np.array(shards), np.array(indices)).items():
                    if "samples" in batch.out:
                        for row, value in zip(own, values.tolist(), strict=True):
                            batch.out["samples"][row][name] = value
                    elif name in batch.out:
                        into = batch.out[name]
                        into[where] = torch.from_numpy(values)

    def _flip(self, batch: Batch, flipped: torch.Tensor, rows: range) -> None:
        latent = batch.out[batch_name(LATENT)] if batch.moments is None else batch.moments
        hit = torch.tensor(self.mirrored_rows(batch, rows), dtype=torch.int64)
        latent[hit] = flipped[hit]

    def _sample(self, batch: Batch, moments: torch.Tensor, rows: range) -> None:
        """Sample latents from the moments, as `encode` would have stored them."""
        some = slice(rows.start, rows.stop)
        mean, logvar = moments[some].float().chunk(2, dim=1)
        names = [f"{batch.step}:{key}" for key in batch.keys[some]]
        noise = normal(noise_keys(self.seed, names), tuple(mean.shape[1:]))
        z = noise.mul_((0.5 * logvar.clamp(-30, 20)).exp_()).add_(mean)
        latent = batch.out[batch_name(LATENT)][some]
        for number in set(batch.stream[some]):
            settings = self.datasets[number].latents.settings
            own = torch.tensor([stream == number for stream in batch.stream[some]])
            latent[own] = normalise(z[own], settings).to(latent.dtype)

    def _drop(self, batch: Batch, rows: range) -> None:
        for row in self._pick_rows("drop_text", self.drop_text, batch, rows):
            choice = batch.choice[row] if len(self.choices) > 1 else 0
            empty = self.empty[batch.stream[row]][choice] if self.empty else {}
            for name, array in empty.items():
                batch.put(name, row, array[None])
            for name in TEXTS:
                if name in batch.out:
                    batch.out[name][row] = ""
            facts = batch.out["json"][row] if "json" in batch.out else None
            if isinstance(facts, dict) and "caption" in facts:
                facts["caption"] = ""
                facts.pop("captions", None)

    def mirrored_rows(self, batch: Batch, rows: range) -> Sequence[int]:
        return self._pick_rows("flip", self.flip, batch, rows) if self.flip else ()

    def _pick_rows(self, what: str, rate: float, batch: Batch, rows: range) -> Sequence[int]:
        """Return the rows that are picked at random at this rate.

        `what` names the change that they are picked for: each change picks rows of its own.
        """
        if rate == 1:  # no number is beyond the last one that may be drawn
            return rows
        first = batch.step * self.global_batch + batch.first
        chance = draw(key_of(what, self.seed), np.arange(rows.start, rows.stop) + first)
        hit: list[int] = np.flatnonzero(chance < np.uint64(rate * 2.0**64)).tolist()
        return [rows.start + number for number in hit]


def make_effects(datasets: tuple[Dataset, ...], options: LoadOptions) -> Effects:
    """Return the random changes for batches of these datasets.

    If captions are dropped, the stored arrays of the empty caption are read. Raise UsageError if
    `captions` has wrong weights.
    """
    effects = Effects(
        datasets=datasets,
        seed=options.seed,
        global_batch=options.global_batch,
        drop_text=float(options.drop_text),
        flip=float(options.flip),
        pixels=options.pixels,
        max_area=options.max_area,
        captions=_normalise_weights({} if options.captions is None else options.captions),
    )
    return replace(effects, empty=_stored_empty_captions(effects)) if options.drop_text else effects


def _normalise_weights(captions: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Return the captions with a weight above 0, sorted by name, with their shares.

    Weights of the same proportions give the same shares.
    """
    if not isinstance(captions, Mapping):
        raise UsageError(
            f"captions {brief(captions)}: give weights by name, as {{'alt': 1, 'long': 4}}"
        )
    for name, weight in captions.items():
        if not isinstance(name, str):
            raise UsageError(
                f"captions {name!r}: give names as texts, as in {{'alt': 1, 'long': 4}}"
            )
        if not 0 <= real_number(f"the weight of captions {name!r}", weight) < float("inf"):
            raise UsageError(f"the weight of captions {name!r} is {weight}: give 0 or more")
    weights = {name: Fraction(float(captions[name])) for name in sorted(captions) if captions[name]}
    if captions and not weights:
        raise UsageError("all weights of captions are 0: give at least one above 0")
    total = sum(weights.values())
    return tuple((name, float(weight / total)) for name, weight in weights.items())


def _stored_empty_captions(effects: Effects) -> tuple[tuple[Empty, ...], ...]:
    """Return the stored arrays of the empty caption, for each stream and choice of captions.

    Arrays that are made on the fly are not among them: the encoder makes those.
    """
    known: dict[Dataset, Empty] = {}

    def find_arrays(dataset: Dataset, choice: str) -> Empty:
        found: Empty = {}
        for name, slot in dataset.array_sources(choice)[0].items():
            part = dataset.with_joined[slot].whole
            if slot or not dataset.images:
                if part not in known:
                    known[part] = read_empty_caption(part)
                found |= {name: known[part][name]} if name in known[part] else {}
        return found

    return tuple(
        tuple(find_arrays(d, choice) for choice in effects.choices) for d in effects.datasets
    )


def read_empty_caption(dataset: Dataset) -> Empty:
    """Read the arrays that a dataset stores for the empty caption.

    Raise NotFoundError if an array is missing, and FormatError if its shape is not that of the
    captions' arrays.
    """
    found = {}
    for item in text_fields(dataset.fields):
        what = empty_name(item.name)
        try:
            data = dataset.store.read(what)
        except NotFoundError as error:
            need = "drop_text needs the empty caption's array"
            if is_imported(dataset.settings):
                need += f': the same "{IMPORTER}" with --empty and --overwrite writes it'
            raise NotFoundError(f"{error}: {need}") from None
        header = item.header_of(len(data))
        if not header or not data.startswith(header):
            raise FormatError(
                f"{dataset.store.url}/{what} has another shape than the arrays of captions"
            )
        values = torch.frombuffer(bytearray(data), dtype=TENSORS[item.dtype], offset=len(header))
        found[batch_name(item.name)] = values.view(-1, *item.shape[1:])
    return found
