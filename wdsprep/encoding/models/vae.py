"""The way from pixels to the output of a VAE, and from there to the latents of a denoiser.

Every VAE follows one of four rules, by its class and config: `vae_rules` reads them. A latent is
stored as (patchify(z) - shift) * scale, where z is a sample or the mean of the VAE's distribution,
or the VAE's output if it has no distribution. The decoder turns latents back into pictures, to see
what a model would learn.

`flatten_frames` leaves out the other frames of a video. An image is a video of one frame. A causal
convolution of videos takes zeros before the first frame. So only its weights for the last time step
count, and it can become a convolution of images: a third of the operations, and no conv3d in bf16,
which is slow and needs much memory in several versions of cuDNN (pytorch#163539, #163581).

No class is known here by its name. Each Conv3d is tried with one frame, and is replaced if the
convolution of images gives the same result. A convolution that fails with one frame is never used
with one, and is removed. With Qwen-Image's encoder, which is also Wan's, random weights and 256
pixels, 152 of 436 GFLOP are left, results differ by 8e-7 where the largest is 0.8, and on two busy
cores in fp32 an image took 4.0 to 6.4 s instead of 10.6 to 12.4, measured in turns. This has not
been measured on a GPU.

`leave_out_divisions` leaves out divisions by one. The blocks of diffusers divide their results by a
factor of their configs, which is 1 in every VAE. Each division reads and writes a whole tensor and
changes nothing: in SD2's encoder there are 11. A block's own code stays as it is, since only its
factor is replaced: by an object that returns what is divided by it. torch.compile cannot read such
an object, and needs none: it computes the division together with the sum before it.
"""

import copy
import logging
from typing import Any, cast

import torch
from torch import Tensor, nn

from wdsprep.dataset.npy_arrays import denormalise
from wdsprep.encoding.models.find_model import Model
from wdsprep.encoding.models.load_networks import load_vae, silence_libraries
from wdsprep.encoding.models.vae_rules import VIDEO_KINDS, WITH_ALPHA

_log = logging.getLogger("wdsprep")


class Moments(nn.Module):
    """The encoder of a VAE, from uint8 pixels to the means and log-variances of latents.

    A VAE without a distribution gives the latents themselves. The decoder is not kept.
    """

    def __init__(self, vae: Any) -> None:
        """Take the encoder of a VAE, and log a warning if it needs several frames of a video."""
        super().__init__()
        self.encoder = vae.encoder
        self.quant = getattr(vae, "quant_conv", None) or nn.Identity()
        self.dtype = vae.dtype
        kind = type(vae).__name__
        self.takes_frames, self.takes_alpha = kind in VIDEO_KINDS, kind in WITH_ALPHA
        if kept := flatten_frames(self):
            _log.warning(
                "%s: %s needs more than one frame, so all is computed as a video, which is slower",
                kind,
                kept[0],
            )

    def forward(self, pixels: Tensor) -> Tensor:
        image = 2 * (pixels.float() / 255) - 1  # to the bit what diffusers makes of it
        if self.takes_alpha:
            image = torch.cat([image, torch.ones_like(image[:, :1])], dim=1)
        image = image.to(self.dtype)
        if self.takes_frames:  # an image is a video of one frame
            return cast(Tensor, self.quant(self.encoder(image.unsqueeze(2))).squeeze(2).float())
        return cast(Tensor, self.quant(self.encoder(image)).float())


class Decoder:
    """The decoder of a model's VAE in fp32, on a GPU if there is one."""

    def __init__(self, model: Model) -> None:
        silence_libraries()
        self._model = model
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        vae = load_vae(model, torch.float32, needed=("decoder.", "post_quant_conv."))
        self._vae = vae.eval().requires_grad_(False).to(self._device)

    def decode(self, latent: Any) -> Any:
        """Return the picture of a latent as uint8 (height, width, 3).

        The latent is as a trainer gets it, shifted and scaled.
        """
        stored = torch.as_tensor(latent, dtype=torch.float32).cpu().numpy()
        output = torch.as_tensor(
            denormalise(stored, self._model.latent_settings), dtype=torch.float32
        )
        values = output[None].to(self._device)
        is_video = self._model.vae_kind in VIDEO_KINDS
        with torch.inference_mode():
            pixels = self._vae.decode(values[:, :, None] if is_video else values).sample
            pixels = (pixels[:, :, 0] if is_video else pixels)[0, :3]
            levels = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
            return levels.permute(1, 2, 0).contiguous().cpu().numpy()


TOLERANCE = 1e-4
"""The largest difference, relative to the largest value, in fp32; a wrong time step gives 1."""


class FrameConv(nn.Conv2d):
    """A convolution of the only frame of a video: (B, C, 1, H, W) in and out."""

    def forward(self, video: Tensor, cache: None = None) -> Tensor:  # noqa: ARG002  of frames before
        return super().forward(video.squeeze(2)).unsqueeze(2)


def flatten_frames(network: nn.Module) -> list[str]:
    """Replace the convolutions of videos in a network by convolutions of one frame, in place.

    Convolutions that fail with one frame are removed. Others that cannot be replaced stay as they
    are; return their names.
    """
    kept = []
    for name, module in list(network.named_modules()):
        if not isinstance(module, nn.Conv3d):
            continue
        parent_name, _, own = name.rpartition(".")
        parent, conv = network.get_submodule(parent_name), copy.deepcopy(module).float()
        both = zip(conv.kernel_size[1:], conv.dilation[1:], strict=True)
        height, width = (size * dilation + 2 for size, dilation in both)
        generator = torch.Generator().manual_seed(0)  # not the trainer's
        frame = torch.randn((1, conv.in_channels, 1, height, width), generator=generator)
        try:
            wanted = conv(frame)
        except RuntimeError:  # it needs more time steps than one frame and its padding have
            delattr(parent, own)
            continue
        flat = _flatten(module, wanted, frame)
        result = None if flat is None else copy.deepcopy(flat).float()(frame)
        is_same = result is not None and result.shape == wanted.shape
        if is_same and (result - wanted).abs().max() <= TOLERANCE * wanted.abs().max():
            setattr(parent, own, flat)
        else:
            kept.append(name)
    return kept


def _flatten(conv: nn.Conv3d, made: Tensor, frame: Tensor) -> FrameConv | None:
    """Return the last time step of a convolution of videos as a convolution of images, or None.

    Return None if its result has several frames, or if it does not pad with zeros. Subclasses pad
    by themselves, so the padding is computed from the size of `made`, the result for `frame`.
    """
    if made.shape[2] != 1 or conv.padding_mode != "zeros":
        return None

    def padding(axis: int) -> int:
        reach = conv.dilation[axis] * (conv.kernel_size[axis] - 1)
        missing = (made.shape[axis + 2] - 1) * conv.stride[axis] + reach + 1 - frame.shape[axis + 2]
        return max(0, (missing + 1) // 2)

    flat = FrameConv(
        conv.in_channels,
        conv.out_channels,
        (conv.kernel_size[1], conv.kernel_size[2]),
        stride=(conv.stride[1], conv.stride[2]),
        padding=(padding(1), padding(2)),
        dilation=(conv.dilation[1], conv.dilation[2]),
        groups=conv.groups,
        bias=conv.bias is not None,
        device="meta",
    )
    flat.weight = nn.Parameter(conv.weight.data[:, :, -1].contiguous(), requires_grad=False)
    flat.bias = conv.bias
    return flat


FACTORS = ("output_scale_factor", "rescale_output_factor")
"""What diffusers calls the divisors of its blocks of convolutions and of attention."""


class One:
    """The number 1 as a divisor that costs nothing."""

    def __rtruediv__(self, dividend: Tensor) -> Tensor:
        return dividend


def leave_out_divisions(network: nn.Module) -> None:
    """Leave out the divisions of a network that change nothing, in place."""
    for module in network.modules():
        for name in FACTORS:
            if vars(module).get(name) == 1:
                setattr(module, name, One())
