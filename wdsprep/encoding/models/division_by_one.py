"""Divisions by one, which are left out of a network.

The blocks of diffusers divide their results by a factor of their configs, which is 1 in every VAE.
Each division reads and writes a whole tensor and changes nothing: in SD2's encoder there are 11. A
block's own code stays as it is, since only its factor is replaced: by an object that returns what
is divided by it. torch.compile cannot read such an object, and needs none: it computes the division
together with the sum before it.
"""

from torch import Tensor, nn

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
