"""Small autoencoders: eight channels wide, with the latents of the real ones.

Channels, factor and normalisation are the family's; where that is a batch norm or a list of means,
no number of it is 0 or 1, so that a step that is left out shows.
"""

import diffusers
import torch
from torch import nn

KL = {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4}
KL |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "sample_size": 64}
KL |= {"up_block_types": ("UpDecoderBlock2D",) * 4}
HUNYUAN_CHANNELS = 16
"""Not 64, as the real one's: its class would else be 5 MB at least."""


def kl(scale: float) -> diffusers.AutoencoderKL:
    """Of 4 channels, as with Stable Diffusion."""
    return diffusers.AutoencoderKL(
        **KL, latent_channels=4, scaling_factor=scale, force_upcast=False
    )


def kl16(scale: float, shift: float) -> diffusers.AutoencoderKL:
    """Of 16 channels with a shift, and no convolutions around the latents, as with Flux and SD3."""
    none = {"use_quant_conv": False, "use_post_quant_conv": False}
    sizes = {"latent_channels": 16, "scaling_factor": scale, "shift_factor": shift}
    return diffusers.AutoencoderKL(**KL, **none, **sizes, force_upcast=True)


def flux() -> diffusers.AutoencoderKL:
    return kl16(0.3611, 0.1159)


def flux2() -> diffusers.AutoencoderKLFlux2:
    made = diffusers.AutoencoderKLFlux2(**KL, latent_channels=32)
    generator = torch.Generator().manual_seed(2)
    made.bn.running_mean.normal_(generator=generator)
    made.bn.running_var.uniform_(0.3, 3, generator=generator)
    return made


def qwen_image() -> diffusers.AutoencoderKLQwenImage:
    """With the means and deviations of the real one, which are the defaults of its class."""
    return diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1
    )


def qwen_image_21() -> nn.Module:
    """With an alpha channel, a 16th of the side, and the means of the real one."""
    return diffusers.AutoencoderKLQwenImage21(
        base_dim=8, decoder_base_dim=8, dim_mult=[1, 1, 1, 1, 1], num_res_blocks=1
    )


def dc() -> diffusers.AutoencoderDC:
    """A 32nd of the side, 32 channels, no distribution."""
    layers = {
        "block_types": ("ResBlock",) * 4 + ("EfficientViTBlock",) * 2,
        "block_out_channels": (8, 8, 8, 8, 16, 32),
        "layers_per_block": (1,) * 6,
        "qkv_multiscales": ((), (), (), (), (), (5,)),
    }
    both = {f"{side}_{n}": v for side in ("encoder", "decoder") for n, v in layers.items()}
    return diffusers.AutoencoderDC(**both, attention_head_dim=8, scaling_factor=0.41407)


def hunyuan_image() -> diffusers.AutoencoderKLHunyuanImage:
    """A 32nd of the side."""
    sizes = {"spatial_compression_ratio": 32, "sample_size": 64, "layers_per_block": 0}
    return diffusers.AutoencoderKLHunyuanImage(
        **sizes,
        in_channels=3,
        out_channels=3,
        latent_channels=HUNYUAN_CHANNELS,
        block_out_channels=(32,) * 6,
        scaling_factor=0.75289,
    )


def sized(vae: nn.Module) -> None:
    """Latents of about one once they are multiplied by the scale, as those of a trained one are."""
    if isinstance(vae, diffusers.AutoencoderKL):
        last = vae.quant_conv or vae.encoder.conv_out
        means = slice(vae.config.latent_channels)
        for weight in (last.weight, last.bias):
            weight[means] /= vae.config.scaling_factor
