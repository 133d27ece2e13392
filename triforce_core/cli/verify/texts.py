"""Texts of one prompt by every way of drafting, held against that of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triforce_core.engine import Engine
from triforce_core.params import SamplingParams
from triforce_core.settings import OFF, ON, EngineConfig

_NEW_TOKENS = 128
PLAIN: dict[str, Any] = {"method": "autoregressive"}
WAYS: dict[str, dict[str, Any]] = {
    "n-grams, chains": {"method": "speculative", "draft": "ngram", "tree": OFF},
    "n-grams, trees": {"method": "speculative", "draft": "ngram", "tree": 24},
    "retrieval level": {"method": "triforce", "draft": "ngram", "budget": 128},
}
SETTINGS = {
    "temperature 0": {"temperature": 0.0},
    "coupled": {"temperature": 0.8, "top_p": 0.95},
}


class Text(NamedTuple):
    """The tokens that one way of drafting gave at one setting, and how many each pass gave."""

    setting: str
    tokens: list[int]
    tokens_per_pass: float


def compared(model: Path, prompt: str, config: EngineConfig) -> bool:
    """Print for each way of drafting whether its texts are those of plain decoding. Return whether
    any is not.

    Raises UsageError if rows cannot have the same bits here.
    """
    config = config.changed(same_bits=ON, accept="coupled")
    plain = {text.setting: text.tokens for text in _texts(model, prompt, config, PLAIN)}
    different = False
    for way, options in WAYS.items():
        for text in _texts(model, prompt, config, options):
            said = f"the same text, {len(text.tokens)} tokens"
            at = first_difference(plain[text.setting], text.tokens)
            if at is not None:
                different, said = True, f"another text from token {at} on"
            print(f"{text.setting}, {way}: {said}; {text.tokens_per_pass:.1f} tokens a pass")
    return different


def _texts(
    model: Path, prompt: str, config: EngineConfig, options: dict[str, Any]
) -> Iterator[Text]:
    with Engine.from_pretrained(model, config.changed(**options)) as engine:
        for name, setting in SETTINGS.items():
            done = engine.generate(prompt, SamplingParams(_NEW_TOKENS, seed=0, **setting))
            yield Text(name, list(done.token_ids), done.stats["tokens_per_pass"] or 1.0)


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the index of the first token in which two texts differ, None if they are equal."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))
