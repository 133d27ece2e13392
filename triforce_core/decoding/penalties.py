"""Changes to logits that depend on a request's text: penalties, biases and grammars.

Each row has its own prefix: the token at one position of a draft changes the distribution of the
next. So every level changes its own logits by the prefix of each row, and a proposer works with
the same distribution as its verifier.
"""

from __future__ import annotations

import torch

from triforce_core.decoding.contexts.text import Seen, Text
from triforce_core.params import SamplingParams
from triforce_core.plan.levels import DISTRIBUTION_ROWS
from triforce_offload.link.waiting import come
from triforce_offload.memory.device import put


def changed(
    logits: torch.Tensor, params: SamplingParams, text: Text, drawn: torch.Tensor | None
) -> torch.Tensor:
    """Return float32 logits [rows, vocab] after penalties, biases and the grammar mask.

    drawn: tokens [n] that follow the text, n >= rows - 1; the last row follows all of them, the
        row before it all but the last, and so on
    """
    rows, vocab = logits.shape
    if text.seen is None:
        text.seen = Seen(vocab, logits.device)
    text.seen.take(text)
    proposed = put(text.tokens[text.committed :], logits.device)
    if drawn is not None:
        proposed = torch.cat((proposed, drawn))
    if len(proposed) < rows - 1:
        raise RuntimeError(f"{rows} rows follow {len(proposed)} tokens that are not committed")
    common = len(proposed) - (rows - 1)
    before = torch.zeros(vocab, device=logits.device)
    before.index_add_(0, proposed[:common], torch.ones(common, device=logits.device))
    parts = []
    for first in range(0, rows, DISTRIBUTION_ROWS):
        part = logits[first : first + DISTRIBUTION_ROWS].float()
        # The token by which the prefix of each row is longer than that of the row before.
        own = torch.zeros_like(part)
        after = slice(common + max(0, first - 1), common + first + len(part) - 1)
        shift = 0 if first else 1
        own[shift:].scatter_(1, proposed[after].unsqueeze(1), 1.0)
        said = own.cumsum_(0).add_(before)
        before = said[-1].clone()
        parts.append(_changed(part, params, text.seen, said))
    logits = torch.cat(parts)
    if text.guide is not None:
        text.guide.take(text.tokens[text.prompt : text.committed])
        masks = text.guide.masks(come(proposed).tolist(), rows)
        logits = logits.masked_fill(~masks.to(logits.device), float("-inf"))
    return logits


def _changed(
    logits: torch.Tensor, params: SamplingParams, seen: Seen, said: torch.Tensor
) -> torch.Tensor:
    """said: for each row, how often each token occurs among the tokens not yet committed"""
    if params.repeat_penalty != 1:
        # As in transformers (Keskar et al., 2019), over the prompt too.
        penalty = params.repeat_penalty
        punished = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen.everywhere + said > 0, punished, logits)
    if params.presence_penalty or params.frequency_penalty:
        # As in OpenAI's API, over the generated tokens.
        counts = seen.generated + said
        taken = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        logits = logits - taken
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        places = put(ids, logits.device)
        bias = torch.tensor(biases, dtype=torch.float32).to(logits.device)
        logits = logits.index_add(1, places, bias.expand(logits.shape[0], -1))
    return logits
