"""How many images a device takes at a time."""

import torch

from wdsprep.encoding.models.encoder import Encoder

CPU_BATCH = 2  # more do not stay in the cache: on 2 cores, 8 at a time took 1.5 times as long
MAX_BATCH = 128
EXACT_BATCH = 4  # of the few images that are computed again in fp32
# An image takes about this many tensors of the VAE's first width at full resolution, at the peak.
TENSORS_AT_PEAK = 6
FIRST_WIDTH = 128
SHARE_OF_FREE_MEMORY = 0.8


def auto_batch_size(encoder: Encoder) -> int:
    """On the CPU always the same, so that everybody's bytes are; on a GPU what fits."""
    if encoder.device.type != "cuda":
        return CPU_BATCH
    free, _total = torch.cuda.mem_get_info(encoder.device)
    itemsize = encoder.itemsize
    each = TENSORS_AT_PEAK * FIRST_WIDTH * encoder.resolution**2 * itemsize
    return max(1, min(MAX_BATCH, int(free * SHARE_OF_FREE_MEMORY / each)))
