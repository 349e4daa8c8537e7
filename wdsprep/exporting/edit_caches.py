"""Caches of trainers of edits: files for each sample, as these trainers make them themselves.

A sample is the latent of its target, those of its reference images, and the embedding of its
caption. Masks and pixels have no place there. Written after the code of musubi-tuner of June 2026
(commit 30c658c) and of NeMo Automodel of August 2026 (commit 36044ad).
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from numpy.typing import NDArray

from wdsprep.dataset.npy_arrays import EMB, LATENT, MASK
from wdsprep.dataset.sealed_json import canonical_json
from wdsprep.dataset.shapes import shapes_of
from wdsprep.errors import UsageError
from wdsprep.exporting.folders import folder_of, stem_of
from wdsprep.exporting.layout import (
    Exportable,
    ExportedFile,
    ExportSample,
    Layout,
    Output,
    Writing,
    dtype_name,
    json_line,
    save_by_torch,
    to_tensor,
)
from wdsprep.importing.column_names import CONTROL, FAMILIES, SAFETENSORS
from wdsprep.text import plural

Array = NDArray[Any]


def latents_in(sample: ExportSample, roles: Sequence[str]) -> list[Array]:
    """Return the latent of a sample, then those of its references."""
    return [sample.stored(name) for name in (LATENT, *sample.arrays_in(roles))]


def text_length(sample: ExportSample) -> int:
    """Return how many rows of a sample's embedding its mask counts; all if it has no mask."""
    if MASK in sample.members:
        return int(sample.stored(MASK).astype(bool).sum())
    return len(sample.stored(EMB))


def wrong_references(sample: ExportSample, count: int, needed: str) -> UsageError:
    return UsageError(
        f"{sample.key} has {plural(count, 'reference')}, and {needed}: choose samples that have "
        "one with select --where"
    )


# --- musubi-tuner
BY_PIPELINE = {pipeline: family for family in FAMILIES for pipeline in family.pipelines}
KLEIN_9B = next(family for family in FAMILIES if family.short == "f2k9b")
KLEIN_9B_WIDTH = 12288


class MusubiLayout(Layout):
    """The layout of folders with the caches of musubi-tuner: of latents and of text.

    A name such as `000000000007_0832x1216_qie.safetensors` says the size of an image, by which
    musubi-tuner sorts it into a bucket. `dataset.toml` lists the folders, and turns these buckets
    on, so that all latents of a batch have one shape.
    """

    takes, needs = ("latents",), (LATENT,)

    def __init__(self, dataset: Exportable) -> None:
        super().__init__(dataset)
        family = dataset.check_latents("musubi-tuner", BY_PIPELINE)
        texts = tuple(f"{role}.npy" for role in family.texts)
        dataset.check_arrays(texts)
        if "klein" in family.name and dataset.fields[EMB].shape[-1] == KLEIN_9B_WIDTH:
            family = KLEIN_9B
        self.family, self.arrays = family, (LATENT, MASK, *texts)
        self.roles = dataset.references if family.reference else ()
        if family.reference == CONTROL and len(self.roles) != 1:
            raise UsageError(
                f"{dataset.url} has {len(self.roles)} roles of references, and musubi-tuner takes "
                f"one for {family.name}: encode with --roles target,source"
            )
        square = int(dataset.settings["resolution"])
        sizes = shapes_of(dataset.settings) or [(square, square)]
        self.largest = max(sizes, key=prod)
        """The size of an image with the largest area."""

    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        family = self.family
        for sample in samples:
            (first, *references) = latents_in(sample, self.roles)
            if self.roles and "{}" not in family.reference and len(references) != 1:
                needed = f"musubi-tuner takes one for {family.name}"
                raise wrong_references(sample, len(references), needed)
            named = [("latents", first)]
            named += [(family.reference.format(n), array) for n, array in enumerate(references)]
            latents: dict[str, Array] = {}
            for name, array in named:
                _, high, wide = array.shape
                full = f"{name}_{family.frames}{high}x{wide}_{dtype_name(array)}"
                latents[full] = array[:, None] if family.has_axis else array
            texts: dict[str, Array] = {}
            for role, name in family.texts.items():
                array = sample.stored(f"{role}.npy")
                if name.startswith("varlen"):
                    array = array[: text_length(sample)]
                texts[f"{name}_{dtype_name(array)}"] = array
            width, height = sample.cut_size
            path = f"{folder_of(unit, sample)}/{stem_of(sample)}"
            facts = {"architecture": family.name, "format_version": "1.0.1"}
            size = {"height": str(height), "width": str(width)}
            name = f"{path}_{width:04d}x{height:04d}_{family.short}.safetensors"
            out.write(name, to_safetensors(latents, facts | size), samples=1)
            text = to_safetensors(texts, facts | {"caption1": sample.caption})
            out.write(f"{path}_{family.short}_te.safetensors", text)
            yield

    def index(self, files: Sequence[ExportedFile]) -> Mapping[str, bytes]:
        folders = sorted({file.name.partition("/")[0] for file in files})
        width, height = self.largest
        lines = [
            "# Start musubi-tuner in this folder: the paths below are relative.",
            "[general]",
            f"resolution = [{width}, {height}]",
            "enable_bucket = true",
            "bucket_no_upscale = true",
        ]
        for folder in folders:
            lines += ["", "[[datasets]]", f'image_directory = "{folder}"']
            lines += [f'cache_directory = "{folder}"', f"num_repeats = {folder.partition('_')[0]}"]
        return {"dataset.toml": "\n".join([*lines, ""]).encode()}


def to_safetensors(tensors: Mapping[str, Array], facts: Mapping[str, str]) -> bytes:
    """Return the bytes of a safetensors file. Large numbers come first, so that all are aligned.

    The writer of safetensors 0.8 puts facts in another order in each process, so a file that is
    written again would differ.
    """
    header: dict[str, Any] = {"__metadata__": dict(facts)}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    end = 0
    for name, array in ordered:
        start, end = end, end + array.nbytes
        stored = SAFETENSORS[dtype_name(array)]
        header[name] = {"data_offsets": [start, end], "dtype": stored, "shape": list(array.shape)}
    text = canonical_json(header)
    text += b" " * (-len(text) % 8)
    parts = (array.tobytes() for _, array in ordered)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


# --- NeMo Automodel
class AutomodelLayout(Layout):
    """The layout of the cache that NeMo Automodel's `ImageEditDataset` reads.

    A sample is a file of `torch.save` with its tensors, their shapes and counts of tokens, of which
    four cells of a latent make one. Each tar has a JSON beside them with the shapes of its samples,
    by which Automodel makes batches, and `metadata.json` lists these.
    """

    takes, needs, takes_moments = ("latents",), (LATENT, EMB), False

    def __init__(self, dataset: Exportable) -> None:
        super().__init__(dataset)
        if not dataset.references:
            raise UsageError(
                f"{dataset.url} has no references, and --to automodel takes edits: encode with "
                "--roles target,source, or --join the references"
            )
        self.arrays, self.roles = (LATENT, EMB, MASK), dataset.references

    def write(self, out: Output, unit: str, samples: Iterator[ExportSample]) -> Writing:
        import torch

        rows: list[dict[str, Any]] = []
        for sample in samples:
            latents = latents_in(sample, self.roles)
            if len(latents) < 2:
                raise wrong_references(sample, 0, "Automodel needs one for each sample")
            target, *contexts, emb = map(to_tensor, (*latents, sample.stored(EMB)))
            length = text_length(sample)
            mask = torch.zeros(len(emb), dtype=torch.long)
            mask[:length] = 1
            shapes = [list(array.shape) for array in latents]
            tokens = [(high // 2) * (wide // 2) for _, high, wide in shapes]
            indexed = {
                "compound_bucket_signature": {"target": shapes[0], "contexts": shapes[1:]},
                "context_token_lengths": tokens[1:],
                "target_token_length": tokens[0],
                "text_token_length": length,
            }
            facts = {
                "conditioning_shapes": {},
                "context_spatial_shapes": [shape[1:] for shape in shapes[1:]],
                "original_ids": {"key": sample.key},
                "prompt": sample.caption,
                "target_spatial_shape": shapes[0][1:],
            }
            saved = {
                "target_latent": target,
                "context_latents": contexts,
                "prompt_embeddings": emb,
                "prompt_attention_mask": mask,
                "conditioning_tensors": {},
                "metadata": dict(sorted({**facts, **indexed}.items())),
            }
            name = f"{unit}/{stem_of(sample)}.pt"
            out.write(name, save_by_torch(saved), samples=1)
            rows.append({"cache_file": name, **indexed})
            yield
        out.write(f"{unit}.json", json_line(rows))

    def index(self, files: Sequence[ExportedFile]) -> Mapping[str, bytes]:
        shards = [file.name for file in files if file.name.endswith(".json")]
        return {"metadata.json": json_line({"shards": shards})}
