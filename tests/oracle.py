"""Holding texts against transformers' own, and logits against each other."""

from __future__ import annotations

import copy

import pytest
import torch
from float_bounds import forward_bound

from triforce_core import SamplingParams
from triforce_core.model.transformer import Model


def greedy(count: int = 45, **options: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0, **options)


def assert_equal_but_for_ties(model, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    """Equal, or first different where two logits are as near, in float64, as two computations in
    float32 may be apart.
    """
    if ours == theirs:
        return
    first = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    told = f"token {first}: {ours[first:][:3]} for {theirs[first:][:3]}"
    assert first < min(len(ours), len(theirs)), told
    text = prompt + theirs[:first]
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(torch.tensor([text])).logits[0, -1]
    near = 2 * forward_bound(model, len(text)).logits
    assert logits.max() - logits[[ours[first], theirs[first]]].min() <= near, told


def assert_own_texts(
    model: torch.nn.Module, prompts: list[list[int]], params: list[SamplingParams], *results: list
) -> None:
    """The greedy texts of prompts are those of transformers.

    results: a Completion of each prompt, once or several times
    """
    for prompt, own, *completions in zip(prompts, params, *results, strict=True):
        count = own.max_new_tokens
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
        theirs = theirs[0, len(prompt) :].tolist()
        for each in completions:
            assert_equal_but_for_ties(model, prompt, each.token_ids, theirs)
            assert each.finish_reason == "length"


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
