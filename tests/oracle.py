"""Holding texts against transformers' own, and logits against each other."""

from __future__ import annotations

import pytest
import torch

from triforce_core import SamplingParams
from triforce_core.model.llama import Model


def greedy(count: int = 45, **options: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0, **options)


def assert_equal_but_for_ties(model, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    """Equal, or first different where transformers' own two best logits are within 1e-3."""
    if ours == theirs:
        return
    first = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    with torch.no_grad():
        logits = model(torch.tensor([prompt + theirs[:first]])).logits[0, -1]
    best = logits.topk(2).values
    assert best[0] - best[1] < 1e-3, f"token {first}: {ours[first:][:3]} for {theirs[first:][:3]}"


class LogitsRecorder:
    """Keeps every row of logits that a model computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[torch.Tensor] = []
        original = Model.logits

        def logits(model: Model, hidden: torch.Tensor) -> torch.Tensor:
            result = original(model, hidden)
            self.rows.append(result.clone())
            return result

        monkeypatch.setattr(Model, "logits", logits)

    def take(self) -> torch.Tensor:
        rows, self.rows = torch.cat(self.rows), []
        return rows
