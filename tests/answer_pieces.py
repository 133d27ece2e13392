"""Answers that arrive in pieces."""

from __future__ import annotations

import random

from triforce_core.requests.answer.parts import Parts, Split, joined


def in_pieces(split: Split, text: str, choose: random.Random, longest: int) -> Parts:
    """Return the parts of a text that comes in pieces of random lengths."""
    parts = Parts()
    while text:
        count = choose.randint(1, longest)
        parts = joined(parts, split.take(text[:count]))
        text = text[count:]
    return joined(parts, split.finish())
