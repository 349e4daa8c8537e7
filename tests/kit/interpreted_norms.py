"""Group norms by the kernel under Triton's interpreter, held against exact ones.

    python -m tests.kit.interpreted_norms

prints a JSON. It wants a process of its own, with TRITON_INTERPRET=1 from the beginning.
"""

import copy
import json
import sys
from collections.abc import Iterator

import diffusers
import torch
from torch import Tensor

from tests.kit.families.vaes import KL
from tests.kit.families.weights import randomised
from wdsprep.encoding.models.division_by_one import leave_out_divisions
from wdsprep.encoding.models.group_norm import JoinedNorm, compute_by_torch, join_norms
from wdsprep.encoding.models.group_norm_kernel import CHUNK, group_norm
from wdsprep.encoding.models.vae import Moments

SHAPES = {
    "a power of two of channels": ((1, 128, 29, 23), 32),
    "three channels in a group": ((2, 24, 7, 5), 8),
    "one channel in a group": ((1, 32, 9, 33), 32),
    "one group": ((2, 5, 2, 3), 1),
    "one position": ((3, 12, 1, 1), 4),
    "positions in a row": ((2, 48, 70), 16),
    "more channels than a tile": ((1, 5000, 2, 1), 4),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPSILON = 1e-6


def draw(shape: tuple[int, ...], mean: float = 1.0, deviation: float = 2.0) -> Tensor:
    """Random numbers in channels_last."""
    sizes = (shape[0], *shape[2:], shape[1])
    drawn = torch.randn(sizes, generator=torch.Generator().manual_seed(1))
    return (drawn * deviation + mean).movedim(-1, 1)


def weights(channels: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    weight, bias = torch.randn((2, channels), generator=generator)
    return 1 + weight / 4, bias / 4


def apart(images: Tensor, groups: int, *, silu: bool = True) -> dict[str, float]:
    """How far the kernel's result and torch's are from the exact one, in units of what rounding to
    the dtype may do. Rounding by the interpreter cuts off, so 1 is all of the last place."""
    weight, bias = (one.to(images.dtype) for one in weights(images.shape[1]))
    exact = compute_by_torch(
        images.double(), weight.double(), bias.double(), groups, EPSILON, silu=silu
    )
    rounding = torch.finfo(images.dtype).eps * exact.abs() + 2e-6 * exact.abs().max()
    return {
        name: float(((made.double() - exact).abs() / rounding).max())
        for name, made in (
            ("ours", group_norm(images, weight, bias, groups, EPSILON, silu=silu)),
            ("torch", compute_by_torch(images, weight, bias, groups, EPSILON, silu=silu)),
        )
    }


def errors() -> Iterator[tuple[str, dict[str, float]]]:
    for name, (shape, groups) in SHAPES.items():
        for dtype in DTYPES:
            yield f"{name}, {dtype}", apart(draw(shape).to(dtype), groups)
    yield "without SiLU", apart(draw((1, 24, 7, 5)).half(), 8, silu=False)
    yield "a large mean", apart(draw((1, 16, 70, 67), 1000, 0.01), 4, silu=False)
    corner = draw((1, 16, 70, 67), 0, 0.01)
    corner[:, :, 0, 0] = 300.0
    yield "a corner unlike all else", apart(corner, 4, silu=False)


def facts() -> Iterator[tuple[str, bool]]:
    weight, bias = weights(16)

    def norm(images: Tensor) -> Tensor:
        return group_norm(images, weight, bias, 4, EPSILON, silu=False)

    same = torch.full((1, 16, 90, 91), 1000.3)
    yield (
        "equal values give the bias",
        torch.equal(norm(same), bias.view(1, -1, 1, 1).expand_as(same)),
    )
    many = draw((3, 16, 70, 67))
    made = norm(many)
    assert many[0].numel() > CHUNK
    yield "an image alone", all(torch.equal(norm(many[n : n + 1])[0], made[n]) for n in range(3))
    yield "again", torch.equal(norm(many), made)
    yield "channels_last", made.is_contiguous(memory_format=torch.channels_last)
    yield "a contiguous image", torch.equal(norm(many.contiguous()), made)
    many[1, 5, 3, 3] = torch.nan
    broken = norm(many)
    yield (
        "one image is not finite",
        bool(broken[1, 4:8].isnan().all()) and torch.equal(broken[::2], made[::2]),
    )


def vae() -> dict[str, dict[str, float]]:
    """How far a whole encoder is from the same in double precision, and its norms by the kernel.

    In the root of the mean square: of a few hundred values, the worst varies threefold by chance.
    """
    diffusers.utils.logging.set_verbosity_error()
    torch.manual_seed(4)
    pixels = torch.randint(0, 256, (1, 3, 32, 16), generator=torch.Generator().manual_seed(3))
    pixels = pixels.to(torch.uint8)
    whole = randomised(diffusers.AutoencoderKL(**KL), "norms")
    exact = Moments(copy.deepcopy(whole).double(), torch.contiguous_format)(pixels)
    found = {}
    for dtype in DTYPES:
        network = Moments(copy.deepcopy(whole).to(dtype), torch.channels_last)
        network = network.to(memory_format=torch.channels_last)
        by_torch = float((network(pixels) - exact).square().mean().sqrt())
        leave_out_divisions(network)
        join_norms(network, pixels[:, :, :16])
        norms = [module for module in network.modules() if isinstance(module, JoinedNorm)]
        for norm in norms:
            norm.kernel = group_norm
        ours = float((network(pixels) - exact).square().mean().sqrt())
        found[str(dtype)] = {"torch": by_torch, "ours": ours, "norms": len(norms)}
    return found


if __name__ == "__main__":
    found = {"errors": dict(errors()), "facts": dict(facts()), "vae": vae()}
    sys.stdout.write(json.dumps(found))
