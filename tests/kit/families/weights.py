"""Random weights that make sensible numbers, the same in every run and of every size.

Libraries start their networks with weights near zero, with which text hardly changes an output and
a wrong layer is hardly seen. Here each layer about keeps the size of what goes through it.
"""

import zlib

import torch
from torch import nn


def randomised(network: nn.Module, seed: str) -> nn.Module:
    """New weights in place, drawn in the order of their names."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    tables = {id(each.weight) for each in network.modules() if isinstance(each, nn.Embedding)}
    with torch.no_grad():
        for _, weight in sorted(network.named_parameters()):
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.ndim < 2:  # biases, and the factors of norms, which are near one
                weight.add_(drawn / 10)
            else:
                inputs = weight[0].numel()
                weight.copy_(drawn if id(weight) in tables else drawn / inputs**0.5)
    return network.eval().requires_grad_(False)
