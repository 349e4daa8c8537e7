#!/usr/bin/env python3
"""Make a small random pipeline, to try the LoRA examples on without weights or a GPU.

python tools/examples/tiny_pipeline.py sdxl tiny-sdxl
wdsprep encode shards/images shards/tiny --model tiny-sdxl --resolution 64
ACCELERATE_USE_CPU=true python tools/examples/lora_sdxl.py shards/tiny --model tiny-sdxl --steps 20
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.kit.families import small

FAMILIES = {
    "sdxl": "StableDiffusionXL",
    "flux": "Flux",
    "kontext": "FluxKontext",
    "qwen-edit": "QwenImageEdit",
    "qwen-edit-plus": "QwenImageEditPlus",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("out", type=Path, help="a folder, to give as --model")
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} is there already: choose another folder")
    small(FAMILIES[options.family], options.out)
    print(f"{options.out} holds a small {options.family} of random weights, under a megabyte")


if __name__ == "__main__":
    main()
