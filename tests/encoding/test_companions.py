"""What is stored of a caption does not depend on the captions that it meets on the way."""

import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import wdsprep
from tests.encoding.test_pipelines import encoder
from tests.kit.encoders import SIDE, load_latent_encoder, rows_of
from tests.kit.encodes import encode_here, latents_of, packed, pictures
from tests.kit.families import each_family
from wdsprep.encoding.models.base import Tokens
from wdsprep.encoding.models.encoder import LatentEncoder
from wdsprep.errors import UsageError

WORDS = ("a", "big", "red", "house")
ORDERS = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS if len({a, b, c}) == 3]
CAPTIONS = (
    "a photo of a cat",
    "",
    "word " * 1500,
    'a sign that says "OPEN"',
    "犬が走る、海辺で",
    "A  <b>photo</b> of M&amp;Ms",
    "a",
    "two dogs and 'a cat'",
    'привет мир “цитата” "and another"',
    "x" * 3000,
    "\n",
    "🦊🦊 été",
    "a red house by the sea " * 7,
    *ORDERS[:4],
    *(f'{text} "{text}"' for text in ORDERS[:2]),
)
"""Of many lengths, with quotes and without, in several scripts; some of one length."""

Family = Callable[[str], Path]


load = partial(load_latent_encoder, latents="none")
cached_encoder = cache(load)


def batches(texts: Sequence[Tokens]) -> list[list[Tokens]]:
    """Those that the engine would put into one, on a device that takes many at a time."""
    by_shape: dict[tuple[int, ...], list[Tokens]] = {}
    for text in texts:
        by_shape.setdefault(text.shape, []).append(text)
    return list(by_shape.values())


def rows(made: LatentEncoder, texts: Sequence[Tokens]) -> list[dict[str, Tensor]]:
    """What is stored of each caption."""
    found = made.encode_texts(texts)
    assert found.ok.all()
    return rows_of(made, found)


@pytest.mark.parametrize("name", each_family())
def test_tokens_of_captions_together_are_those_of_each_alone(name: str, family: Family) -> None:
    made = cached_encoder(family(name))
    alone = [made.tokens([caption])[0] for caption in CAPTIONS]
    assert made.tokens(CAPTIONS) == alone
    assert made.tokens(CAPTIONS[::-1]) == alone[::-1]
    for one, other in pairwise(alone):
        assert made.tokens([one.caption, other.caption]) == [one, other]


@pytest.mark.parametrize("name", each_family())
def test_arrays_of_captions_together_are_those_of_each_alone(name: str, family: Family) -> None:
    """Within what kernels differ by for batches of other sizes."""
    made = cached_encoder(family(name))
    taken = [text for text in made.tokens(CAPTIONS) if text.count or not text.caption]
    some = batches(taken)  # without those that are rejects, as no length holds them
    assert len(taken) >= len(CAPTIONS) - 1
    assert max(map(len, some)) > 1
    for batch in some:
        together = rows(made, batch)
        for text, found in zip(batch, together, strict=True):
            (wanted,) = rows(made, [text])
            assert found.keys() == wanted.keys()
            for member, value in wanted.items():
                assert found[member].shape == value.shape, (member, text.caption)
                torch.testing.assert_close(found[member], value, rtol=2e-2, atol=2e-3)


FUSIBLE = "def fusible(x, cache):\n    return torch.sigmoid(x * x + x) * x - torch.tanh(x)\n"


@pytest.mark.system
def test_a_scripted_function_computes_the_same_each_time(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that torch fuses once it has run, as it does on a GPU with that of Kolors."""
    load(family("Kolors"))  # imports it, without its warnings
    kolors = sys.modules["diffusers.pipelines.kolors.text_encoder"]
    ours, other = (torch.jit.CompilationUnit(FUSIBLE).fusible for _ in range(2))
    monkeypatch.setattr(kolors, "apply_rotary_pos_emb", ours)
    torch._C._jit_override_can_fuse_on_cpu(True)
    torch._C._jit_set_te_must_use_llvm_cpu(False)
    try:
        made = load(family("Kolors"))
        first, *others = [rows(made, made.tokens(["a photo of a cat"])) for _ in range(3)]
        numbers = torch.linspace(-1, 1, 4096)
        plain, fused = (other(numbers, numbers) for _ in range(2))
    finally:
        torch._C._jit_override_can_fuse_on_cpu(False)
        torch._C._jit_set_te_must_use_llvm_cpu(True)
    assert not torch.equal(plain, fused)  # or this would show nothing
    for [row] in others:
        assert all(torch.equal(value, row[name]) for name, value in first[0].items())


@pytest.mark.parametrize("name", each_family())
def test_token_ids_of_captions_together_are_those_of_each_alone(name: str, family: Family) -> None:
    try:
        made = cached_encoder(family(name), text="tokens")
    except UsageError as refused:
        assert "leave --text tokens out" in str(refused)  # noqa: PT017  that is all it may say
        return
    together = rows(made, made.tokens(CAPTIONS))
    for caption, found in zip(CAPTIONS, together, strict=True):
        (wanted,) = rows(made, made.tokens([caption]))
        assert all(torch.equal(found[member], value) for member, value in wanted.items())


@pytest.mark.system
def test_what_klein_counts_of_a_long_caption_does_not_depend_on_a_short_one(family: Family) -> None:
    made = cached_encoder(family("Flux2Klein"))
    long, short = made.tokens(["word " * 3000, "a cat"])
    assert (long.cut, short.cut) == (True, False)
    assert long.count > 12_000
    assert long.shape == short.shape


@pytest.mark.system
def test_captions_with_and_without_quotes_meet_in_one_step_of_training(
    family: Family, tmp_path: Path
) -> None:
    made = pictures(tmp_path / "downloads", range(8))
    for number, path in enumerate(sorted(made.glob("*.txt"))):
        path.write_text(f'a sign that says "{number}"' if number % 2 else "two dogs")
    images, model = packed(made, tmp_path / "images"), str(family("HunyuanImage"))
    how = wdsprep.Encode(resolution=SIDE, model=model, device="cpu", batch_size=4)
    (batch, *_) = wdsprep.load(str(images), encode=how, global_batch=8, epochs=1)
    encode_here(images, tmp_path / "stored", model=model, resolution=SIDE)
    stored = latents_of(tmp_path / "stored")
    assert {*batch["key"]} == {*stored}
    assert {bool(sample["emb_2_mask.npy"].any()) for sample in stored.values()} == {False, True}
    for key, mask in zip(batch["key"], batch["emb_2_mask"], strict=True):
        assert mask.tolist() == stored[key]["emb_2_mask.npy"].tolist()


def test_a_token_of_several_vectors_is_still_written_out(family: Family, tmp_path: Path) -> None:
    """Textual inversion calls the further ones _1, _2; they can be saved with a pipeline."""
    folder = shutil.copytree(family("StableDiffusionXL"), tmp_path / "own")
    for name in ("tokenizer", "tokenizer_2"):
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        tokenizer.add_tokens(["<toy>", "<toy>_1"])
        tokenizer.save_pretrained(folder / name)
    wanted = tokenizer.convert_tokens_to_ids(["<toy>", "<toy>_1"])
    for caption in ("a <toy>", "a <toy> by the sea"):
        (found,) = encoder(folder, text="tokens").tokens([caption])
        ids = [*found.ids["tokens_2.npy"]]
        assert ids[ids.index(wanted[0]) + 1] == wanted[1]
