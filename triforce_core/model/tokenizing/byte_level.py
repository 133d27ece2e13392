"""Byte-level BPE tokenizers from GGUF files: the kind of GPT-2, Llama 3 and Qwen.

They are built from the file's metadata as transformers would build them, without loading it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from triforce_core.model.tokenizing.gguf_tokenizer import GGUFTokenizer

# Patterns that split a text before merging, as published with each family.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# o200k, of gpt-oss.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{_CONTRACTION}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# As Qwen2's, with marks as parts of words.
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{M}\p{N}]+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Of numbers, groups of three digits from their end; Chinese, Japanese, Korean, Thai, Lao, Khmer and
# Burmese.
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    r"\u0e40-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    r"\u1100-\u11ff]+",
)
_SEED_CODER = _QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
# Patterns by llama.cpp's names; None is GPT-2's pattern, which is built into the library.
_SPLITS: Mapping[str, str | None] = {
    "gpt-2": None,
    **dict.fromkeys(("refact", "smollm", "command-r", "olmo", "exaone4"), None),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    **dict.fromkeys(("pixtral", "lfm2"), _LLAMA3),
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "laguna": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "minimax-m2": _GPT4O,
    **dict.fromkeys(("deepseek-v3", "afmoe"), _DEEPSEEK3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3),
    "seed-coder": _SEED_CODER,
}
# For these, each digit is a piece of its own, before GPT-2's pattern.
_DIGITS = ("refact", "command-r")
# For these, what matches other patterns is divided first: lines; numbers, and Chinese and Japanese.
_FIRST = {
    "laguna": (r"[^\n]+|\n+",),
    "deepseek-v3": (r"\p{N}{1,3}", r"[一-龥\u3040-\u309f\u30a0-\u30ff]+"),
    "afmoe": _AFMOE,
}
# For these, as in llama.cpp, a piece that is a token as a whole is not merged, and a text begins
# with BOS unless the file says otherwise.
_WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken", "pixtral", "lfm2")


class ByteLevelTokenizer(GGUFTokenizer):
    """A tokenizer of a file for which `is_known` is true."""

    def _library(
        self, about: Mapping[str, Any], tokens: Sequence[str], added: Set[str]
    ) -> Tokenizer:
        merges = [tuple(merge.split(" ")) for merge in about["merges"].values]
        # Added tokens are literal; all others are spelled in the byte alphabet.
        alphabet = set(ByteLevel.alphabet())
        vocabulary = {
            token if token in added else _spelled(token, alphabet): i
            for i, token in enumerate(tokens)
        }
        whole_first = about["pre"] in _WHOLE_FIRST
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_first))
        tokenizer.pre_tokenizer = _split(about["pre"])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _begins_with_bos(self, about: Mapping[str, Any]) -> bool:
        return about["pre"] in _WHOLE_FIRST


def is_known(metadata: Mapping[str, Any]) -> bool:
    """Whether this module supports a GGUF file's tokenizer."""
    model, split = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    return model == "gpt2" and split in _SPLITS and "tokenizer.ggml.merges" in metadata


def _spelled(token: str, alphabet: set[str]) -> str:
    """Spell a token in the byte alphabet of byte-level vocabularies."""
    if alphabet.issuperset(token):
        return token
    whole = ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in whole.pre_tokenize_str(token))


def _split(name: str) -> ByteLevel | Steps:
    pattern = _SPLITS[name]
    if pattern is None:
        split = ByteLevel(add_prefix_space=False)
        return Steps([Digits(individual_digits=True), split]) if name in _DIGITS else split
    patterns = (*_FIRST.get(name, ()), pattern)
    return Steps(
        [
            *(Split(Regex(each), behavior="isolated") for each in patterns),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
