"""What tokenizers from GGUF files have in common: special tokens, and encoding and decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any

from tokenizers import AddedToken, Tokenizer

from triforce_core.model.tokenizing.shown import shown

_CONTROL, _USER_DEFINED = 3, 4
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class GGUFTokenizer(ABC):
    """A tokenizer Backend. A kind of tokenizer says what splits and merges a text.

    names: special tokens by the names that a chat template uses
    chat_template: the template, or None
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """metadata: metadata of a file with a tokenizer of this kind

        Raises KeyError, IndexError or ValueError if the metadata is inconsistent.
        """
        about = {
            key.removeprefix("tokenizer.ggml."): value
            for key, value in metadata.items()
            if key.startswith("tokenizer.ggml.")
        }
        tokens: Sequence[str] = about["tokens"].values
        kinds = about["token_type"].values if "token_type" in about else [0] * len(tokens)
        ids = {name: about.get(f"{key}_token_id") for name, key in _NAMED.items()}
        ids = {name: i for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
        self.names = {name: tokens[i] for name, i in ids.items()}
        control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
        own = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED]
        tokenizer = self._library(about, tokens, {*control, *own, *self.names.values()})
        special = [*control, *self.names.values()]
        tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
        own = [token for token in own if tokenizer.token_to_id(token) is not None]
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in own])
        self.chat_template: str | None = metadata.get("tokenizer.chat_template")
        self.tokenizer = tokenizer
        # None if no special tokens are shown.
        self._hidden: set[int] | None = None
        if tags := shown(self.chat_template):
            self._hidden = {tokenizer.token_to_id(token) for token in set(special) - set(tags)}
        self._adds = {
            "bos_token": bool(about.get("add_bos_token", self._begins_with_bos(about))),
            "eos_token": bool(about.get("add_eos_token", False)),
        }
        self._before, self._after = (
            [ids[name]] if adds and name in ids else [] for name, adds in self._adds.items()
        )

    @abstractmethod
    def _library(
        self, about: Mapping[str, Any], tokens: Sequence[str], added: Set[str]
    ) -> Tokenizer:
        """Return a tokenizer of the library without its added tokens.

        about: metadata of the tokenizer
        added: tokens that are found in a text before it is split
        """

    @abstractmethod
    def _begins_with_bos(self, about: Mapping[str, Any]) -> bool:
        """Whether a text begins with BOS if the file does not say so."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return token ids. special: whether to add the special tokens around the text"""
        # Batch encoding releases the interpreter's lock, so other threads continue meanwhile.
        (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        token_ids = found.ids
        return [*self._before, *token_ids, *self._after] if special else token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens. Special tokens are skipped."""
        if self._hidden is None:
            return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        kept = [token for token in token_ids if token not in self._hidden]
        return self.tokenizer.decode(kept, skip_special_tokens=False)

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
