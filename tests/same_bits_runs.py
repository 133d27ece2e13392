"""The logits of a text after a prompt, computed in several ways that may not change them (B2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from helpers import random_ids

from triforce_core import Engine
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.decoder import Ask

# Tokens that a context may have.
_ROOM = 150


def prefilled(running: Engine, tokens: Sequence[int]) -> tuple[Context, torch.Tensor]:
    """A context with these tokens, and the logits of the last one."""
    context = Context(running.models)
    return context, context.prefill(tokens, _ROOM, lambda layer: None).logits


def alone(running: Engine, text: Sequence[int], prompt: int) -> torch.Tensor:
    """The logits of the text after the prompt, one token at a time: [tokens, vocab]."""
    context, logits = prefilled(running, text[:prompt])
    rows = [logits]
    for token in text[prompt:]:
        rows.append(context.run(Ask(torch.tensor([token]), is_kept=True)))
    context.close()
    return torch.cat(rows)


def in_passes(running: Engine, text: Sequence[int], prompt: int, rows: int) -> torch.Tensor:
    """The same in passes of `rows` rows. Of every second one only a part is kept at first."""
    context, logits = prefilled(running, text[:prompt])
    found, place = [logits], prompt
    while place < len(text):
        tokens = torch.tensor(text[place : place + rows])
        count = len(tokens) if len(found) % 2 else (len(tokens) + 1) // 2
        found.append(context.run(Ask(tokens))[:count])
        context.keep(range(count))
        place += count
    context.close()
    return torch.cat(found)


def in_trees(running: Engine, text: Sequence[int], prompt: int) -> torch.Tensor:
    """The same in trees of 24 rows, of which every third one goes on with the text."""
    context, logits = prefilled(running, text[:prompt])
    found, place, others = [logits], prompt, random_ids(24, seed=5)
    while place < len(text):
        line = text[place : place + 8]
        path = [3 * index + 2 for index in range(len(line))]
        tokens, parents = others[: path[-1] + 1], []
        for row, token in zip(path, line, strict=True):
            tokens[row] = token
        for row in range(len(tokens)):
            # Two rows that lead nowhere: the first follows the text, the second the first.
            text_row = row // 3 * 3 - 1
            parents.append(row - 1 if row % 3 == 1 else text_row)
        logits = context.run(Ask(torch.tensor(tokens), tuple(parents)))
        found.append(logits[path])
        context.keep(path)
        place += len(line)
    context.close()
    return torch.cat(found)
