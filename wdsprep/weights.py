"""Which files of a model are needed, and the digest that tells two models apart."""

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

VAE_WEIGHTS = "diffusion_pytorch_model"
TEXT_WEIGHTS = "model"
BLOCK_NBYTES = 8 << 20
VOCABULARY = ("tokenizer/vocab.json", "tokenizer/merges.txt")
TOKENIZER = (
    "tokenizer/added_tokens.json",
    "tokenizer/special_tokens_map.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    *VOCABULARY,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which of the files that are there are needed, and which are needed but not there."""

    vae: str
    files: tuple[str, ...]
    missing: tuple[str, ...]
    pickled: tuple[str, ...]

    @property
    def is_best(self) -> bool:
        return not self.missing and not any(".fp16." in name for name in self.files)

    @staticmethod
    def of(names: frozenset[str], text: str) -> "Wanted":
        is_bare = "config.json" in names and not names & {"vae/config.json", "model_index.json"}
        vae = "" if is_bare else "vae"
        prefix = f"{vae}/" if vae else ""
        wanted = [f"{prefix}config.json", *_weights(names, f"{prefix}{VAE_WEIGHTS}")]
        if text == "emb":
            wanted += ["text_encoder/config.json"]
            wanted += _weights(names, f"text_encoder/{TEXT_WEIGHTS}")
        if text != "none":
            wanted += [name for name in TOKENIZER if name in names]
            wanted += [] if "tokenizer/tokenizer.json" in names else VOCABULARY
        wanted = sorted(set(wanted))
        missing = tuple(name for name in wanted if name not in names)
        stems = {name.rpartition("/")[0] for name in missing if name.endswith(".safetensors")}
        pickled = (n for n in sorted(names) if n.endswith(".bin") and n.rpartition("/")[0] in stems)
        return Wanted(vae=vae, files=tuple(wanted), missing=missing, pickled=tuple(pickled))


def _weights(names: frozenset[str], stem: str) -> list[str]:
    """One file, or an index and the parts that it is of. Half precision only where there is nothing
    else: fp32 is computed from the same files."""
    whole = f"{stem}.safetensors"
    for half in ("", ".fp16"):
        if (one := f"{stem}{half}.safetensors") in names:
            return [one]
        if (index := f"{stem}.safetensors.index{half}.json") in names:
            return [index, *_parts(names, stem + half)]
    return [whole]


def _parts(names: frozenset[str], stem: str) -> list[str]:
    """All that the name of one tells of."""
    named = re.compile(rf"{re.escape(stem)}-\d+-of-(\d+)\.safetensors")
    of = max((match[1] for name in names if (match := named.fullmatch(name))), default="00001")
    return [f"{stem}-{number:05d}-of-{of}.safetensors" for number in range(1, int(of) + 1)]


def digest(folder: Path, files: Sequence[str]) -> str:
    """What `sha256sum FILES | sha256sum` says. Hashing leaves the GIL, so files go side by side."""
    with ThreadPoolExecutor(4) as pool:
        sums = pool.map(lambda file: _sha256(folder / file), files)
        lines = [f"{found}  {file}\n" for found, file in zip(sums, files, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK_NBYTES))
    with path.open("rb", buffering=0) as file:
        while nbytes := file.readinto(buffer):
            found.update(buffer[:nbytes])
    return found.hexdigest()
