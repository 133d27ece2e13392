"""The distribution of an engine's texts, by enumeration of the first three tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from helpers import make_model, random_ids

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.distributions import distributions

VOCAB = 8
TOKENS = 3
PROMPT = random_ids(40, 1, VOCAB)


# Distributions that depend on all of the context, and neither flat nor one-hot.
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
}


def target_and_drafter(folder: Path) -> tuple[Path, Path, torch.nn.Module]:
    """Write a tiny model and its draft model below a folder: their directories, and the model."""
    target, drafter = folder / "target", folder / "drafter"
    model = make_model("llama", target, **SIZES)
    make_model("llama-mha", drafter, **SIZES | {"num_key_value_heads": 2})
    return target, drafter, model


# Every token is possible: rounding never decides whether one is.
_PLAIN = SamplingParams(temperature=1.0, top_p=1.0)


def drawing(seed: int) -> SamplingParams:
    """Parameters with which texts have the distribution of `distribution_of_engine`."""
    return replace(_PLAIN, max_new_tokens=TOKENS + 1, seed=seed)


def outcomes() -> Iterator[tuple[int, ...]]:
    """Every text of TOKENS tokens."""
    return product(range(VOCAB), repeat=TOKENS)


def distribution_of_engine(engine: Engine) -> torch.Tensor:
    """Probabilities of all outcomes, in their order, by the engine's own logits: those of bfloat16
    are far from transformers' in float32."""
    context, each = Context(engine.models), {}
    for length in range(TOKENS):
        for beginning in product(range(VOCAB), repeat=length):
            read = context.prefill([*PROMPT, *beginning], 1, lambda layer: None)
            each[beginning] = distributions(read.logits, _PLAIN)[0].double()
    context.close()
    return torch.stack([_product(each[o[:i]][o[i]] for i in range(TOKENS)) for o in outcomes()])


def _product(factors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(factors)).prod()
