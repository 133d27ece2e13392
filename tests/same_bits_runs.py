"""The logits of a text after a prompt, computed in several ways that may not change them (B2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from helpers import PLACEMENTS, random_ids

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.context import Context, run_pass
from triforce_core.decoding.decoder import PassInput

# Tokens that a context may have.
_ROOM = 150
FORMATS = {
    "dense": {},
    "split": {"weights": "split", "kv": "split"},
    "KV streamed": {"placement": PLACEMENTS["kv"]},
    "weights streamed": {"placement": PLACEMENTS["weights"]},
    "both streamed, split": {"placement": PLACEMENTS["both"], "weights": "split", "kv": "split"},
    "one block for all": {"block_tokens": 256},
    "blocks of 128, streamed": {"block_tokens": 128, "placement": PLACEMENTS["kv"]},
}
_RETRIEVAL = {"method": "triforce", "budget": 64}
RUNS = {
    "chains": {},
    "trees": {"tree": 16},
    "retrieval level": {**_RETRIEVAL, "placement": PLACEMENTS["kv"]},
    "trees of the retrieval level": {**_RETRIEVAL, "tree": 24, "placement": PLACEMENTS["kv"]},
    "retrieval level over draft copies": {**_RETRIEVAL, "placement": PLACEMENTS["int4"]},
}


def prefilled(running: Engine, tokens: Sequence[int]) -> tuple[Context, torch.Tensor]:
    """A context with these tokens, and the logits of the last one."""
    context = Context(running.models)
    return context, context.prefill(tokens, _ROOM, lambda layer: None).logits


def alone(running: Engine, text: Sequence[int], prompt: int) -> torch.Tensor:
    """The logits of the text after the prompt, one token at a time: [tokens, vocab]."""
    context, logits = prefilled(running, text[:prompt])
    rows = [logits]
    for token in text[prompt:]:
        rows.append(context.run(PassInput(torch.tensor([token]), is_kept=True)))
    context.close()
    return torch.cat(rows)


def in_passes(running: Engine, text: Sequence[int], prompt: int, rows: int) -> torch.Tensor:
    """The same in passes of `rows` rows. Of every second one only a part is kept at first."""
    context, logits = prefilled(running, text[:prompt])
    found, place = [logits], prompt
    while place < len(text):
        tokens = torch.tensor(text[place : place + rows])
        count = len(tokens) if len(found) % 2 else (len(tokens) + 1) // 2
        found.append(context.run(PassInput(tokens))[:count])
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
        logits = context.run(PassInput(torch.tensor(tokens), tuple(parents)))
        found.append(logits[path])
        context.keep(path)
        place += len(line)
    context.close()
    return torch.cat(found)


def differing(
    running: Engine, text: Sequence[int], prompt: int, rows: Iterable[int], lengths: Iterable[int]
) -> dict[str, int]:
    """How many tokens have other logits than alone: in passes of each number of rows, in trees, and
    at the end of prompts of each length.
    """
    expected = alone(running, text, prompt)
    assert expected.std() > 1e-3, "it would be no test"
    found = {f"{count} rows": in_passes(running, text, prompt, count) for count in rows}
    found["trees"] = in_trees(running, text, prompt)
    different = {way: (each != expected).any(1).sum().item() for way, each in found.items()}
    for length in lengths:
        context, logits = prefilled(running, text[:length])
        context.close()
        different[f"prefill {length}"] = int(not torch.equal(logits[0], expected[length - prompt]))
    return different


def beside_others(
    running: Engine, text: Sequence[int], lengths: Sequence[int]
) -> tuple[list[Context], int]:
    """Three passes over several sequences, which begin with the first tokens of the text. Returns
    their contexts, and how many tokens have other logits than alone.

    lengths: number of those tokens of each sequence; the first one is the prompt's length
    """
    different = 0
    expected = alone(running, text, lengths[0])
    contexts = [prefilled(running, text[:length])[0] for length in lengths]
    for _ in range(3):
        asks = [PassInput(torch.tensor(text[each.length : each.length + 7])) for each in contexts]
        for context, logits in zip(contexts, run_pass(contexts, asks), strict=True):
            first = context.length + 1 - lengths[0]
            different += int((logits != expected[first : first + 7]).any(1).sum())
            context.keep(range(5))
    return contexts, different


def texts_by_every_draft(
    load: Callable[..., Engine], temperature: float, accept: str = "coupled"
) -> dict[str, list[list[int]]]:
    """Three texts without drafts ("plain") and by each way of drafting. load: takes options"""
    prompts = [random_ids(90, seed=seed) for seed in range(3)]
    params = [SamplingParams(60, temperature=temperature, seed=seed) for seed in range(3)]
    found = {}
    for name, options in {"plain": {"method": "autoregressive"}, **RUNS}.items():
        with load(**{"accept": accept, "draft_tokens": 6, **options}) as running:
            done = running.generate_all(prompts, params)
        found[name] = [list(completion.token_ids) for completion in done]
    return found
