"""A model on disk before its weights are read. Opening a GGUF file does not import torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from triforce_core.model.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triforce_core.model.checkpoints.drafters.found import head_at, open_head
from triforce_core.model.found.hub import Announce
from triforce_core.model.found.names import resolve, silently
from triforce_core.model.tokenizing.tokenizer import (
    Tokenizer,
    check_same_vocabulary,
    load_tokenizer,
)


@dataclass(frozen=True)
class OpenModel:
    """A model on disk of which everything except the weights was read. Close it with `close` or a
    `with` block.

    seconds: time that opening took
    announce: called before weights of a drafter are downloaded
    """

    name: str
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    seconds: float = 0.0
    announce: Announce = silently

    @classmethod
    def at(
        cls,
        model: str | Path,
        tokenizer: Tokenizer | None = None,
        announce: Announce = silently,
    ) -> OpenModel:
        """Open a model.

        model: a directory with safetensors, a .gguf file, a hub id, or another name that
            `found.names.resolve` takes
        tokenizer: a tokenizer to use instead of the model's own
        announce: called before weights are downloaded
        Raises UsageError, DoesNotFitError or CheckpointError.
        """
        began = time.perf_counter()
        checkpoint = open_checkpoint(resolve(model, announce))
        try:
            tokenizer = tokenizer or load_tokenizer(checkpoint.path, checkpoint.metadata)
        except BaseException:
            checkpoint.close()
            raise
        seconds = time.perf_counter() - began
        return cls(str(model), checkpoint, tokenizer, seconds, announce)

    def drafter(self, model: str | Path) -> Checkpoint:
        """Open a draft model for this model, or a head or another drafter in files of its own.

        model: see `at`
        Raises UsageError, also if a draft model has another vocabulary, or as `at` does.
        """
        path = resolve(model, self.announce)
        if (raw := head_at(path)) is not None:
            return open_head(path, raw, self.checkpoint.config)
        drafter = OpenModel.at(path)
        try:
            check_same_vocabulary(
                str(drafter.checkpoint.path),
                drafter.tokenizer,
                drafter.checkpoint.config.vocab,
                self.tokenizer,
                self.checkpoint.config.vocab,
            )
        except BaseException:
            drafter.close()
            raise
        return drafter.checkpoint

    def close(self) -> None:
        self.checkpoint.close()

    def __enter__(self) -> OpenModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
