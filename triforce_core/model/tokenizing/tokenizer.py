"""Tokenizers: conversion between text and token ids, and chat templates."""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from triforce_core.model.tokenizing.shown import shown
from triforce_offload.errors import CheckpointError, UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Messages of a chat: each has a "role" and a "content", and what else its template knows.
Messages = Sequence[Mapping[str, Any]]
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Backend(Protocol):
    """A tokenizer implementation."""

    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return token ids. special: whether to add the special tokens around a text"""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text. Special tokens are skipped."""

    def vocabulary(self) -> dict[str, int]: ...

    def in_transformers(self) -> Any:
        """Return an equivalent tokenizer of transformers."""


class TransformersTokenizer:
    """A tokenizer of transformers as a Backend."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def chat_template(self) -> str | None:
        return self._tokenizer.chat_template

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        if not self._shown:
            return self._tokenizer.decode(token_ids, skip_special_tokens=True)
        kept = [token for token in token_ids if token not in self._hidden]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    @cached_property
    def _shown(self) -> set[int]:
        """Special tokens that are shown."""
        vocabulary = self.vocabulary()
        tags = shown(self.chat_template and str(self.chat_template))
        return {vocabulary[tag] for tag in tags if tag in vocabulary}

    @cached_property
    def _hidden(self) -> set[int]:
        return set(self._tokenizer.all_special_ids) - self._shown

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def in_transformers(self) -> Any:
        return self._tokenizer


class Tokenizer:
    """A model's tokenizer and chat template. Failures raise typed errors."""

    def __init__(self, backend: Backend, load_seconds: float = 0.0) -> None:
        self.load_seconds = load_seconds
        self._backend = backend
        self._for_grammars: dict[tuple[int, int | None], Any] = {}

    @property
    def has_chat_template(self) -> bool:
        return bool(self._backend.chat_template)

    @property
    def chat_template(self) -> str:
        """The chat template, "" if there is none."""
        return str(self._backend.chat_template or "")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. Raises UsageError if it is not valid Unicode."""
        check_text(text)
        return self._backend.encode(text)

    def chat(
        self, messages: str | Messages, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the token ids of messages in the chat template, ready for the model's answer.

        See `render`, whose errors it raises.
        """
        return self.encode_rendered(self.render(messages, variables))

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of a text that contains its special tokens, as a rendered template
        does.
        """
        check_text(text)
        return self._backend.encode(text, special=False)

    def render(
        self,
        messages: str | Messages,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render messages with the chat template, ready for the model's answer.

        messages: messages with a "role" and a "content", or the text of a first user message
        variables: further variables of the template, such as "enable_thinking"
        tools: descriptions of the functions that the model may call, in OpenAI's form
        Raises UsageError if there is no template, or if it rejects the messages.
        """
        variables = variables or {}
        if not self.has_chat_template:
            raise UsageError("the model has no chat template: give it plain text")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        render = self._in_transformers.apply_chat_template
        # A client must not set arguments of the call, such as the template itself.
        if taken := sorted({"messages", *signature(render).parameters} & variables.keys()):
            raise UsageError(f"the chat template's {taken[0]} cannot be set by a request")
        given = {"tools": list(tools)} if tools else {}
        try:
            return render(
                list(messages), tokenize=False, add_generation_prompt=True, **given, **variables
            )
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise UsageError(f"the chat template does not take these messages: {reason}") from error

    def save(self, directory: Path) -> None:
        """Write the tokenizer to the checkpoint in `directory`."""
        self._in_transformers.save_pretrained(directory)

    def for_grammars(self, vocab: int, end: int | None) -> Any:
        """Return an equivalent tokenizer of llguidance, for a model of `vocab` tokens.

        end: the end-of-text token
        """
        if (vocab, end) not in self._for_grammars:
            from llguidance.hf import from_tokenizer

            made = from_tokenizer(self._in_transformers, n_vocab=vocab, eos_token=end)
            self._for_grammars[vocab, end] = made
        return self._for_grammars[vocab, end]

    @property
    def vocabulary(self) -> dict[str, int]:
        return self._backend.vocabulary()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens. Special tokens are skipped."""
        return self._backend.decode(token_ids)

    @cached_property
    def _in_transformers(self) -> Any:
        return self._backend.in_transformers()


def check_text(text: str, what: str = "text") -> None:
    """Raise UsageError for lone surrogates, which stand for bytes that were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the {what} is not UTF-8 text (character {error.start})") from error


def token_ids_of(prompt: str | Iterable[int], tokenizer: Tokenizer | None, vocab: int) -> list[int]:
    """Return the token ids of a prompt, which is a text or integers of any type.

    Raises UsageError.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UsageError("the model has no tokenizer; give the prompt as token ids")
        token_ids = tokenizer.encode(prompt)
    elif isinstance(prompt, Iterable) and not isinstance(prompt, (bytes, Mapping)):
        tokens = list(prompt)
        if tokens and all(isinstance(token, str) for token in tokens):
            raise UsageError("several prompts: Engine.generate_all takes them, and this takes one")
        token_ids = [_token_id(token, vocab) for token in tokens]
    else:
        kind = type(prompt).__name__
        raise UsageError(f"a prompt is text or a list of token ids, and this is {kind}")
    if not token_ids:
        raise UsageError("the prompt is empty")
    return token_ids


def _token_id(token: object, vocab: int) -> int:
    """Convert a token id, which may be an integer of numpy or torch. Raises UsageError."""
    if isinstance(token, Mapping):
        raise UsageError("a prompt is text or a list of token ids; Engine.chat answers messages")
    try:
        number = -1 if isinstance(token, bool) else operator.index(token)
    except TypeError:
        number = -1
    if not 0 <= number < vocab:
        kind = type(token).__name__
        raise UsageError(f"token id {token!r} ({kind}) is not a whole number from 0 to {vocab - 1}")
    return number


def load_tokenizer(path: Path, metadata: Mapping[str, Any] | None = None) -> Tokenizer | None:
    """Return the tokenizer beside (or inside) a checkpoint, None if there is none.

    metadata: metadata of the GGUF file, if it is already known
    Raises CheckpointError if the tokenizer cannot be read.
    """
    began = time.perf_counter()
    try:
        backend = _from_folder(path) if path.is_dir() else _from_gguf(path, metadata)
    except (KeyboardInterrupt, SystemExit, CheckpointError):
        raise
    except BaseException as error:
        # The Rust tokenizer's panics are BaseExceptions.
        raise CheckpointError(
            f"cannot read the tokenizer of {path}: {type(error).__name__}: {error}"
        ) from error
    return backend and Tokenizer(backend, time.perf_counter() - began)


def _from_folder(path: Path) -> Backend | None:
    if not any((path / name).exists() for name in _FILES):
        return None
    # The files of these models have a pattern that splits texts wrongly, which transformers mends
    # if this option is set.
    mended = {"fix_mistral_regex": True} if _model_type(path) == "mistral3" else {}
    return _from_transformers(path, **mended)


def _model_type(path: Path) -> str | None:
    try:
        return json.loads((path / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None


def _from_gguf(path: Path, metadata: Mapping[str, Any] | None) -> Backend | None:
    from triforce_core.model.tokenizing import byte_level, sentence_piece
    from triforce_offload.checkpoint.gguf import GGUFSource

    if metadata is None:
        # Opening the file here checks its lengths before transformers' reader sees it.
        source = GGUFSource(path)
        source.close()
        metadata = source.metadata
    if "tokenizer.ggml.model" not in metadata:
        return None
    if byte_level.is_known(metadata):
        return byte_level.ByteLevelTokenizer(metadata)
    if sentence_piece.is_known(metadata):
        return sentence_piece.SentencePieceTokenizer(metadata)
    try:
        return _from_transformers(path.parent, gguf_file=path.name)
    except ValueError as error:
        kinds = [metadata.get(f"tokenizer.ggml.{each}") for each in ("model", "pre")]
        raise UnsupportedModelError(
            f"the tokenizer of {path} ({kinds[0]}, {kinds[1]}) is not supported "
            "in GGUF files; use the model's safetensors"
        ) from error


def _from_transformers(directory: Path, **options: str | bool) -> TransformersTokenizer:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Without this argument, transformers would ask on standard input whether to run the
        # directory's code, and standard input may be the prompt.
        return TransformersTokenizer(
            AutoTokenizer.from_pretrained(
                directory,
                config=_plain_config(directory),
                local_files_only=True,
                trust_remote_code=False,
                **options,
            )
        )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise CheckpointError(
            f"the tokenizer of {directory} needs code that comes with the model (auto_map in its "
            "tokenizer_config.json), and such code is never run; use a model whose tokenizer is a "
            "tokenizer.json"
        ) from error
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()


def _plain_config(directory: Path) -> PreTrainedConfig | None:
    """Return config.json as a generic config if tokenizer_config.json names a tokenizer class,
    else None. The generic config suffices then, and importing the model's own takes 1.2 s.
    """
    from transformers import PreTrainedConfig

    try:
        named = json.loads((directory / "tokenizer_config.json").read_text())["tokenizer_class"]
        config = PreTrainedConfig.from_dict(json.loads((directory / "config.json").read_text()))
    except Exception:  # the model's own config reports the error better
        return None
    config.name_or_path = str(directory)  # some classes are chosen by this name
    return config if isinstance(named, str) and config.model_type else None


def check_same_vocabulary(
    name: str,
    drafter: Tokenizer | None,
    drafter_tokens: int,
    target: Tokenizer | None,
    target_tokens: int,
) -> None:
    """Raise UsageError if the drafter `name` does not have the same tokens as the target.

    If both have a tokenizer, their vocabularies are compared, because models of one family pad
    their matrices to different sizes. Otherwise the sizes are compared.
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
