"""What a request asks for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triforce_offload.errors import UsageError

# Of the likeliest tokens whose log-probabilities are told.
MOST_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How a request samples and when it stops. Raises UsageError for values out of range.

    temperature: 0 takes the arg-max
    top_p: keep the smallest set of tokens whose probability reaches this, after temperature
    top_k: keep the k likeliest tokens; 0 keeps all
    min_p: drop tokens that are less likely than this share of the likeliest; 0 keeps all
    repeat_penalty: what was said before is less likely, prompt included: positive logits over it,
        negative ones times it; 1 is off
    presence_penalty, frequency_penalty: taken from the logits of what was generated before, once
        and for each time; 0 is off
    logit_bias: token ids and what is added to their logits; a mapping, or pairs
    seed: None draws one; it is reported in the stats either way
    stop_token_ids: end the text as the model's own end-of-text tokens do
    stop: texts that end it where they begin; one or several
    grammar: that the text keeps to, as llguidance's Lark has it; json_schema: that it is JSON of,
        as text or as what it is in Python. One of them, or neither
    logprobs: with each token its log-probability before temperature and top_p, and those of so many
        of the likeliest; None for neither
    """

    max_new_tokens: int = 256
    temperature: float = 0.6
    top_p: float = 0.9
    top_k: int = 0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    grammar: str | None = None
    json_schema: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _require("max_new_tokens", self.max_new_tokens, _whole(self.max_new_tokens, 1), "1 or more")
        _require(
            "temperature",
            self.temperature,
            _real(self.temperature) and 0 <= self.temperature < math.inf,
            "a finite number, 0 or more",
        )
        _require(
            "top_p",
            self.top_p,
            _real(self.top_p) and 0 < self.top_p <= 1,
            "more than 0 and at most 1",
        )
        _require("top_k", self.top_k, _whole(self.top_k, 0), "0 (off) or more")
        _require("min_p", self.min_p, _real(self.min_p) and 0 <= self.min_p <= 1, "0 (off) to 1")
        for name, least, most in (
            ("repeat_penalty", 0.01, 100.0),
            ("presence_penalty", -100.0, 100.0),
            ("frequency_penalty", -100.0, 100.0),
        ):
            value = getattr(self, name)
            _require(name, value, _real(value) and least <= value <= most, f"{least} to {most}")
        biases = self.logit_bias
        biases = tuple(biases.items() if isinstance(biases, Mapping) else map(tuple, biases))
        object.__setattr__(self, "logit_bias", biases)
        for pair in biases:
            fits = len(pair) == 2 and _whole(pair[0], 0) and _real(pair[1])
            _require("logit_bias", pair, fits and abs(pair[1]) <= 1e4, "ids and what is added")
        _require(
            "seed",
            self.seed,
            self.seed is None or (_whole(self.seed, 0) and self.seed < 1 << 63),
            "0 to 2**63 - 1",
        )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _require("stop_token_ids", token, _whole(token, 0), "token ids")
        _require(
            "logprobs",
            self.logprobs,
            self.logprobs is None or (_whole(self.logprobs, 0) and self.logprobs <= MOST_LOGPROBS),
            f"0 to {MOST_LOGPROBS}, or None",
        )
        if isinstance(self.json_schema, Mapping):
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        for name in ("grammar", "json_schema"):
            value = getattr(self, name)
            _require(name, value, value is None or (isinstance(value, str) and value), "a text")
        if self.grammar is not None and self.json_schema is not None:
            raise UsageError("grammar and json_schema are one or the other")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stops)
        for text in stops:
            _require("stop", text, isinstance(text, str) and text != "", "texts that are not empty")

    @property
    def changes_logits(self) -> bool:
        """Whether the distribution depends on more than the logits."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repeat_penalty - 1)
        guided = self.grammar is not None or self.json_schema is not None
        return bool(guided or self.logit_bias or any(penalties))

    @property
    def tells_logprobs(self) -> bool:
        return self.logprobs is not None


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise UsageError(f"{name} must be {expected}, got {value!r}")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checked(params: object, vocab: int) -> SamplingParams:
    """A request's parameters, the defaults if it has none. Raises UsageError if they are none, or
    have a bias of a token that a model of `vocab` tokens has not.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        kind = type(params).__name__
        raise UsageError(f"params of a request are SamplingParams, and this is {kind}")
    for token, _ in params.logit_bias:
        _require("a token of logit_bias", token, token < vocab, f"0 to {vocab - 1}")
    return params


def check_context(prompt_tokens: int, new_tokens: int, limit: int, whose: str) -> None:
    """Raises UsageError if a prompt and its new tokens exceed `limit` positions."""
    if prompt_tokens + new_tokens > limit:
        raise UsageError(
            f"{prompt_tokens} prompt tokens and {new_tokens} new ones are more than the {limit} "
            f"positions {whose}"
        )
