"""wdsprep turns image-caption downloads into tar shards that diffusion trainers stream."""

__version__ = "0.1.0"
