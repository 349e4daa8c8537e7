"""Captions are tokenized many together, and once."""

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.encoding.test_pipelines import encoder
from tests.kit.families import NAMES

CAPTIONS = (
    "a red house by the sea",
    "Two dogs & a <b>cat</b>",
    "",
    "two dogs",
    'a sign that says "open"',
    "a",
    "two dogs",
    "  an old boat ",
)

Family = Callable[[str], Path]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many calls of tokenizers there were, by the number of their texts."""
    found: Counter[int] = Counter()
    own = PreTrainedTokenizerBase.__call__

    def counted(self: Any, text: Any, *words: Any, **options: Any) -> Any:
        found[1 if isinstance(text, str) else len(text)] += 1
        return own(self, text, *words, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", counted)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_what_it_is_where_it_is_tokenized_again(name: str, family: Family) -> None:
    """To the bit, for captions that are of one shape. That their tokens are those of each alone is
    shown in `test_companions`."""
    made = encoder(family(name))
    together = made.tokens(CAPTIONS)
    for shape in {tokens.shape for tokens in together}:
        batch = [tokens for tokens in together if tokens.shape == shape]
        forgotten = [replace(tokens, results={}) for tokens in batch]
        wanted, found = made.text_rows(forgotten), made.text_rows(batch)
        assert wanted.arrays.keys() == found.arrays.keys()
        assert all(torch.equal(each, found.arrays[key]) for key, each in wanted.arrays.items())


def test_a_batch_needs_a_call_for_each_way_to_call_a_tokenizer(
    family: Family, calls: Counter[int]
) -> None:
    """SDXL calls two tokenizers, each with the padding that it wants and to see what is cut."""
    made = encoder(family("StableDiffusionXL"))
    made.tokens(["a house"])
    calls.clear()
    captions = [f"a photo of {n} dogs" + " and a cat" * (n % 5) for n in range(32)]
    tokens = made.tokens(captions)
    assert calls == {32: 4}
    made.text_rows(tokens)
    assert calls == {32: 4}


def test_only_the_caption_that_a_template_holds_is_replaced(
    family: Family, calls: Counter[int]
) -> None:
    made = encoder(family("QwenImage"))
    made.tokens(["a house"])
    calls.clear()
    tokens = made.tokens(["a red house", "the sea"])
    made.text_rows(tokens[:1])
    assert calls == {2: 1}


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
