"""What is left out of a VAE: the other frames of a video, and divisions by one.

An image is a video of one frame. A causal convolution of videos takes zeros before the first frame.
So only its weights for the last time step count, and it can become a convolution of images: a third
of the operations, a layout that GPUs are fast with (channels_last is for images alone), and no
conv3d in bf16, which is slow and needs much memory in several versions of cuDNN (pytorch#163539,
#163581).

No class is known here by its name. Each Conv3d is tried with one frame, and is replaced if the
convolution of images gives the same result. A convolution that fails with one frame is never used
with one, and is removed. With Qwen-Image's encoder, which is also Wan's, random weights and 256
pixels, 152 of 436 GFLOP are left, results differ by 8e-7 where the largest is 0.8, and on two busy
cores in fp32 an image took 4.0 to 6.4 s instead of 10.6 to 12.4, measured in turns. This has not
been measured on a GPU.

The blocks of diffusers divide their results by a factor of their configs, which is 1 in every VAE.
Each division reads and writes a whole tensor and changes nothing: in SD2's encoder there are 11. A
block's own code stays as it is, since only its factor is replaced: by an object that returns what
is divided by it. torch.compile cannot read such an object, and needs none: it computes the division
together with the sum before it.
"""

import copy

import torch
from torch import Tensor, nn

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
        frame = _draw_frame(conv)
        try:
            wanted = conv(frame)
        except RuntimeError:  # it needs more time steps than one frame and its padding have
            delattr(parent, own)
            continue
        flat = _flatten(module, wanted, frame)
        if flat is not None and _is_same(copy.deepcopy(flat).float()(frame), wanted):
            setattr(parent, own, flat)
        else:
            kept.append(name)
    return kept


def _draw_frame(conv: nn.Conv3d) -> Tensor:
    """Return a random frame that is large enough for a convolution.

    The trainer's generator of random numbers is not used.
    """
    height, width = (
        size * dilation + 2
        for size, dilation in zip(conv.kernel_size[1:], conv.dilation[1:], strict=True)
    )
    generator = torch.Generator().manual_seed(0)
    return torch.randn((1, conv.in_channels, 1, height, width), generator=generator)


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


def _is_same(found: Tensor, wanted: Tensor) -> bool:
    if found.shape != wanted.shape:
        return False
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


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
