"""Output that follows a grammar or a JSON schema, with the package llguidance."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch

from triforce_core.model.config import ModelConfig
from triforce_core.model.tokenizing.tokenizer import Tokenizer
from triforce_core.params import SamplingParams
from triforce_offload.errors import UsageError


class GrammarLimitError(UsageError):
    """A grammar or a JSON schema exceeds the limits of llguidance."""


def check_limits(matcher: object, what: str) -> None:
    """Raise GrammarLimitError if the matcher has failed. It would report the end of the text."""
    if matcher.is_error():
        reason = (matcher.get_error().strip() or "it has given up").splitlines()[0]
        raise GrammarLimitError(f"the {what} exceeds the limits of llguidance: {reason}")


class Guide:
    """The tokens that a grammar allows in the output of a request.

    Its matcher has the state after the committed tokens. Proposed tokens are tried on copies.
    """

    def __init__(self, matcher: object, vocab: int, stops: frozenset[int]) -> None:
        """matcher: an llguidance.LLMatcher in its initial state
        vocab: number of tokens of the model's vocabulary
        stops: end-of-text tokens; after the end of the grammar only these may follow
        """
        self._matcher = matcher
        self._vocab = vocab
        self._stops = sorted(stops)
        self._taken = 0

    def take(self, generated: list[int]) -> None:
        """Advance to the end of `generated`, which is all committed tokens after the prompt.

        Raises GrammarLimitError.
        """
        for token in generated[self._taken :]:
            self._step(self._matcher, token)
        self._taken = len(generated)

    def masks(
        self, proposed: list[int], tokens: list[int], paths: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Return which tokens may follow, [paths, vocab] bool on the host.

        proposed: tokens after the committed ones, which all rows follow
        tokens, paths: the tokens that each row follows after these, see `Prefixes`. After a
            forbidden token, every token is allowed.

        Raises GrammarLimitError.
        """
        # Copies take longer the longer the text is: one copy walks from path to path.
        matcher = self._matcher.deep_copy()
        if not all(self._step(matcher, token) for token in proposed):
            return torch.stack([self._all()] * len(paths))
        walked: list[int] = []
        masks = []
        for path in paths:
            pairs = zip(walked, path, strict=False)
            same = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(walked), len(path))
            )
            matcher.rollback(len(walked) - same)
            del walked[same:]
            for place in path[same:]:
                if not self._step(matcher, tokens[place]):
                    break
                walked.append(place)
            masks.append(self._mask(matcher) if len(walked) == len(path) else self._all())
        return torch.stack(masks)

    def ended_by(self, tokens: list[int]) -> int | None:
        """Return the number of tokens up to the one that ends the grammar, or None.

        tokens: tokens after the committed ones
        Raises GrammarLimitError.
        """
        matcher = self._matcher.deep_copy()
        for count, token in enumerate(tokens, start=1):
            if not self._step(matcher, token) or matcher.is_stopped():
                return count
        return None

    @staticmethod
    def _step(matcher: object, token: int) -> bool:
        """Advance by a token. Return whether the token is allowed."""
        if matcher.is_stopped():
            return False
        # Unlike `consume_token`, this reports no error for a forbidden token.
        follows = matcher.try_consume_tokens([token]) == 1
        check_limits(matcher, "grammar or JSON schema")
        return follows

    def _mask(self, matcher: object) -> torch.Tensor:
        mask = torch.zeros(self._vocab, dtype=torch.bool)
        if not matcher.is_stopped():
            found = matcher.compute_bitmask()
            check_limits(matcher, "grammar or JSON schema")
            bits = np.unpackbits(np.frombuffer(found, dtype=np.uint8), bitorder="little")
            bits = bits[: self._vocab]
            mask[: len(bits)] = torch.from_numpy(bits.astype(bool))
        if matcher.is_stopped() or matcher.is_accepting():
            mask[self._stops] = True
        # If no token may follow, the text ends before this mask is used.
        return mask if mask.any() else self._all()

    def _all(self) -> torch.Tensor:
        return torch.ones(self._vocab, dtype=torch.bool)


def guide_of(
    params: SamplingParams, tokenizer: Tokenizer | None, config: ModelConfig
) -> Guide | None:
    """Return the guide for a request with a grammar or a schema, else None.

    config: config of the model
    Raises UsageError for an invalid grammar or schema.
    """
    if params.grammar is None and params.json_schema is None:
        return None
    if tokenizer is None:
        raise UsageError("the model has no tokenizer, and a grammar is of text")
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError as error:
        raise UsageError(
            f"grammars need the package llguidance: {sys.executable} -m pip install "
            "'triforce-offload[grammar]'"
        ) from error
    vocab, stops = config.vocab, frozenset(config.eos_token_ids + params.stop_token_ids)
    what = "grammar" if params.grammar is not None else "json_schema"
    try:
        if params.grammar is not None:
            grammar = LLMatcher.grammar_from_lark(params.grammar)
        else:
            grammar = LLMatcher.grammar_from_json_schema(params.json_schema)
        tokens = tokenizer.for_grammars(vocab, min(stops, default=None))
        wrong = LLMatcher.validate_grammar(grammar, tokens)
    except ValueError as error:
        wrong = str(error)
    if wrong:
        said = wrong.strip().splitlines()[0]
        if params.grammar is not None and "::=" in params.grammar:
            said += " (it looks like llama.cpp's GBNF; grammars here are llguidance's Lark)"
        raise UsageError(f"the {what} cannot be used: {said}")
    matcher = LLMatcher(tokens, grammar, log_level=0)
    check_limits(matcher, what)
    return Guide(matcher, vocab, stops)
