"""Captions are tokenized many together, and once. What comes of that is in `test_companions`."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.encoding.test_pipelines import encoder
from wdsprep.encoding.models.encoder import LatentEncoder

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


def begun(folder: Path, calls: Counter[int]) -> LatentEncoder:
    """An encoder that has seen how its pipeline calls tokenizers; what it called is forgotten."""
    made = encoder(folder)
    made.tokens(["a house"])
    calls.clear()
    return made


def test_a_batch_needs_a_call_for_each_way_to_call_a_tokenizer(
    family: Family, calls: Counter[int]
) -> None:
    """SDXL calls two tokenizers, each with the padding that it wants and to see what is cut."""
    made = begun(family("StableDiffusionXL"), calls)
    captions = [f"a photo of {n} dogs" + " and a cat" * (n % 5) for n in range(32)]
    tokens = made.tokens(captions)
    assert calls == {32: 4}
    made.text_rows(tokens)
    assert calls == {32: 4}


def test_a_long_caption_is_neither_padded_to_nor_kept(family: Family, calls: Counter[int]) -> None:
    """It may be a file of 16 MB, and all others would be padded to its length."""
    made = begun(family("StableDiffusionXL"), calls)
    *_, long = made.tokens(["a cat", "a dog", "word " * 10_000])
    assert (calls[2], calls[3]) == (4, 0)
    assert long.cut
    assert long.count > 10_000
    kept = [len(row["input_ids"]) for row in long.results.values()]
    assert kept
    assert max(kept) == 77


def test_only_the_caption_that_a_template_holds_is_replaced(
    family: Family, calls: Counter[int]
) -> None:
    made = begun(family("QwenImage"), calls)
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
