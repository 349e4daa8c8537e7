"""Heads on top of embeddings: linear layers in safetensors, such as an aesthetic predictor.

A head has one layer, `weight` of (1, width) with a `bias` or without, or several whose names begin
with rising numbers, as `layers.0.weight`. They follow each other with nothing between, as LAION's
predictors do, unless the file's metadata names an `activation`: relu or gelu.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from wdsprep.dataset.sealed_json import hex_digest
from wdsprep.encoding.models import model_files
from wdsprep.encoding.models.load_networks import explain_errors
from wdsprep.errors import NotFoundError, UsageError
from wdsprep.store import split_url
from wdsprep.text import brief, human_bytes, plural

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST_NBYTES = 64 << 20
ACTIVATIONS = ("", "relu", "gelu")
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The bytes of a head, small enough to travel to workers, and the column that it gives."""

    column: str
    place: str
    data: bytes
    digest: str


def read_head(column: str, place: str) -> Head:
    store, name = split_url(place)
    entry = next((each for each in store.list(name) if each.name == name), None)
    if entry is None:
        raise NotFoundError(f"--head {place} is not there: give a file of safetensors")
    if entry.nbytes > LARGEST_NBYTES:
        raise UsageError(
            f"--head {place} has {human_bytes(entry.nbytes)}, and a head has at most "
            f"{human_bytes(LARGEST_NBYTES)}: give a head, not a whole model"
        )
    data = store.read(name)
    return Head(column=column, place=place, data=data, digest=hex_digest(data))


def load_head(head: Head, device: "torch.device | str" = "cpu") -> "Callable[[Tensor], Tensor]":
    """Return the function of a head, which returns a number for each embedding, computed in fp32.

    It raises UsageError if embeddings are not as wide as the head takes them.
    """
    import torch
    from torch.nn import functional

    def refusal(error: BaseException) -> UsageError:
        what = f"is not a safetensors file of floats ({model_files.cause_of(error)})"
        return UsageError(f"--head {head.place} {what}")

    with explain_errors(refusal):
        entries, start, facts = model_files.read_tensor_header(BytesIO(head.data))
        tensors = {}
        for name, entry in entries.items():
            numbers = entry.numbers(head.data[start + entry.begin : start + entry.end])
            tensors[name] = torch.tensor(numbers, dtype=torch.float32)
        activation = facts.get("activation", "")
        if activation not in ACTIVATIONS:
            raise UsageError(
                f"--head {head.place} names the activation {brief(activation)}: give a head with "
                f"{' or '.join(ACTIVATIONS[1:])}, or without one"
            )
        layers = _layers(head.place, tensors)
    layers = [(weight.to(device), bias.to(device)) for weight, bias in layers]
    if (outputs := len(layers[-1][0])) != 1:
        raise UsageError(f"--head {head.place} has {outputs} outputs: give a head with one")
    width = layers[0][0].shape[1]

    def scores(embeddings: "Tensor") -> "Tensor":
        values = embeddings.float()
        if values.shape[1] != width:
            raise UsageError(
                f"--head {head.place} is for embeddings of {plural(width, 'number')}, and those of "
                f"the model have {values.shape[1]}: choose the --model that it was made for"
            )
        for number, (weight, bias) in enumerate(layers):
            if number and activation:
                values = getattr(functional, activation)(values)
            values = functional.linear(values, weight, bias)
        return values[:, 0]

    return scores


def _layers(place: str, tensors: "Mapping[str, Tensor]") -> "list[tuple[Tensor, Tensor]]":
    """Return the weight and the bias of each layer, in the order of the numbers in their names.

    A layer without a bias gets one of zeros. Raise UsageError if the layers do not fit each other
    or have values that are not finite, if there are no layers, or if a tensor belongs to none.
    """
    import torch

    left, width = dict(tensors), 0
    layers: list[tuple[Tensor, Tensor]] = []
    names = [name for name in tensors if name.endswith("weight")]
    for name in sorted(names, key=lambda name: [*map(int, NUMBER.findall(name))]):
        weight = left.pop(name)
        bias = left.pop(f"{name.removesuffix('weight')}bias", torch.zeros(weight.shape[:1]))
        fits = weight.ndim == 2 and weight.numel() and width in (0, weight.shape[1])
        if not fits or bias.shape != weight.shape[:1]:
            raise UsageError(
                f"--head {place} has {name}, which is not a linear layer that fits the one before"
            )
        if not (weight.isfinite().all() and bias.isfinite().all()):
            raise UsageError(f"--head {place} has values in {name} that are not finite")
        width = weight.shape[0]
        layers.append((weight, bias))
    if left or not layers:
        strange = min(left, default="nothing")
        raise UsageError(f"--head {place} holds {strange}: give a head of linear layers alone")
    return layers
