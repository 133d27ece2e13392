"""Between text and token ids: the checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.errors import CheckpointError, UsageError

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """A transformers tokenizer, with its failures made typed."""

    def __init__(self, tokenizer: Any, load_seconds: float = 0.0) -> None:
        self.load_seconds = load_seconds
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer(text)["input_ids"])

    def chat(self, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of messages in the chat template, ready for the model's answer.

        messages: each with a "role" and its "content", or what the user says first
        Raises UsageError if there is no template, or it does not take them.
        """
        if not self._tokenizer.chat_template:
            raise UsageError("the model has no chat template: give it plain text")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise UsageError(f"the chat template does not take these messages: {reason}") from error
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def save(self, directory: Path) -> None:
        """Writes it beside a checkpoint in `directory`."""
        self._tokenizer.save_pretrained(directory)

    @property
    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def _has_tokenizer(path: Path) -> bool:
    if path.is_dir():
        return any((path / name).exists() for name in _FILES)
    from offload.checkpoint.gguf import GGUFSource

    # Opening it here also checks its lengths before transformers' reader sees the file.
    source = GGUFSource(path)
    source.close()
    return "tokenizer.ggml.model" in source.metadata


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer beside (or inside) a checkpoint, None if there is none.

    Raises CheckpointError if it cannot be read.
    """
    if not _has_tokenizer(path):
        return None
    from transformers.utils import logging

    began = time.perf_counter()
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = _from_folder(path) if path.is_dir() else _byte_level(path) or _from_gguf(path)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # The Rust tokenizer's panics are BaseExceptions.
        raise CheckpointError(
            f"cannot read the tokenizer of {path}: {type(error).__name__}: {error}"
        ) from error
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
    return Tokenizer(tokenizer, time.perf_counter() - began)


def _from_folder(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _from_gguf(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def _byte_level(path: Path) -> Any:
    """A GGUF file's tokenizer if it is of GPT-2's kind, as Llama 3's and Qwen's are; else None.

    The same as AutoTokenizer's, which reads the whole header once more for the model's config, in
    several seconds.
    """
    try:
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    except ImportError:
        # Older versions read a tokenizer by AutoTokenizer alone.
        return None
    architecture, parts, settings = get_gguf_tokenizer(str(path))
    if parts.get("tokenizer_type") != "gpt2":
        return None
    tokenizer, more = convert_gguf_tokenizer(architecture, parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings | more)


def check_same_vocabulary(
    name: str,
    drafter: Tokenizer | None,
    drafter_tokens: int,
    target: Tokenizer | None,
    target_tokens: int,
) -> None:
    """Raises UsageError if the drafter `name` has other tokens than the target.

    Where both have a tokenizer these decide, since models of one family pad their matrices to
    different sizes; otherwise the sizes do.
    """
    if drafter is None or target is None:
        if drafter_tokens != target_tokens:
            raise UsageError(
                f"the drafter {name} has a vocabulary of {drafter_tokens} tokens, the model one of "
                f"{target_tokens}; they must be the same"
            )
        return
    theirs, ours = drafter.vocabulary, target.vocabulary
    if theirs != ours:
        same = len(theirs.items() & ours.items())
        raise UsageError(
            f"the drafter {name} has another vocabulary: {len(theirs)} tokens against the model's "
            f"{len(ours)}, of which {same} are the same"
        )
