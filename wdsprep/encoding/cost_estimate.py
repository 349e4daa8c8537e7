"""The time, money and bytes that encoding a dataset will take: what `wdsprep plan` prints.

All of it is arithmetic on the number of images by bucket and the speed of one device. Sizes follow
from the format, to the byte but for captions and json, which are taken to fill one tar block each,
as they nearly always do. Requests are those that `encode` makes: it reads an image shard once, and
writes a latent shard in parts; for text alone it skips large images.

If nothing has been measured, the estimate goes by a table of the speeds and prices of GPUs. The
speeds are for diffusers and transformers as they come, not compiled, in fp16, with SD2's VAE and
text encoder. They are derived from the operations of an image, the cards' data sheets and the share
of the peak that convolutions and group norms leave. They have not been measured: a trial says more.
The speeds of other models are derived from their operations at the same share of the peak, though
large text encoders leave more of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from wdsprep.dataset.buckets import buckets_of_phase
from wdsprep.dataset.npy_arrays import FLIPPED, LATENT, OF_SIZES, Field
from wdsprep.dataset.shard_reader import LARGE_NBYTES, TAIL_NBYTES
from wdsprep.dataset.tar import BLOCK, padded
from wdsprep.encoding import TEXTS
from wdsprep.encoding.models.presets import DC, FLUX2, KL, PRESETS, QWEN, TOKENS, Preset
from wdsprep.errors import UsageError
from wdsprep.images.nearest_shape import FAST, OVERSAMPLING
from wdsprep.store.base import CHUNK_NBYTES
from wdsprep.store.s3.uploads import PART_NBYTES

CLIP_ALONE = IN_FP16 = ("sd1", "sd2", "tiny")
"""Models whose tokens need no mask, and whose VAEs run in fp16: they are the same."""
BESIDE = 3  # a shard's index, rejects and receipt
# Decoding, scaling and cropping a JPEG took 2.2 to 2.9 ns a pixel of it on one core.
DECODE_S_PER_PIXEL = 2.6e-9
REDUCED_SHARE = 0.7
"""The share of that time that remains if libjpeg decodes at 1/2, for noisy pictures and photos
alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """The number of images in one bucket, their bytes and their shards.

    If nobody has counted the bytes, an image of bucket 512 is taken to have 1024 x 1024 pixels of a
    quarter of a byte each.
    """

    samples: int
    nbytes: int = 0
    shards: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The images a second of one device, and the source of that figure."""

    each: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The choices that decide what is stored of each sample, and how many samples a shard has."""

    model: str = "sd2"
    latents: str = "sample"
    flip: bool = False
    text: str = "emb"
    tokens: int = TOKENS
    """The number of tokens in a caption, for models that store no padding."""
    samples_per_shard: int = 10_000
    decode: str = FAST

    @property
    def is_of_text(self) -> bool:
        return self.latents == "none"

    @property
    def preset(self) -> Preset:
        return PRESETS[self.model]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The number of devices, and the dollars for an hour of one, 0 if not known."""

    devices: int = 1
    price: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """The time, money and bytes that encoding one resolution takes."""

    resolution: int
    samples: int
    speed: Speed
    device_hours: float
    text_share: float
    """The share of the operations that text takes, and so of hours derived from operations."""
    wall_hours: float
    dollars: float | None
    cores_each: float
    nbytes_read: int
    nbytes_written: int
    text_nbytes: int
    """The bytes of text among the bytes written."""
    shards: int
    gets: int
    puts: int

    @property
    def request_dollars(self) -> float:
        return self.gets * GET_DOLLARS + self.puts * PUT_DOLLARS

    @property
    def month_dollars(self) -> float:
        return self.nbytes_written / 1e9 * GB_MONTH_DOLLARS

    @property
    def bytes_a_second_each(self) -> float:
        """Return the bytes a second that the machine of one device reads and writes."""
        return (self.nbytes_read + self.nbytes_written) / self.samples * self.speed.each


@dataclass(frozen=True, kw_only=True, slots=True)
class OneRun:
    """The time, money and bytes of one run that encodes several resolutions.

    It reads each image once and encodes each caption once.
    """

    device_hours: float
    wall_hours: float
    dollars: float | None
    nbytes_read: int
    nbytes_written: int
    nbytes_written_text_once: int
    """The bytes written if the text is stored once, in a separate dataset."""


def estimate(
    buckets: Mapping[int, Bucket], speeds: Mapping[int, Speed], choice: Choice, fleet: Fleet
) -> list[Phase]:
    """Return an estimate for each resolution that has images and a known speed.

    The resolutions are the buckets, and a resolution has the images of its bucket and of all higher
    ones. Text alone has one estimate, for the lowest resolution and so for all images. Raise
    UsageError if there are no images.
    """
    if not any(bucket.samples for bucket in buckets.values()):
        raise UsageError("there are no images to plan for: pack some, or give --counts 256=N,512=N")
    return [
        _estimate_phase(
            resolution,
            {name: buckets[name] for name in buckets_of_phase(resolution, sorted(buckets))},
            speeds[resolution],
            choice,
            fleet,
        )
        for resolution in sorted(buckets)[: 1 if choice.is_of_text else None]
        if resolution in speeds and any(buckets[n].samples for n in buckets if n >= resolution)
    ]


def estimate_one_run(phases: Sequence[Phase], choice: Choice, fleet: Fleet) -> OneRun:
    """Return an estimate for one run that encodes several resolutions.

    `phases` are the estimates for each, from the lowest on, which has all images and captions.
    """
    lowest, *others = phases
    hours = sum(phase.device_hours for phase in phases)
    hours -= sum(phase.text_share * phase.device_hours for phase in others)
    text = sample_nbytes(lowest.resolution, replace(choice, latents="none"))
    return OneRun(
        device_hours=hours,
        wall_hours=hours / fleet.devices,
        dollars=hours * fleet.price if fleet.price else None,
        nbytes_read=lowest.nbytes_read,
        nbytes_written=sum(phase.nbytes_written for phase in phases),
        nbytes_written_text_once=lowest.samples * text
        + sum(phase.nbytes_written - phase.text_nbytes for phase in phases),
    )


def _estimate_phase(
    resolution: int, buckets: Mapping[int, Bucket], speed: Speed, choice: Choice, fleet: Fleet
) -> Phase:
    samples = sum(bucket.samples for bucket in buckets.values())
    decoded = {} if choice.is_of_text else buckets
    decoding_s = sum(
        b.samples * decode_s(2 * name, resolution, choice) for name, b in decoded.items()
    )
    hours = samples / speed.each / 3600
    each = sample_nbytes(resolution, choice)
    alone = sample_nbytes(resolution, replace(choice, text="none"))
    shards = sum(b.shards or -(-b.samples // choice.samples_per_shard) for b in buckets.values())
    nbytes = samples * each
    nbytes_read = sum(b.nbytes or b.samples * name**2 for name, b in buckets.items())
    gets = shards * max(1, -(-nbytes_read // max(1, shards * CHUNK_NBYTES)))
    if choice.is_of_text and nbytes_read >= LARGE_NBYTES * samples:
        nbytes_read, gets = samples * TAIL_NBYTES, samples + 2 * shards
    return Phase(
        resolution=resolution,
        samples=samples,
        speed=speed,
        device_hours=hours,
        text_share=text_gflops(choice) / gflops(resolution, choice),
        wall_hours=hours / fleet.devices,
        dollars=hours * fleet.price if fleet.price else None,
        cores_each=decoding_s / samples * speed.each,
        nbytes_read=nbytes_read,
        nbytes_written=nbytes,
        text_nbytes=samples * (each - alone),
        shards=shards,
        gets=gets,
        puts=shards * (count_puts(nbytes // max(1, shards)) + BESIDE),
    )


def decode_s(side: int, resolution: int, choice: Choice) -> float:
    """Return the seconds that one core needs to decode, scale and crop a square JPEG.

    `side` is the side of the JPEG in pixels. A large JPEG takes less if `choice` has it decoded at
    a reduced scale.
    """
    is_reduced = choice.decode == FAST and side >= 2 * OVERSAMPLING * resolution
    return side**2 * DECODE_S_PER_PIXEL * (REDUCED_SHARE if is_reduced else 1)


def sample_nbytes(resolution: int, choice: Choice) -> int:
    """Return the bytes of a latent sample in its tar: arrays, json and caption, with headers."""
    return sum(BLOCK + padded(array.nbytes) for array in _arrays(resolution, choice)) + 4 * BLOCK


def _arrays(resolution: int, choice: Choice) -> Iterator[Field]:
    preset = choice.preset
    channels = preset.channels * (2 if choice.latents == "moments" else 1)
    side = resolution // preset.factor
    if not choice.is_of_text:
        for name in (LATENT, FLIPPED) if choice.flip else (LATENT,):
            yield Field(name=name, dtype="<f2", shape=(channels, side, side))
    sizes = [array for array in preset.arrays if array.name in OF_SIZES]
    if choice.text == "emb":
        for array in preset.arrays:
            if choice.is_of_text and array in sizes:
                continue
            shape = array.shape_at(choice.tokens)
            yield Field(name=array.name, dtype=array.dtype, shape=shape)
    if choice.text == "tokens":
        for run in preset.runs:
            yield Field(name="tokens.npy", dtype="<i4", shape=(run.listed,))
            if choice.model not in CLIP_ALONE:
                yield Field(name="tokens_mask.npy", dtype="|u1", shape=(run.listed,))
        for array in [] if choice.is_of_text else sizes:
            yield Field(name=array.name, dtype=array.dtype, shape=array.shape)


def count_puts(nbytes: int) -> int:
    """Return the number of requests that write an object of this size to S3.

    It is one for a small object, else one for each part, one to begin and one to end.
    """
    return 1 if nbytes <= PART_NBYTES else 2 + -(-nbytes // PART_NBYTES)


def stored_by_choice(samples: int, resolution: int, choice: Choice) -> dict[tuple[str, str], int]:
    """Return the bytes that would be stored, for each pair of `--latents` and `--text`.

    `mean` is left out, as it takes the same bytes as `sample`; so is `moments` for a VAE that has
    no distribution.
    """
    kept = ("sample",) if choice.preset.vae == DC else ("sample", "moments")
    return {
        (latents, text): samples
        * sample_nbytes(resolution, replace(choice, latents=latents, text=text))
        for latents in (*kept, "none")
        for text in TEXTS
        if (latents, text) != ("none", "none")
    }


# Of an image at 256 and at 512, a multiplication and an addition being two: what torch's flop
# counter says of the encoder of each class, built without weights from the config of the preset.
VAE_GFLOPS: Mapping[str, tuple[float, float]] = {
    KL: (272.7, 1116.7),
    FLUX2: (273.3, 1118.8),
    QWEN: (437.9, 1770.8),
    DC: (323.7, 1294.9),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU with its images a second at 256 and at 512, and its dollars an hour (0: not known)."""

    at_256: float
    at_512: float
    price: float = 0.0
    price_of: str = ""


# They count group norms that turn channels_last to and fro, and divisions by one: 0.6 of the 2.0 GB
# that an image at 256 moves then. The divisions are left out now. With group norms of torch 2.15,
# 1.4 GB remain. So a GPU may be a quarter or more faster, which none has measured. An H100 may do
# 700 to 900.
GPUS = {
    "A10G": Gpu(
        at_256=93, at_512=25, price=1.006, price_of="g5.xlarge on demand, us-east-1, June 2026"
    ),
    "A100": Gpu(
        at_256=325, at_512=87, price=3.0, price_of="what Anyscale paid in its run, reserved"
    ),
    "H100": Gpu(at_256=800, at_512=212),
    "H200": Gpu(at_256=888, at_512=237),
}
# List prices of S3 Standard in us-east-1: of a PUT, of a GET, and of a GB for a month.
PUT_DOLLARS, GET_DOLLARS, GB_MONTH_DOLLARS = 0.005 / 1000, 0.0004 / 1000, 0.023


def find_gpu(name: str) -> Gpu:
    found = GPUS.get(name.upper())
    if found is None:
        raise UsageError(
            f"--gpu {name} is not in the table ({', '.join(GPUS)}): give --rate 256=N,512=N, or "
            'the --trial of a "wdsprep encode --limit" on that GPU'
        )
    return found


def derived_rate(gpu: Gpu, resolution: int, choice: Choice) -> float:
    """Return the images a second of a GPU for a model and a resolution.

    It is derived from the GPU's speed at 256 or 512 and the ratio of the operations.
    """
    at = 256 if resolution < 384 else 512
    known = gpu.at_256 if at == 256 else gpu.at_512
    return known * gflops(at, Choice()) / gflops(resolution, choice)


def gflops(resolution: int, choice: Choice) -> float:
    """Return the operations that encoding an image and its caption takes, in billions.

    With `flip` the mirror image is counted too; for text alone only the caption is. The VAE's
    convolutions grow with the pixels, and its attention with their square: the figures at two sizes
    tell how much each takes. Those of a VAE that runs in TF32 count twice, since a GPU does half as
    many a second.
    """
    if choice.is_of_text:
        return text_gflops(choice)
    at_256, at_512 = VAE_GFLOPS[choice.preset.vae]
    attention = (at_512 - 4 * at_256) / 12
    pixels = (resolution / 256) ** 2
    image = (at_256 - attention) * pixels + attention * pixels**2
    image *= 1 if choice.model in IN_FP16 else 2
    return (1 + choice.flip) * image + text_gflops(choice)


def text_gflops(choice: Choice) -> float:
    """Return the operations that encoding a caption takes, in billions; 0 without embeddings."""
    if choice.text != "emb":
        return 0.0
    runs = choice.preset.runs
    return sum(run.tower.operations(run.tokens(choice.tokens)) for run in runs) / 1e9
