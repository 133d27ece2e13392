"""What tests of DFlash drafters have in common: an engine, and a comparison of logits."""

from __future__ import annotations

from pathlib import Path

import torch
from float_bounds import assert_within
from helpers import BLOCK, placed

from triforce_core import Engine
from triforce_core.decoding.distributions import MOST_LOGIT

DIRECT = {"method": "speculative", "draft_tokens": 6}


def engine(path: Path, placement: str = "kv-in-part", **options: object) -> Engine:
    fixed = {"device": "cpu", "max_context": 500, "block_tokens": BLOCK, "dtype": "float32"}
    return Engine.from_pretrained(path, **fixed, **placed(placement, options))


def assert_close(found: torch.Tensor, exact: torch.Tensor, share: float = 1e-4) -> None:
    known = exact.isfinite()
    assert torch.equal(found > -MOST_LOGIT, known)
    assert_within(found[known], exact[known], share * float(exact[known].abs().max()))
