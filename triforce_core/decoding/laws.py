"""Laws: probability vectors over the vocabulary after temperature, top-k and top-p."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triforce_kernels import sampling
from triforce_kernels.dispatch import TRITON, backend

from triforce_core.decoding.penalties import changed
from triforce_core.params import SamplingParams
from triforce_core.sizing.drafting import LAW_ROWS

if TYPE_CHECKING:
    from triforce_core.decoding.levels import Text


def laws(
    logits: torch.Tensor,
    params: SamplingParams,
    text: Text | None = None,
    drawn: torch.Tensor | None = None,
) -> torch.Tensor:
    """The law of the next token, float32, of each row of logits [rows, vocab]: `penalties.changed`,
    then `sampling.law`, then min_p.

    text, drawn: what each row follows; see `penalties.changed`
    The reference takes a few rows at a time, so that its temporaries stay small; a kernel has none.
    """
    if params.changes_logits and text is not None:
        logits = changed(logits, params, text, drawn)
    if backend(logits.device) == TRITON:
        return _least(sampling.law(logits, params.temperature, params.top_k, params.top_p), params)
    parts = [
        _least(sampling.law(part, params.temperature, params.top_k, params.top_p), params)
        for part in logits.split(LAW_ROWS)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _least(law: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Without what is less likely than min_p of the likeliest (Nguyen et al., 2024)."""
    if not params.min_p:
        return law
    law = law.where(law >= params.min_p * law.amax(-1, keepdim=True), 0)
    return law / law.sum(-1, keepdim=True)


def draw(law: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token of each row of `law` [rows, vocab], as [rows] of int64, one coin a row.

    A token of probability 0 is never drawn. A law that is not a number gives -1.
    """
    coins = torch.rand(law.shape[0], dtype=torch.float64, device=law.device, generator=generator)
    return sampling.pick(law, coins)
