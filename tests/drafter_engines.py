"""What tests of EAGLE-3 heads and of DFlash drafters have in common."""

from __future__ import annotations

from pathlib import Path

import torch
from float_bounds import assert_within
from helpers import BLOCK, placed

from triforce_core import Engine
from triforce_core.decoding.distributions import MOST_LOGIT

NEW = 40
# Ways to draft, directly or below a retrieval level.
RUNS = {
    "speculative": {"method": "speculative", "draft_tokens": 6},
    "tree": {"method": "speculative", "tree": 13},
    "retrieval": {"budget": 16, "draft_tokens": 12, "inner_draft_tokens": 3},
    "learned": {},
}
FAMILIES = ("llama", "qwen3", "gemma3", "gpt-oss-moe", "qwen3_5", "mistral-windows")
DIRECT = {"method": "speculative", "draft_tokens": 6}


def engine(path: Path, placement: str = "kv-in-part", **options: object) -> Engine:
    fixed = {"device": "cpu", "max_context": 500, "block_tokens": BLOCK, "dtype": "float32"}
    return Engine.from_pretrained(path, **fixed, **placed(placement, options))


def assert_close(found: torch.Tensor, exact: torch.Tensor, share: float = 1e-4) -> None:
    known = exact.isfinite()
    assert torch.equal(found > -MOST_LOGIT, known)
    assert_within(found[known], exact[known], share * float(exact[known].abs().max()))
