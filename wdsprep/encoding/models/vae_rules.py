"""The rules by which each class of VAE makes the latents that its denoiser takes.

A latent is stored as (patchify(z) - shift) * scale, where z is what the VAE gives. `scale` and
`shift` are one number (`AutoencoderKL`, and `AutoencoderDC`, which gives no distribution), or one
for each channel: the deviations and means that a config lists, or, where 2 x 2 places of z become
channels of one, those of a batch norm among the VAE's weights (`AutoencoderKLFlux2`). All of it is
read without torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from wdsprep.encoding.models.config_files import MOST_BLOCKS, Config, unsuitable
from wdsprep.encoding.models.model_files import read_tensor_header
from wdsprep.errors import UsageError, WorkError
from wdsprep.text import brief, shortened

SCALE = 0.18215  # what AutoencoderKL takes where its config names none
FLUX2_PATCH = 2
NORM_EPSILON = 1e-4  # what AutoencoderKLFlux2 takes where its config names none
NORM_NBYTES = 1 << 16
MOST_CHANNELS = 1 << 12
MOST_FACTOR = 1 << 8
NORM_EPSILONS = {"ErnieImagePipeline": 1e-5}
"""Pipelines that add another number to the variances than the VAE's config says."""
SHIFTLESS = ("Kandinsky5T2IPipeline", "Kandinsky5I2IPipeline")
"""Pipelines that leave out the shift of their VAE."""
OTHER_PATCHES = ("Ideogram4Pipeline",)
"""Pipelines that order the channels of 2 x 2 places in another way."""
VIDEO_KINDS = ("AutoencoderKLQwenImage", "AutoencoderKLQwenImage21", "AutoencoderKLWan")
"""Classes for which an image is a video of one frame."""
KINDS = (
    *("AutoencoderKL", "AutoencoderDC", "AutoencoderKLFlux2", "AutoencoderKLHunyuanImage"),
    *VIDEO_KINDS,
)
"""The classes whose rules are known."""
WITH_ALPHA = ("AutoencoderKLQwenImage21",)
"""Classes for which an image has a fourth channel, its opacity."""
FOLDS = {"GlmImagePipeline": 4, "QwenImage21Pipeline": 2}
"""Pipelines whose sides are multiples of the VAE's factor times a number."""
UNPACKED_FACTOR = 16
"""From this factor on a transformer makes a token of each place of a latent."""


@dataclass(frozen=True, kw_only=True)
class VaeRule:
    """The facts about a VAE that decide its latents, as its class and config tell.

    A latent is stored as (patchify(z) - shift) * scale, where z is what the VAE gives: one number
    for all channels, or one for each stored channel.
    """

    vae_kind: str
    """the class; empty if no VAE is wanted, so that the fields after this have no meaning"""
    channels: int
    """the channels of a latent as it is stored"""
    factor: int
    """how many pixels of a side become one of a stored latent's"""
    scale: float | tuple[float, ...] = 1.0
    shift: float | tuple[float, ...] = 0.0
    patch: int = 1
    """the side of the squares of z that become channels of one place; 1 leaves z as it is"""
    is_sampled: bool = True
    """whether the VAE gives a distribution, and not the latent itself"""
    fits_fp16: bool = False
    """whether the VAE is an AutoencoderKL whose config does not warn that fp16 overflows"""
    multiple: int = 1
    """what the sides of an image have to be a multiple of"""

    @property
    def own_factor(self) -> int:
        """Return how many pixels of a side become one of the VAE's output, before patchifying."""
        return self.factor // self.patch

    @property
    def latent_settings(self) -> dict[str, Any]:
        """Return the settings by which the output of the VAE becomes the stored latent."""
        numbers = {"scale": self.scale, "shift": self.shift}
        lists = {name: [*n] if isinstance(n, tuple) else n for name, n in numbers.items()}
        return ({"patch": self.patch} if self.patch > 1 else {}) | lists


Rule = TypeVar("Rule", bound=VaeRule)
NO_VAE = VaeRule(vae_kind="", channels=0, factor=1, is_sampled=False)
"""The rule if no VAE is wanted."""


def _read_rule(kind: str, config: Config) -> VaeRule:
    """Return what a VAE's config tells of the rule of its class, one of `KINDS`."""
    usual = 4 if kind == "AutoencoderKL" else None
    name = "z_dim" if kind in VIDEO_KINDS else "latent_channels"
    channels = config.whole(name, usual, most=MOST_CHANNELS)
    facts: dict[str, Any] = {}
    match kind:
        case "AutoencoderKLHunyuanImage":
            factor = config.whole("spatial_compression_ratio", most=MOST_FACTOR)
            facts = {"scale": config.real("scaling_factor", above=0)}
        case "AutoencoderKLQwenImage":
            factor = 2 ** len(config.list("temperal_downsample", MOST_BLOCKS))
        case "AutoencoderKLQwenImage21" | "AutoencoderKLWan":
            usual = 8 if kind == "AutoencoderKLWan" else 16
            factor = config.whole("scale_factor_spatial", usual, most=MOST_FACTOR)
        case "AutoencoderDC":
            factor = 2 ** (len(config.list("encoder_block_out_channels", MOST_BLOCKS)) - 1)
            facts = {"scale": config.real("scaling_factor", 1.0, above=0), "is_sampled": False}
        case _:
            factor = 2 ** (len(config.list("block_out_channels", MOST_BLOCKS)) - 1)
    if kind == "AutoencoderKLFlux2":
        channels, factor = channels * FLUX2_PATCH**2, factor * FLUX2_PATCH
        facts = {"patch": FLUX2_PATCH}
    elif kind == "AutoencoderKL":
        facts = {
            "scale": config.real("scaling_factor", SCALE, above=0),
            "shift": config.real("shift_factor", 0.0),
            "fits_fp16": config.get("force_upcast") is not True,
        }
    return VaeRule(vae_kind=kind, channels=channels, factor=factor, **facts)


def vae_rule(what: str, config: Config, index: Mapping[str, Any]) -> VaeRule:
    """Return the rule of a VAE, from its config and the index of its pipeline, if it has one.

    `add_batch_norm` adds the numbers of a batch norm, once the weights are here.
    """
    kind, pipeline = config.get("_class_name", "no class"), str(index.get("_class_name", ""))
    if not isinstance(kind, str) or kind not in KINDS:
        kinds = f"{shortened(str(kind))}; wdsprep encodes with {', '.join(KINDS)}"
        raise unsuitable(f"the VAE of {what} is {kinds}")
    if kind == "AutoencoderKLFlux2" and pipeline in OTHER_PATCHES:
        raise unsuitable(f"{what} is {pipeline}, which lays out latents as no other")
    channels = 4 if kind in WITH_ALPHA else 3
    if (taken := config.get("input_channels", config.get("in_channels", channels))) != channels:
        raise unsuitable(f"the VAE of {what} takes {brief(taken)} channels, not RGB")
    is_by_channel = kind == "AutoencoderKL" and config.get("latents_mean") is not None
    if is_by_channel and not pipeline:
        raise UsageError(
            f"the VAE of {what} scales each channel (latents_mean), and how its pipeline does that "
            "stands in model_index.json: pass the whole pipeline"
        )
    rule = _read_rule(kind, config)
    if is_by_channel or kind in VIDEO_KINDS:
        means, deviations = config.reals("latents_mean"), config.reals("latents_std", above=0)
        if not len(means) == len(deviations) == rule.channels:
            counts = f"{len(means)} means and {len(deviations)} deviations"
            raise unsuitable(f"{config.path} has {counts} for {rule.channels} channels")
        scale: Any = rule.scale if "unet" in index else 1.0  # by the scale as well
        rule = replace(rule, scale=tuple(scale / each for each in deviations), shift=means)
    multiple = FOLDS.get(pipeline, 1) * rule.factor
    if pipeline not in FOLDS and "transformer" in index and rule.own_factor < UNPACKED_FACTOR:
        multiple = max(multiple, 2 * rule.own_factor)  # it makes one token of 2 x 2 places
    shift = 0.0 if pipeline in SHIFTLESS else rule.shift
    return replace(rule, shift=shift, multiple=multiple)


def add_batch_norm(rule: Rule, config: Config, pipeline: str, files: Sequence[Path]) -> Rule:
    """Return the rule with the batch norm that is among the weights of `AutoencoderKLFlux2`."""
    if rule.vae_kind != "AutoencoderKLFlux2":
        return rule
    epsilon = NORM_EPSILONS.get(pipeline) or config.real("batch_norm_eps", NORM_EPSILON)
    means, variances = (_find_numbers(files, f"bn.running_{name}") for name in ("mean", "var"))
    sums = [variance + epsilon for variance in variances]
    is_sound = all(map(math.isfinite, means)) and all(0 < total < math.inf for total in sums)
    if not is_sound or not len(means) == len(variances) == rule.channels:
        raise WorkError(
            f"{files[0].parent} has no finite batch norm of {rule.channels} channels "
            "(bn.running_*): choose another --model"
        )
    scale = tuple(1 / math.sqrt(total) for total in sums)
    return replace(rule, scale=scale, shift=means)


def _find_numbers(files: Sequence[Path], name: str) -> tuple[float, ...]:
    """Return the numbers of a small tensor in safetensors files, without torch."""
    for path in files:
        try:
            with path.open("rb") as file:
                tensors, start, _ = read_tensor_header(file)
                if (entry := tensors.get(name)) is None:
                    continue
                if entry.end - entry.begin > NORM_NBYTES:
                    raise ValueError(f"{name} is too large for a list of channels")
                file.seek(start + entry.begin)
                numbers = entry.numbers(file.read(entry.end - entry.begin))
                return tuple(map(float, numbers.ravel()))
        except (ValueError, KeyError) as error:
            raise WorkError(f"{path} is not a safetensors file ({error})") from None
    raise WorkError(
        f"{files[0].parent} lacks {name}, by which the VAE's latents are scaled: choose another "
        "--model"
    )
