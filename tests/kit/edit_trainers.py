"""What two trainers of edits read of their caches on a disk.

Neither is in a package index, so this is written from their code: of musubi-tuner (June 2026,
commit 30c658c) `ImageDataset.prepare_for_training` and `BucketBatchManager`, of NeMo Automodel
(August 2026, commit 36044ad) `ImageEditDataset` and the function that makes batches of its samples.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

TYPES = ("float16", "bfloat16", "float32")
STEP = 16
Batch = dict[str, Any]


def musubi_batches(root: Path, architecture: str) -> Iterator[tuple[list[str], Batch]]:
    """Yield the keys and the tensors of a batch for each bucket, as a run in `root` has them."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    config = tomllib.loads((root / "dataset.toml").read_text())
    general = config["general"]
    assert (general["enable_bucket"], general["bucket_no_upscale"]) == (True, True)
    for dataset in config["datasets"]:
        folder = root / dataset["cache_directory"]
        assert dataset["num_repeats"] == int(dataset["cache_directory"].partition("_")[0])
        assert (root / dataset["image_directory"]).is_dir()
        buckets: dict[Any, list[tuple[str, dict[str, Any]]]] = {}
        for path in sorted(folder.glob(f"*_{architecture}.safetensors")):
            *words, size, _ = path.name.split("_")
            key = "_".join(words)
            width, height = map(int, size.split("x"))
            assert width * height <= math.prod(general["resolution"]), "falls into another bucket"
            text = load_file(folder / f"{key}_{architecture}_te.safetensors")
            latents = load_file(path)
            controls = sorted(n for n in latents if n.startswith("latents_control_"))
            bucket = width - width % STEP, height - height % STEP, *controls
            buckets.setdefault(bucket, []).append((key, latents | text))
        for samples in buckets.values():
            yield [key for key, _ in samples], _stacked([tensors for _, tensors in samples])


def _stacked(samples: list[dict[str, Any]]) -> Batch:
    batch: dict[str, list[Any]] = {}
    for tensors in samples:
        for name, tensor in tensors.items():
            known = name.removeprefix("varlen_")
            if not known.endswith("_mask"):
                (kind,) = (kind for kind in TYPES if known.endswith(f"_{kind}"))
                assert kind in str(tensor.dtype)
                known = known.removesuffix(f"_{kind}")
                if known.startswith("latents_"):
                    known = known.rpartition("_")[0]
            batch.setdefault(known, []).append(tensor)
    varied = {name[len("varlen_") :].rpartition("_")[0] for name in samples[0] if "varlen" in name}
    return {name: t if name in varied else torch.stack(t) for name, t in batch.items()}


def automodel_batches(root: Path) -> Iterator[tuple[list[str], Batch]]:
    """Yield the keys and the tensors of a batch for each shape of a target and its references."""
    buckets: dict[str, list[dict[str, Any]]] = {}
    for shard in json.loads((root / "metadata.json").read_text())["shards"]:
        for row in json.loads((root / shard).read_text()):
            sample = torch.load(root / row["cache_file"], weights_only=True)
            shapes = _signature(sample)
            assert row["compound_bucket_signature"] == shapes
            _check(sample, shapes)
            buckets.setdefault(json.dumps(shapes), []).append(sample)
    for samples in buckets.values():
        length = max(len(sample["prompt_embeddings"]) for sample in samples)
        pad = torch.nn.functional.pad
        columns = zip(*(sample["context_latents"] for sample in samples), strict=True)
        yield (
            [sample["metadata"]["original_ids"]["key"] for sample in samples],
            {
                "image_latents": torch.stack([sample["target_latent"] for sample in samples]),
                "context_latents": [torch.stack(column) for column in columns],
                "text_embeddings": [
                    pad(s["prompt_embeddings"], (0, 0, 0, length - len(s["prompt_embeddings"])))
                    for s in samples
                ],
                "lengths": [int(sample["prompt_attention_mask"].sum()) for sample in samples],
            },
        )


def _signature(sample: dict[str, Any]) -> dict[str, Any]:
    contexts = sample["context_latents"]
    assert isinstance(contexts, list)
    assert contexts
    for latent in (sample["target_latent"], *contexts):
        assert latent.ndim == 3
        assert latent.is_floating_point()
    return {
        "target": list(sample["target_latent"].shape),
        "contexts": [list(latent.shape) for latent in contexts],
    }


def _check(sample: dict[str, Any], shapes: dict[str, Any]) -> None:
    """What its dataset raises ValueError for."""
    facts, text, mask = (
        sample[n] for n in ("metadata", "prompt_embeddings", "prompt_attention_mask")
    )
    assert text.ndim == 2
    assert mask.shape == text.shape[:1]
    assert not mask.is_floating_point()
    assert facts["original_ids"]
    assert facts["compound_bucket_signature"] == shapes
    assert facts["target_spatial_shape"] == shapes["target"][1:]
    assert facts["context_spatial_shapes"] == [shape[1:] for shape in shapes["contexts"]]
    assert len(facts["context_token_lengths"]) == len(shapes["contexts"])
    assert facts["text_token_length"] <= len(text)
    assert facts["conditioning_shapes"].keys() == sample["conditioning_tensors"].keys() == set()
