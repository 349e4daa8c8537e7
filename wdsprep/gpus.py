"""What plans are reckoned from where nothing has been measured: the speed of GPUs, and prices.

The speeds are of diffusers and transformers as they come, in fp16, with SD2's VAE and text encoder.
They are derived from the operations of an image, the cards' data sheets and the share of the peak
that convolutions and group norms leave, and have not been measured: a trial says more.
"""

from dataclasses import dataclass

from wdsprep.errors import UsageError

VAE_GFLOPS = {256: 272.7, 512: 1116.7}  # of an image, a multiplication and an addition being two
TEXT_GFLOPS = {"sd2": 45.1, "sd1": 13.3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Images a second at 256 and 512, and dollars an hour with what they are of; 0 is not known."""

    at_256: float
    at_512: float
    price: float = 0.0
    price_of: str = ""


GPUS = {
    "A10G": Gpu(
        at_256=111, at_512=30, price=1.006, price_of="g5.xlarge on demand, us-east-1, June 2026"
    ),
    "A100": Gpu(
        at_256=469, at_512=126, price=3.0, price_of="what Anyscale paid in its run, reserved"
    ),
    "H100": Gpu(at_256=1252, at_512=332),
    "H200": Gpu(at_256=1390, at_512=371),
}
# List prices of S3 Standard in us-east-1: of a PUT, of a GET, and of a GB for a month.
PUT_DOLLARS, GET_DOLLARS, GB_MONTH_DOLLARS = 0.005 / 1000, 0.0004 / 1000, 0.023


def find_gpu(name: str) -> Gpu:
    found = GPUS.get(name.upper())
    if found is None:
        raise UsageError(
            f"--gpu {name}: the table has {', '.join(GPUS)}: give --rate 256=N,512=N for another, "
            'or the --trial of a "wdsprep encode --limit" on it'
        )
    return found


def derived_rate(gpu: Gpu, resolution: int, *, model: str, text: str) -> float:
    """Images a second, by the operations that are left to do."""
    known = {256: gpu.at_256, 512: gpu.at_512}.get(resolution)
    if known is None:
        raise UsageError(f"no speed at {resolution} is known: give --rate {resolution}=N")
    table = gflops(resolution, model="sd2", text="emb")
    return known * table / gflops(resolution, model=model, text=text)


def gflops(resolution: int, *, model: str, text: str) -> float:
    """Of an image and its caption. The VAE's grow with the pixels."""
    vae = VAE_GFLOPS.get(resolution) or VAE_GFLOPS[512] * (resolution / 512) ** 2
    return vae + (TEXT_GFLOPS[model] if text == "emb" else 0.0)
