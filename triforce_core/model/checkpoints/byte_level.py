"""Byte-level BPE tokenizers from GGUF files: the kind of GPT-2, Llama 3 and Qwen.

They are built from the file's metadata as transformers would build them, without loading it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split
from tokenizers.pre_tokenizers import Sequence as Steps

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
_SEED_CODER = _QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
# Patterns by llama.cpp's names; None is GPT-2's pattern, which is built into the library.
_SPLITS: Mapping[str, str | None] = {
    "gpt-2": None,
    "refact": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3),
    "seed-coder": _SEED_CODER,
}
# For these, each digit is a piece of its own, before GPT-2's pattern.
_DIGITS = ("refact",)
# For these, as in llama.cpp, a piece that is a token as a whole is not merged, and a text begins
# with BOS unless the file says otherwise.
_WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")
_CONTROL, _USER_DEFINED = 3, 4
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class ByteLevelTokenizer:
    """A tokenizer Backend.

    names: special tokens by the names that a chat template uses
    chat_template: the template, or None
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """metadata: metadata of a file for which `is_known` is true

        Raises KeyError, IndexError or ValueError if the metadata is inconsistent.
        """
        about = {
            key.removeprefix("tokenizer.ggml."): value
            for key, value in metadata.items()
            if key.startswith("tokenizer.ggml.")
        }
        tokens: Sequence[str] = about["tokens"].values
        merges = [tuple(merge.split(" ")) for merge in about["merges"].values]
        kinds = about["token_type"].values if "token_type" in about else [0] * len(tokens)
        ids = {name: about.get(f"{key}_token_id") for name, key in _NAMED.items()}
        ids = {name: i for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
        self.names = {name: tokens[i] for name, i in ids.items()}
        control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
        own = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
        # Added tokens are literal; all others are spelled in the byte alphabet.
        added, alphabet = {*control, *own, *self.names.values()}, set(ByteLevel.alphabet())
        vocabulary = {
            token if token in added else _spelled(token, alphabet): i
            for i, token in enumerate(tokens)
        }
        llama3 = about["pre"] in _WHOLE_FIRST
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=llama3))
        tokenizer.pre_tokenizer = _split(about["pre"])
        tokenizer.decoder = decoders.ByteLevel()
        special = [*control, *self.names.values()]
        tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in own])
        self.chat_template: str | None = metadata.get("tokenizer.chat_template")
        self.tokenizer = tokenizer
        self._adds = {
            "bos_token": bool(about.get("add_bos_token", llama3)),
            "eos_token": bool(about.get("add_eos_token", False)),
        }
        self._before, self._after = (
            [ids[name]] if adds and name in ids else [] for name, adds in self._adds.items()
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return token ids. special: whether to add the special tokens around the text"""
        # Batch encoding releases the interpreter's lock, so other threads continue meanwhile.
        (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        token_ids = found.ids
        return [*self._before, *token_ids, *self._after] if special else token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens. Special tokens are skipped."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    def in_transformers(self) -> Any:
        """Return an equivalent tokenizer of transformers, which also renders chat templates."""
        from transformers import PreTrainedTokenizerFast

        settings = {f"add_{name}": adds for name, adds in self._adds.items()}
        return PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer,
            chat_template=self.chat_template,
            **self.names,
            **settings,
        )


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
    return Steps(
        [
            Split(Regex(pattern), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
