"""The kernels of group norms, compiled without a GPU.

    python -m tests.kit.compiled_norms 75 90

prints a JSON of their PTX for each compute capability, for half precision and the shapes of SD2's
first norms.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from wdsprep.encoding.models import group_norm_kernel as kernels

HALF = ("pixels", "made", "weight", "bias")
SIZES = {
    "channels": 128,
    "groups": 32,
    "chunk_size": kernels.CHUNK // 128,
    "tile_width": 128,
    "tile_rows": kernels.TILE // 128,
    "silu": True,
}
MERGED = {"tile_width": 4, "tile_rows": kernels.MERGED // 4}


def ptx(kernel: Any, capability: int, sizes: dict[str, int]) -> str:
    constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    types = {"positions": "i32", "epsilon": "fp32"} | dict.fromkeys(constants, "constexpr")
    types |= dict.fromkeys(HALF, "*fp16")
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert made.asm["cubin"]
    return str(made.asm["ptx"])


def all_ptx(capability: int) -> dict[str, str]:
    each = (
        (kernels._find_channel_moments, SIZES),
        (kernels._merge_moments, SIZES | MERGED),
        (kernels._normalise, SIZES),
    )
    return {kernel.fn.__name__: ptx(kernel, capability, sizes) for kernel, sizes in each}


if __name__ == "__main__":
    sys.stdout.write(json.dumps({each: all_ptx(int(each)) for each in sys.argv[1:]}))
