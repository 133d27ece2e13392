"""Laws: probability vectors over the vocabulary after temperature, top-k and top-p."""

from __future__ import annotations

import torch
from triforce_kernels import sampling
from triforce_kernels.dispatch import TRITON, backend

from triforce_core.params import SamplingParams
from triforce_core.sizing.drafting import LAW_ROWS


def laws(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The law of the next token, float32, of each row of logits [rows, vocab]: `sampling.law`.

    The reference takes a few rows at a time, so that its temporaries stay small; a kernel has none.
    """
    if backend(logits.device.type) == TRITON:
        return sampling.law(logits, params.temperature, params.top_k, params.top_p)
    parts = [
        sampling.law(part, params.temperature, params.top_k, params.top_p)
        for part in logits.split(LAW_ROWS)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def draw(law: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token of each row of `law` [rows, vocab], as [rows] of int64, one coin a row.

    A token of probability 0 is never drawn. A law that is not a number gives -1.
    """
    coins = torch.rand(law.shape[0], dtype=torch.float64, device=law.device, generator=generator)
    return sampling.pick(law, coins)
