"""Small tokenizers of the classes that the families have, made without a network.

All know the words that the toy model in the package knows: its merges are read from there, so that
captions become a few dozen tokens and not one for each letter. Ids are counted in a fixed order, so
the files are the same bytes in every run.
"""

import io
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode

import wdsprep

TINY = Path(wdsprep.__file__).parent / "encoding/models/tiny/tokenizer"
PARTS = 240
"""merges of a byte-level vocabulary"""
BYTES = list(bytes_to_unicode().values())
MARKS = "0123456789.,:;!?'\"()-+&/%ABCDEFGHIJKLMNOPQRSTUVWXYZé"
QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
QWEN_LISTS_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
    "{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
)
QWEN_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
ROLES = ["system", "user", "assistant"]
"""one token each, so that a template's end is as long as the pipelines count it"""
QWEN_PLACES = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def clip(length: int = 77) -> transformers.CLIPTokenizer:
    """That of the toy model, whole."""
    return transformers.CLIPTokenizer.from_pretrained(str(TINY), model_max_length=length)


def t5(length: int = 512) -> transformers.T5Tokenizer:
    """Unigrams of single letters and of whole words; what it does not know becomes <unk>."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return transformers.T5Tokenizer(vocab=special + _scored(), extra_ids=0, model_max_length=length)


def byt5() -> transformers.ByT5Tokenizer:
    return transformers.ByT5Tokenizer()


def gemma() -> transformers.GemmaTokenizer:
    """BPE that falls back to bytes, with a start token before every text."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    raw = [f"<0x{each:02X}>" for each in range(256)]
    merges = [pair for pair in _merges() if all(part.isascii() for part in pair)]
    letters = ["▁", *sorted({*"abcdefghijklmnopqrstuvwxyz", *MARKS, *_single(merges)})]
    pieces = special + raw + letters + ["".join(pair) for pair in merges]
    return transformers.GemmaTokenizer(vocab=_numbered(pieces), merges=merges, add_bos_token=True)


def qwen() -> transformers.Qwen2Tokenizer:
    merges = _merges()
    pieces = BYTES + ["".join(pair) for pair in merges] + QWEN_MARKS + QWEN_PLACES
    made = transformers.Qwen2Tokenizer(
        vocab=_numbered(pieces),
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[*QWEN_MARKS[1:], *QWEN_PLACES],
        model_max_length=131072,
    )
    made.add_tokens(ROLES)
    made.chat_template = QWEN_TEMPLATE
    return made


def llama() -> transformers.PreTrainedTokenizerFast:
    """No token for padding: HiDream's pipeline takes the one for the end."""
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return _byte_level(special, ["<|begin_of_text|>"], model_max_length=131072)


def mistral() -> transformers.PreTrainedTokenizerFast:
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return _byte_level(special, ["<s>"], model_max_length=512)


def glm() -> transformers.PreTrainedTokenizerFast:
    """Pads on the left, and two tokens before every text."""
    special = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    return _byte_level(special, ["[gMASK]", "<sop>"], padding_side="left", model_max_length=128000)


def chatglm(folder: Path) -> Any:
    """Kolors's own class: it reads a model of sentencepiece, which is trained here on the words."""
    import sentencepiece
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer

    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_words() * 2),
        model_writer=trained,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        num_threads=1,
        minloglevel=2,
    )
    file = folder / "tokenizer.model"
    file.write_bytes(trained.getvalue())
    return ChatGLMTokenizer(str(file))


def _byte_level(
    special: dict[str, str], before: list[str], **more: Any
) -> transformers.PreTrainedTokenizerFast:
    merges = _merges()
    marks = list(dict.fromkeys([*special.values(), *before]))
    vocabulary = _numbered(BYTES + ["".join(pair) for pair in merges] + marks)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(marks)
    made.post_processor = processors.TemplateProcessing(
        single=[*before, "$A"],
        pair=[*before, "$A", "$B"],
        special_tokens=[(each, vocabulary[each]) for each in before],
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special, **more)


def _numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(pieces)}


def _merges() -> list[tuple[str, str]]:
    """Those that do not end a word: other vocabularies than CLIP's do not mark that."""
    lines = TINY.joinpath("merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    pairs = [(left, right) for left, right in map(str.split, lines)]
    return [pair for pair in pairs if not any(each.endswith("</w>") for each in pair)][:PARTS]


def _single(merges: list[tuple[str, str]]) -> set[str]:
    return {part for pair in merges for part in pair if len(part) == 1}


def _words() -> list[str]:
    lines = TINY.joinpath("merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    ends = ["".join(line.split()) for line in lines if line.endswith("</w>")]
    return [each.removesuffix("</w>") for each in ends if each.isascii() and len(each) > 6]


def _scored() -> list[tuple[str, float]]:
    """Words before letters, the first the likeliest."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", *MARKS]
    words = [f"▁{each}" for each in _words()]
    known = [("▁", -4.0), *((each, -8.0) for each in letters)]
    return known + [(each, -5.0 - number / 1000) for number, each in enumerate(words)]
