"""Shards as AMD's Primus reads them: Energon tars of tensors that `torch.save` wrote, in bfloat16.

Primus needs latents, a prompt embedding and a pooled embedding, as Flux has them. If the moments of
latents were kept, it gets `mean` and `logvar` instead, and samples the latents itself. It stacks
arrays into batches, so an embedding of variable length is padded with zeros.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.npy_arrays import EMB, LATENT, POOLED, field_of
from wdsprep.errors import UsageError
from wdsprep.exporting.energon import metadata_files
from wdsprep.exporting.layout import (
    Exportable,
    ExportSample,
    Layout,
    Members,
    Writing,
    bfloat16_bits,
    pad_to,
    write_tar,
)
from wdsprep.exporting.output import ExportedFile, Output

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEXTS = {EMB: "prompt_embeds.pth", POOLED: "pooled_prompt_embeds.pth"}


def layout(*, tower: str) -> "PrimusLayout":
    del tower
    return PrimusLayout()


@dataclass(frozen=True, kw_only=True)
class PrimusLayout:
    """The layout of tars for AMD's Primus: Energon tars of tensors in bfloat16."""

    has_moments: bool = False
    length: int = 0
    """The length of the prompt embedding."""
    heads: bool = False
    arrays: tuple[str, ...] = (LATENT, EMB, POOLED)

    def check(self, dataset: Exportable) -> Layout:
        dataset.check("primus", "latents")
        dataset.check_arrays("primus", self.arrays)
        if dataset.has_shapes:
            raise UsageError(
                f"{dataset.url} has latents of several shapes, and Primus stacks samples into "
                "batches whatever their shape: encode without --shapes"
            )
        emb = dataset.field(EMB)
        return replace(
            self, has_moments=dataset.has_moments, length=emb.shape[0] if emb is not None else 0
        )

    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        return write_tar(out, unit, samples, self.members, indexed=True)

    def members(self, sample: ExportSample) -> Members:
        found = {"latents": bits_of(sample, LATENT)}
        if self.has_moments:
            mean, logvar = found["latents"].reshape(2, -1, *found["latents"].shape[1:])
            found = {"mean": mean, "logvar": logvar}
        saved = [(f"{name}.pth", save_tensor(array)) for name, array in found.items()]
        emb = pad_to(bits_of(sample, EMB), self.length)
        saved.append((TEXTS[EMB], save_tensor(emb)))
        saved.append((TEXTS[POOLED], save_tensor(bits_of(sample, POOLED))))
        return [*saved, ("caption.txt", sample.caption.encode())]

    def index(self, files: Sequence[ExportedFile]) -> Mapping[str, bytes]:
        tars = {file.name: file.samples for file in files if file.samples}
        return metadata_files(tars, {"encoding": "preencoded"})


def bits_of(sample: ExportSample, name: str) -> "NDArray[Any]":
    """Return an array of a sample as bfloat16, whose bits are in unsigned integers."""
    data = sample.members[name]
    return bfloat16_bits(field_of(name, data), data)


def save_tensor(bits: "NDArray[Any]") -> bytes:
    """Return the file that torch.save writes of a bfloat16 tensor."""
    import torch

    out = io.BytesIO()
    torch.save(torch.from_numpy(bits.copy()).view(torch.bfloat16), out)
    return out.getvalue()
