"""Changes to logits that depend on a request's text: penalties, biases and grammars.

Each row has its own prefix: the token at one position of a draft changes the distribution of the
next. So every level changes its own logits by the prefix of each row, and a proposer works with
the same distribution as its verifier.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triforce_core.decoding.contexts.text import Seen, Text
from triforce_core.decoding.trees.prefixes import Prefixes
from triforce_core.params import SamplingParams
from triforce_core.plan.levels import DISTRIBUTION_ROWS
from triforce_offload.link.waiting import come
from triforce_offload.memory.device import put


def changed(
    logits: torch.Tensor, params: SamplingParams, text: Text, after: Prefixes
) -> torch.Tensor:
    """Return float32 logits [rows, vocab] after penalties, biases and the grammar mask.

    after: the tokens behind the text that each row follows
    """
    vocab, device = logits.shape[1], logits.device
    if text.seen is None:
        text.seen = Seen(vocab, device)
    text.seen.take(text)
    proposed = text.tokens[text.committed :]
    before = torch.zeros(vocab, device=device)
    before.index_add_(0, put(proposed, device), torch.ones(len(proposed), device=device))
    parts = []
    for first in range(0, len(logits), DISTRIBUTION_ROWS):
        part = logits[first : first + DISTRIBUTION_ROWS].float()
        said = _counted(after.tokens, after.paths[first : first + DISTRIBUTION_ROWS], before)
        parts.append(_changed(part, params, text.seen, said))
    logits = torch.cat(parts)
    if text.guide is not None:
        text.guide.take(text.tokens[text.prompt : text.committed])
        masks = text.guide.masks(proposed, come(after.tokens).tolist(), after.paths)
        logits = logits.masked_fill(~masks.to(device), float("-inf"))
    return logits


def _counted(
    tokens: torch.Tensor, paths: Sequence[Sequence[int]], before: torch.Tensor
) -> torch.Tensor:
    """Return how often each token is on each path, or before all of them: [paths, vocab].

    paths: indices of tokens [n]. before: counts [vocab]
    """
    device, ones = before.device, sum(map(len, paths))
    rows = put([row for row, path in enumerate(paths) for _ in path], device)
    on_path = tokens[put([place for path in paths for place in path], device)]
    counts = before.repeat(len(paths), 1)
    return counts.index_put_((rows, on_path), torch.ones(ones, device=device), accumulate=True)


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
