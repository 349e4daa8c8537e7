"""Add what chance decides to a batch: noise for moments, mirror images, picked or empty captions.

Chance is a function of the step, the place in the global batch and the key. So it is the same for
any number of ranks and threads, and after a resume. Each pass over the data gets its own.
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import cache

import numpy as np
import torch

from wdsprep.dataset.file_names import IMPORTER, empty_name
from wdsprep.dataset.npy_arrays import LATENT, Field, normalise, text_fields
from wdsprep.encoding.captions.options import EMPTY, PER_SAMPLE
from wdsprep.encoding.models.base import read_tensor
from wdsprep.encoding.models.noise import noise_keys, normal
from wdsprep.errors import FormatError, NotFoundError, UsageError
from wdsprep.loading.batch_memory import Batch
from wdsprep.loading.load_plan import Captions, Empty, LoadPlan
from wdsprep.loading.sample_layout import batch_name
from wdsprep.loading.served_datasets import TEXTS, Dataset, caption_name, served_text_fields
from wdsprep.text import brief, real_number


def finish(plan: LoadPlan, batch: Batch, rows: range) -> None:
    """Make the random changes to these rows of a batch; write table columns and masks."""
    for number, here in batch.by_stream(rows):
        for table in plan.datasets[number].tables:
            for name, values in table.values_of(*batch.places[0][:, here]).items():
                if "samples" in batch.out:
                    samples = np.array(batch.out["samples"], object)[here]
                    for sample, value in zip(samples, values.tolist(), strict=True):
                        sample[name] = value
                elif name in batch.out:
                    column = batch.out[name]
                    column[here] = torch.from_numpy(values).to(column.dtype)
    if plan.options.flip:
        hit = torch.tensor(plan.pick_rows("flip", batch, rows), dtype=torch.int64)
        for name, flipped in batch.flipped.items():
            has_moments = name == batch_name(LATENT) and batch.moments is not None
            straight = batch.moments if has_moments else batch.out[name]
            straight[hit] = flipped[hit]  # type: ignore[index]
        for name, item in plan.datasets[batch.stream[0]].served.items():
            if item.role and not item.holds_latents and name in batch.out:
                batch.out[name][hit] = batch.out[name][hit].flip(-1)
    if batch.moments is not None:
        _sample(plan, batch, batch.moments, rows)
    _drop(plan, batch, rows)
    batch.mask(rows)


def _sample(plan: LoadPlan, batch: Batch, moments: torch.Tensor, rows: range) -> None:
    """Sample latents from the moments, as `encode` would have stored them."""
    span = slice(rows.start, rows.stop)
    mean, logvar = moments[span].float().chunk(2, dim=1)
    names = [f"{batch.step}:{key}" for key in batch.keys[span]]
    noise = normal(noise_keys(plan.order.seed, names), tuple(mean.shape[1:]))
    z = noise.mul_((0.5 * logvar.clamp(-30, 20)).exp_()).add_(mean)
    latent = batch.out[batch_name(LATENT)][span]
    for number in set(batch.stream[span]):
        settings = plan.datasets[number].latents.settings
        is_of_stream = torch.tensor([stream == number for stream in batch.stream[span]])
        latent[is_of_stream] = normalise(z[is_of_stream], settings).to(latent.dtype)


def _drop(plan: LoadPlan, batch: Batch, rows: range) -> None:
    for row in plan.pick_rows("drop_text", batch, rows):
        empty = plan.empty[batch.stream[row]][plan.choice_of(batch, row)] if plan.empty else {}
        for name, array in empty.items():
            batch.put(name, row, array)
        for name in TEXTS:
            if name in batch.out:
                batch.out[name][row] = ""
        facts = batch.out["json"][row] if "json" in batch.out else None
        if isinstance(facts, dict) and "caption" in facts:
            facts["caption"] = ""
            facts.pop("captions", None)


def normalise_weights(captions: Mapping[str, float]) -> Captions:
    """Return the captions with a weight above 0, sorted by name, with their shares.

    Weights of the same proportions give the same shares.
    """
    is_sound = isinstance(captions, Mapping) and all(
        isinstance(name, str) and 0 <= real_number(f"captions {name!r}:", weight) < float("inf")
        for name, weight in captions.items()
    )
    if not is_sound or (captions and not any(captions.values())):
        raise UsageError(
            f"captions {brief(captions)}: give weights by name, 0 or more and not all 0, such as "
            "{'alt': 1, 'long': 4}"
        )
    weights = {name: Fraction(float(captions[name])) for name in sorted(captions) if captions[name]}
    total = sum(weights.values())
    return tuple((name, float(weight / total)) for name, weight in weights.items())


def stored_empty_captions(plan: LoadPlan) -> tuple[tuple[Empty, ...], ...]:
    """Return the stored arrays of the empty caption, for each stream and choice of captions.

    Arrays that are made on the fly are not among them: the encoder makes those. Nor are those of
    empty captions for each sample, which are read as captions are; if there are any, they are the
    one choice of dropped texts.
    """
    read = cache(read_empty_caption)

    def find_arrays(dataset: Dataset, choice: str) -> Empty:
        arrays: Empty = {}
        if plan.drops_by_choice and choice != EMPTY:
            return arrays
        parts = dataset.with_joined
        for part, texts in zip(parts, served_text_fields(parts, choice), strict=True):
            if texts and part.images is None and caption_name(part.settings) != EMPTY:
                arrays |= read(part.whole)
        return arrays

    return tuple(
        tuple(find_arrays(dataset, choice) for choice in plan.choices) for dataset in plan.datasets
    )


def read_empty_caption(dataset: Dataset) -> Empty:
    """Read the arrays that a dataset stores for the empty caption.

    Raise NotFoundError if an array is missing, and FormatError if its shape is not that of the
    captions' arrays.
    """
    arrays = {}
    for item in text_fields(dataset.fields):
        what = empty_name(item.name)
        try:
            data = dataset.store.read(what)
        except NotFoundError as error:
            raise NotFoundError(
                f"{error}: drop_text needs the empty caption's array; the same "
                f'"{IMPORTER}" with --empty and --overwrite writes it, and for text that depends '
                "on the images of each sample, join the text dataset that "
                f'"wdsprep encode --latents none --empty {PER_SAMPLE}" makes'
            ) from None
        if (values := tensor_of(item, data)) is None:
            raise FormatError(
                f"{dataset.store.url}/{what} has another shape than the arrays of captions"
            )
        arrays[batch_name(item.name)] = values
    return arrays


def tensor_of(item: Field, data: bytes) -> torch.Tensor | None:
    """Return the array in a member's bytes, or None if it is none of this field."""
    header = item.header_of(len(data))
    if not header or not data.startswith(header):
        return None
    return read_tensor(item, data, len(header))
