"""The tokenizer in a GGUF file, where it is byte-level BPE: GPT-2's kind, as Llama 3's and Qwen's.

It is made of the file's metadata, as transformers would make it, without loading transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps

# How a text is cut before its pieces are merged, as published with each family.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# By the names that llama.cpp gives them; None is GPT-2's own way, built into the library.
_SPLITS: Mapping[str, str | None] = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}
_CONTROL, _USER_DEFINED = 3, 4
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class ByteLevelTokenizer:
    """Text to tokens and back.

    names: what a chat template calls its special tokens. chat_template: None if there is none
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """metadata: of a file that `is_known`. Raises KeyError, IndexError or ValueError for one
        that is not sound.
        """
        about = {
            key.removeprefix("tokenizer.ggml."): value
            for key, value in metadata.items()
            if key.startswith("tokenizer.ggml.")
        }
        tokens: Sequence[str] = about["tokens"].values
        alphabet = set(ByteLevel.alphabet())
        merges = [tuple(merge.split(" ")) for merge in about["merges"].values]
        vocabulary = {_spelled(token, alphabet): i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        tokenizer.pre_tokenizer = _split(about["pre"])
        tokenizer.decoder = decoders.ByteLevel()
        kinds = about["token_type"].values if "token_type" in about else ()
        # Llama.cpp marks some tokens as control that are not: real ones are in the alphabet.
        control = [t for t, k in zip(tokens, kinds, strict=False) if k == _CONTROL]
        own = [t for t, k in zip(tokens, kinds, strict=False) if k == _USER_DEFINED]
        self.names = {
            name: tokens[about[f"{key}_token_id"]]
            for name, key in _NAMED.items()
            if f"{key}_token_id" in about
        }
        special = [token for token in control if alphabet.issuperset(token)]
        special += [token for token in self.names.values() if token in vocabulary]
        tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in own if t in vocabulary])
        self.chat_template: str | None = metadata.get("tokenizer.chat_template")
        self.tokenizer = tokenizer
        self._adds = {name: bool(about.get(f"add_{name}")) for name in ("bos_token", "eos_token")}
        self._before, self._after = (
            [tokens.index(self.names[name])] if adds and name in self.names else []
            for name, adds in self._adds.items()
        )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text. special: with what the model wants before and behind it."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [*self._before, *token_ids, *self._after] if special else token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; special ones have none."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    def in_transformers(self) -> Any:
        """The same as a tokenizer of transformers, which renders chat templates too."""
        from transformers import PreTrainedTokenizerFast

        settings = {f"add_{name}": adds for name, adds in self._adds.items()}
        return PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer,
            chat_template=self.chat_template,
            **self.names,
            **settings,
        )


def is_known(metadata: Mapping[str, Any]) -> bool:
    """Whether a GGUF file's tokenizer is one that is made here."""
    model, split = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    return model == "gpt2" and split in _SPLITS and "tokenizer.ggml.merges" in metadata


def _spelled(token: str, alphabet: set[str]) -> str:
    """In the alphabet in which byte-level vocabularies write bytes."""
    if alphabet.issuperset(token):
        return token
    whole = ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in whole.pre_tokenize_str(token))


def _split(name: str) -> ByteLevel | Steps:
    pattern = _SPLITS[name]
    if pattern is None:
        return ByteLevel(add_prefix_space=False)
    return Steps(
        [
            Split(Regex(pattern), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
