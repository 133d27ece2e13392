"""Sampling parameters of a request."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from triforce_core.settings import UnknownFieldError, nearest_names
from triforce_offload.errors import UsageError

# Most tokens whose log-probabilities can be reported at each position.
MOST_LOGPROBS = 20


P, R, C = ParamSpec("P"), TypeVar("R"), TypeVar("C")


def _with_known_fields(cls: type[C]) -> type[C]:
    """Make a class name the nearest fields if it is given one that it does not have."""
    made = cls.__init__
    known = inspect.signature(made).parameters

    @wraps(made)
    def checked(self: C, *args: Any, **given: Any) -> None:
        for name in given.keys() - known.keys():
            raise UnknownFieldError(f"sampling has no setting {name!r}; {_nearest(name)}")
        made(self, *args, **given)

    cls.__init__ = checked
    return cls


@_with_known_fields
@dataclass(frozen=True)
class SamplingParams:
    """How a request samples and when it stops. Raises UsageError for values out of range, and
    UnknownFieldError, which names the nearest fields.

    max_new_tokens: the most tokens to generate
    temperature: sampling temperature; 0 takes the arg-max
    top_p: keep the smallest set of tokens whose probability reaches this value, after temperature
    top_k: keep the k likeliest tokens; 0 keeps all
    min_p: drop tokens that are less likely than this share of the likeliest token; 0 keeps all
    repeat_penalty: penalise tokens that already occur in the prompt or the output: positive logits
        are divided by it, negative ones multiplied; 1 is off
    presence_penalty: subtracted from the logit of each token that was generated before; 0 is off
    frequency_penalty: subtracted once for every time the token was generated; 0 is off
    logit_bias: numbers to add to the logits of tokens: a mapping by token id, or pairs
    seed: seed of all randomness; None draws one. The stats report it either way
    stop_token_ids: tokens that end the output, in addition to the model's end-of-text tokens
    stop: a text or several; the output ends before the first of them
    grammar: a grammar that the output follows, in llguidance's variant of Lark
    json_schema: a schema of which the output is a JSON instance, as text or as a Python mapping;
        not together with `grammar`
    logprobs: report the log-probability of each token before temperature and top_p, and those of
        this many of the likeliest tokens; None reports none
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
            raise UsageError("grammar and json_schema cannot be given together")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stops)
        for text in stops:
            full = isinstance(text, str) and text != ""
            _require("stop", text, full, "texts, none of them empty")

    @property
    def changes_logits(self) -> bool:
        """Whether the distribution depends on more than the logits."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repeat_penalty - 1)
        guided = self.grammar is not None or self.json_schema is not None
        return bool(guided or self.logit_bias or any(penalties))

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


def without_fields(method: Callable[P, R]) -> Callable[P, R]:
    """Return a method that takes a request's SamplingParams, and that says so if it is given one of
    their fields by name: it raises UnknownFieldError.
    """
    known = inspect.signature(method).parameters

    @wraps(method)
    def called(*args: P.args, **given: P.kwargs) -> R:
        for name in given.keys() - known.keys():
            raise UnknownFieldError(
                f"{method.__name__} has no setting {name!r}: fields of a request are given as "
                f"SamplingParams; {_nearest(name)}"
            )
        return method(*args, **given)

    return called


def _nearest(name: str) -> str:
    known = sorted(SamplingParams.__dataclass_fields__)
    if name in known:
        return f"write SamplingParams({name}=...)"
    return f"the nearest are {' and '.join(map(repr, nearest_names(name, known)))}"


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise UsageError(f"{name} must be {expected}, got {value!r}")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checked(params: object, vocab: int) -> SamplingParams:
    """Return a request's parameters, or the defaults if `params` is None.

    Raises UsageError if `params` has another type, or a bias for a token that a model with a
    vocabulary of `vocab` tokens does not have.
    """
    if params is None:
        return SamplingParams()
    _check_kind("params", params)
    for token, _ in params.logit_bias:
        _require("a token of logit_bias", token, token < vocab, f"0 to {vocab - 1}")
    return params


def params_of_each(params: object, count: int) -> Sequence[SamplingParams | None]:
    """Return the parameters of each of several requests.

    params: parameters of all requests, a list with those of each, or None
    count: number of requests

    Raises UsageError, which names what is wrong.
    """
    if isinstance(params, (str, bytes)) or not isinstance(params, Sequence):
        _check_kind("params", params, " or a list of them")
        return [params] * count
    if len(params) != count:
        raise UsageError(
            f"params must be SamplingParams, or a list of {count} of them, one for each of the "
            f"prompts; got a list of {len(params)}"
        )
    for index, each in enumerate(params):
        _check_kind(f"params[{index}]", each)
    return params


def _check_kind(name: str, params: object, others: str = "") -> None:
    """Raise UsageError unless `params` is SamplingParams or None.

    name: what the error calls it. others: what else it could have been
    """
    if params is None or isinstance(params, SamplingParams):
        return
    write = f"; write SamplingParams(**{name})" if isinstance(params, Mapping) else ""
    kind = type(params).__name__
    raise UsageError(f"{name} must be SamplingParams{others}, got {kind}{write}")


def check_context(
    prompt_tokens: int, new_tokens: int, limit: int, whose: str, which: str = ""
) -> None:
    """Raise UsageError if a prompt and its new tokens exceed `limit` positions.

    whose: who has the limit. which: words that name the prompt, if there are several
    """
    if prompt_tokens + new_tokens > limit:
        raise UsageError(
            f"{which}{prompt_tokens} prompt tokens and {new_tokens} new ones are more than the "
            f"{limit} positions {whose}"
        )
