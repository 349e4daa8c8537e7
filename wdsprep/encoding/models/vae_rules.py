"""The latent of each class of VAE, as its pipelines hand it to the denoiser.

A latent is stored as (patchify(z) - shift) * scale, where z is what the VAE gives. `scale` and
`shift` are one number (`AutoencoderKL`, and `AutoencoderDC`, which gives no distribution), or one
for each channel: the deviations and means that a config lists, or, where 2 x 2 places of z become
channels of one, those of a batch norm among the VAE's weights (`AutoencoderKLFlux2`). All of it is
read without torch.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wdsprep.encoding.models.weights import read_head
from wdsprep.errors import UsageError, WorkError

SCALE = 0.18215  # what AutoencoderKL takes where its config names none
FLUX2_PATCH = 2
NORM_EPSILON = 1e-4  # what AutoencoderKLFlux2 takes where its config names none
NORM_EPSILONS = {"ErnieImagePipeline": 1e-5}
"""Of pipelines that add another number to the variances than the VAE's config says."""
SHIFTLESS = ("Kandinsky5T2IPipeline", "Kandinsky5I2IPipeline")
"""Pipelines that leave out the shift of their VAE."""
OTHER_PATCHES = ("Ideogram4Pipeline",)
"""Pipelines that make channels of 2 x 2 places in an order of their own."""
VIDEO_KINDS = ("AutoencoderKLQwenImage", "AutoencoderKLWan")
"""Classes for which an image is a video of one frame."""
FOUR_FOLD = ("GlmImagePipeline",)
"""Pipelines whose sides are multiples of four times the VAE's factor."""
UNPACKED_FACTOR = 16
"""From here on a transformer takes each place of a latent for a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VaeRule:
    """What a `Model` says of its VAE."""

    kind: str
    channels: int
    factor: int
    scale: float | tuple[float, ...]
    shift: float | tuple[float, ...] = 0.0
    patch: int = 1
    is_sampled: bool = True
    upcast: bool = False

    @property
    def own_factor(self) -> int:
        """Of z, before it is patchified."""
        return self.factor // self.patch


NO_VAE = VaeRule(kind="", channels=0, factor=1, scale=1.0, is_sampled=False)
"""Where none is wanted."""


def _kl(config: Mapping[str, Any]) -> VaeRule:
    return VaeRule(
        kind="AutoencoderKL",
        channels=config.get("latent_channels", 4),
        factor=2 ** (len(config["block_out_channels"]) - 1),
        scale=config.get("scaling_factor", SCALE),
        shift=config.get("shift_factor") or 0.0,
        upcast=config.get("force_upcast") is True,
    )


def _dc(config: Mapping[str, Any]) -> VaeRule:
    return VaeRule(
        kind="AutoencoderDC",
        channels=config["latent_channels"],
        factor=2 ** (len(config["encoder_block_out_channels"]) - 1),
        scale=config.get("scaling_factor", 1.0),
        is_sampled=False,
    )


def _flux2(config: Mapping[str, Any]) -> VaeRule:
    return VaeRule(
        kind="AutoencoderKLFlux2",
        channels=config["latent_channels"] * FLUX2_PATCH**2,
        factor=2 ** (len(config["block_out_channels"]) - 1) * FLUX2_PATCH,
        scale=1.0,
        patch=FLUX2_PATCH,
    )


def _hunyuan_image(config: Mapping[str, Any]) -> VaeRule:
    return VaeRule(
        kind="AutoencoderKLHunyuanImage",
        channels=config["latent_channels"],
        factor=config["spatial_compression_ratio"],
        scale=config["scaling_factor"],
    )


def _qwen_image(config: Mapping[str, Any]) -> VaeRule:
    factor = 2 ** len(config["temperal_downsample"])
    rule = VaeRule(
        kind="AutoencoderKLQwenImage", channels=config["z_dim"], factor=factor, scale=1.0
    )
    return _by_channel(rule, config)


def _wan(config: Mapping[str, Any]) -> VaeRule:
    factor = config.get("scale_factor_spatial") or 8
    rule = VaeRule(kind="AutoencoderKLWan", channels=config["z_dim"], factor=factor, scale=1.0)
    return _by_channel(rule, config)


RULES: Mapping[str, Callable[[Mapping[str, Any]], VaeRule]] = {
    "AutoencoderKL": _kl,
    "AutoencoderDC": _dc,
    "AutoencoderKLFlux2": _flux2,
    "AutoencoderKLHunyuanImage": _hunyuan_image,
    "AutoencoderKLQwenImage": _qwen_image,
    "AutoencoderKLWan": _wan,
}


def vae_rule(what: str, config: Mapping[str, Any], pipeline: str, *, has_unet: bool) -> VaeRule:
    """What a VAE's config says of it; that of a batch norm is `normed` once its weights are here.
    A VAE alone has the `pipeline` ""."""
    kind = config.get("_class_name", "no class")
    if kind not in RULES:
        raise UsageError(
            f"the VAE of {what} is {kind}; wdsprep encodes with {', '.join(RULES)}: choose another"
        )
    if kind == "AutoencoderKLFlux2" and pipeline in OTHER_PATCHES:
        raise UsageError(
            f"{what} is {pipeline}, which lays out latents as no other: choose another"
        )
    if (taken := config.get("input_channels", config.get("in_channels", 3))) != 3:
        raise UsageError(f"the VAE of {what} takes {taken} channels, not RGB: choose another")
    is_by_channel = kind == "AutoencoderKL" and config.get("latents_mean") is not None
    if is_by_channel and not pipeline:
        raise UsageError(
            f"the VAE of {what} scales each channel (latents_mean), and how its pipeline does that "
            "stands in model_index.json: pass the whole pipeline"
        )
    try:
        rule = RULES[kind](config)
        if is_by_channel:  # where there is a UNet, by the scale as well
            rule = _by_channel(rule, config, rule.scale if has_unet else 1.0)
    except (KeyError, TypeError) as error:
        missing = error.args[0] if isinstance(error, KeyError) else f"all it should ({error})"
        raise UsageError(f"the config of the VAE of {what} names no {missing}") from None
    return replace(rule, shift=0.0) if pipeline in SHIFTLESS else rule


def _by_channel(rule: VaeRule, config: Mapping[str, Any], scale: Any = 1.0) -> VaeRule:
    """By the means and deviations that a config lists."""
    means, deviations = config["latents_mean"], config["latents_std"]
    if not len(means) == len(deviations) == rule.channels:
        raise TypeError(f"{len(means)} means of {rule.channels} channels")
    scales = tuple(scale / deviation for deviation in deviations)
    return replace(rule, scale=scales, shift=tuple(means))


def multiple_of(rule: VaeRule, pipeline: str, *, has_transformer: bool) -> int:
    """What the sides of an image have to be multiples of. A transformer makes one token of 2 x 2
    places, but where there are as few places already."""
    if pipeline in FOUR_FOLD:
        return 4 * rule.factor
    is_packed = has_transformer and rule.own_factor < UNPACKED_FACTOR
    return max(rule.factor, 2 * rule.own_factor) if is_packed else rule.factor


def normed(
    rule: VaeRule, config: Mapping[str, Any], pipeline: str, files: Sequence[Path]
) -> VaeRule:
    """With the batch norm that lies among the weights of `AutoencoderKLFlux2`."""
    if rule.kind != "AutoencoderKLFlux2":
        return rule
    epsilon = NORM_EPSILONS.get(pipeline, config.get("batch_norm_eps", NORM_EPSILON))
    means, variances = (_tensor(files, f"bn.running_{name}") for name in ("mean", "var"))
    if not len(means) == len(variances) == rule.channels:
        raise WorkError(f"{files[0].parent} has {len(means)} means of {rule.channels} channels")
    scale = tuple(1 / math.sqrt(variance + epsilon) for variance in variances)
    return replace(rule, scale=scale, shift=means)


def _tensor(files: Sequence[Path], name: str) -> tuple[float, ...]:
    """The numbers of one small tensor. Read by hand, as safetensors gives bf16 to torch alone."""
    for path in files:
        try:
            if (found := _read_tensor(path, name)) is not None:
                return found
        except (ValueError, KeyError, struct.error) as error:
            raise WorkError(f"{path} is no safetensors file ({error})") from None
    raise WorkError(f"{files[0].parent} lacks {name}, which the VAE's latents are scaled by")


def _read_tensor(path: Path, name: str) -> tuple[float, ...] | None:
    with path.open("rb") as file:
        tensors, start = read_head(file)
        if (entry := tensors.get(name)) is None:
            return None
        begin, end = entry["data_offsets"]
        file.seek(start + begin)
        return _numbers(file.read(end - begin), entry["dtype"])


def _numbers(data: bytes, dtype: str) -> tuple[float, ...]:
    if dtype == "BF16":  # the upper half of a float
        data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    letter = {"F64": "d", "F32": "f", "BF16": "f", "F16": "e"}[dtype]
    return struct.unpack(f"<{len(data) // struct.calcsize(letter)}{letter}", data)
