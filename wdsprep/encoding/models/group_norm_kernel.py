"""A group norm of images in channels_last, and the SiLU after it, in Triton.

It reads an image twice and writes it once. The moments are made in two steps, and nothing is added
up in an order that may change: first of each channel in each chunk of positions, then of a group.
Each step adds up differences from the mean of its first tile. So neither a mean that is large
beside the deviation nor a corner unlike all else costs digits, and equal values become exactly
zero. Chunks depend on the shape of an image alone, so its result does not depend on the batch. All
is computed in fp32, and the result is rounded once.

Triton comes with torch where that is built for CUDA. With TRITON_INTERPRET=1 in the environment,
its interpreter runs the kernels on the CPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1 << 12
"""The values that a program holds at once."""
CHUNK = 1 << 16
"""The values of which a program makes moments."""
MERGED = 1 << 10
"""The moments that a program merges at once."""


def group_norm(
    images: Tensor, weight: Tensor, bias: Tensor, groups: int, epsilon: float, *, silu: bool
) -> Tensor:
    """Return the group norm of images (B, C, ...), with SiLU applied to it if `silu`.

    The result is in channels_last. Images in another layout are copied first.
    """
    pixels = images.movedim(1, -1).contiguous()
    made = torch.empty_like(pixels)
    count, channels = len(pixels), pixels.shape[-1]
    positions = pixels[0].numel() // channels
    width = triton.next_power_of_2(channels)
    rows = max(1, TILE // width)
    chunk = max(1, CHUNK // width)
    chunks = triton.cdiv(positions, chunk)
    means, squares = pixels.new_empty((2, count * chunks * channels), dtype=torch.float32)
    centres, scales = pixels.new_empty((2, count * groups), dtype=torch.float32)
    size = triton.next_power_of_2(channels // groups)
    with torch.cuda.device_of(pixels):  # type: ignore[no-untyped-call]  # where Triton launches
        _find_channel_moments[count * chunks,](
            pixels,
            means,
            squares,
            positions,
            channels=channels,
            chunk_size=chunk,
            tile_rows=rows,
            tile_width=width,
        )
        _merge_moments[count * groups,](
            means,
            squares,
            centres,
            scales,
            positions,
            epsilon,
            channels=channels,
            groups=groups,
            chunk_size=chunk,
            tile_rows=max(1, MERGED // size),
            tile_width=size,
        )
        _normalise[count * triton.cdiv(positions, rows),](
            pixels,
            made,
            weight,
            bias,
            centres,
            scales,
            positions,
            channels=channels,
            groups=groups,
            tile_rows=rows,
            tile_width=width,
            silu=silu,
        )
    return made.movedim(-1, 1)


def _channel_moments(
    pixels: "Any",
    means: "Any",
    squares: "Any",
    positions: "Any",
    channels: tl.constexpr,
    chunk_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_width: tl.constexpr,
) -> None:
    """Store the mean of each channel in a chunk of positions, and its sum of squares around it."""
    program = tl.program_id(0)
    chunks = tl.cdiv(positions, chunk_size)
    image = (program // chunks).to(tl.int64)
    start = (program % chunks).to(tl.int64) * chunk_size
    pixels += (image * positions + start) * channels
    count = tl.minimum(positions - start, chunk_size).to(tl.int32)
    channel = tl.arange(0, tile_width)
    is_channel = channel < channels
    row = tl.arange(0, tile_rows)
    is_value = (row < count)[:, None] & is_channel[None, :]
    place = row[:, None] * channels + channel[None, :]
    value = tl.load(pixels + place, mask=is_value, other=0.0).to(tl.float32)
    first = tl.load(pixels + channel, mask=is_channel, other=0.0).to(tl.float32)
    difference = tl.where(is_value, value - first[None, :], 0.0)
    base = first + tl.sum(difference, 0) / tl.minimum(count, tile_rows)
    total = tl.zeros((tile_rows, tile_width), tl.float32)
    square = tl.zeros((tile_rows, tile_width), tl.float32)
    for begin in range(0, chunk_size, tile_rows):
        row = begin + tl.arange(0, tile_rows)
        is_value = (row < count)[:, None] & is_channel[None, :]
        place = row[:, None] * channels + channel[None, :]
        value = tl.load(pixels + place, mask=is_value, other=0.0).to(tl.float32)
        difference = tl.where(is_value, value - base[None, :], 0.0)
        total += difference
        square += difference * difference
    apart = tl.sum(total, 0) / count
    around = tl.sum(square, 0) - count * apart * apart
    place = program.to(tl.int64) * channels + channel
    tl.store(means + place, base + apart, mask=is_channel)
    tl.store(squares + place, tl.where(around < 0, 0.0, around), mask=is_channel)


def _group_moments(
    means: "Any",
    squares: "Any",
    centres: "Any",
    scales: "Any",
    positions: "Any",
    epsilon: "Any",
    channels: tl.constexpr,
    groups: tl.constexpr,
    chunk_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_width: tl.constexpr,
) -> None:
    """Store the mean of a group of channels of an image, and 1 / its deviation."""
    program = tl.program_id(0)
    chunks = tl.cdiv(positions, chunk_size)
    begin = (program // groups).to(tl.int64) * chunks * channels
    begin += program % groups * (channels // groups)
    channel = tl.arange(0, tile_width)
    is_channel = channel < channels // groups
    chunk = tl.arange(0, tile_rows)
    is_value = (chunk < chunks)[:, None] & is_channel[None, :]
    place = begin + chunk[:, None].to(tl.int64) * channels + channel[None, :]
    mean = tl.load(means + place, mask=is_value, other=0.0)
    first = tl.load(means + begin)
    difference = tl.where(is_value, mean - first, 0.0)
    count = tl.minimum(chunks, tile_rows) * (channels // groups)
    base = first + tl.sum(tl.sum(difference, 1), 0) / count
    total = tl.zeros((tile_rows, tile_width), tl.float32)
    square = tl.zeros((tile_rows, tile_width), tl.float32)
    for start in range(0, chunks, tile_rows):
        chunk = start + tl.arange(0, tile_rows)
        is_value = (chunk < chunks)[:, None] & is_channel[None, :]
        place = begin + chunk[:, None].to(tl.int64) * channels + channel[None, :]
        size = tl.minimum(positions - chunk * chunk_size, chunk_size).to(tl.float32)[:, None]
        mean = tl.load(means + place, mask=is_value, other=0.0)
        difference = tl.where(is_value, mean - base, 0.0)
        total += size * difference
        square += tl.load(squares + place, mask=is_value, other=0.0)
        square += size * difference * difference
    values = positions.to(tl.float32) * (channels // groups)
    apart = tl.sum(tl.sum(total, 1), 0) / values
    variance = tl.sum(tl.sum(square, 1), 0) / values - apart * apart
    variance = tl.where(variance < 0, 0.0, variance)
    tl.store(centres + program, base + apart)
    tl.store(scales + program, tl.rsqrt(variance + epsilon))


def _normalised(
    pixels: "Any",
    made: "Any",
    weight: "Any",
    bias: "Any",
    centres: "Any",
    scales: "Any",
    positions: "Any",
    channels: tl.constexpr,
    groups: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_width: tl.constexpr,
    silu: tl.constexpr,
) -> None:
    """Normalise some positions of an image, apply SiLU if `silu`, and store them in `made`."""
    program = tl.program_id(0)
    parts = tl.cdiv(positions, tile_rows)
    image = (program // parts).to(tl.int64)
    start = (program % parts).to(tl.int64) * tile_rows
    row, channel = tl.arange(0, tile_rows), tl.arange(0, tile_width)
    is_channel = channel < channels
    group = image * groups + channel // (channels // groups)
    centre = tl.load(centres + group, mask=is_channel, other=0.0)
    scale = tl.load(scales + group, mask=is_channel, other=0.0)
    scale *= tl.load(weight + channel, mask=is_channel, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    begin = (image * positions + start) * channels
    place = row[:, None] * channels + channel[None, :]
    is_value = (start + row < positions)[:, None] & is_channel[None, :]
    value = tl.load(pixels + begin + place, mask=is_value, other=0.0).to(tl.float32)
    value = (value - centre[None, :]) * scale[None, :] + shift[None, :]
    if silu:
        value = value / (1.0 + tl.exp(-value))
    tl.store(made + begin + place, value, mask=is_value)


PLAIN = ["positions"]
"""The argument for whose values, such as 1, Triton compiles nothing of its own."""
_find_channel_moments: Any = triton.jit(_channel_moments, do_not_specialize=PLAIN)
_merge_moments: Any = triton.jit(_group_moments, do_not_specialize=PLAIN)
_normalise: Any = triton.jit(_normalised, do_not_specialize=PLAIN)
