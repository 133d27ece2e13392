"""Walks over contexts of models that hold recent tokens only: trees, cuts, interrupted prefills. At
each step logits are those of a fresh model.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from float_bounds import assert_within, forward_bound
from helpers import random_ids

from triforce_core import Engine
from triforce_core.decoding.contexts.context import Context, Interrupted
from triforce_core.decoding.decoder import PassInput


def walk_trees(ours: Engine, model: torch.nn.Module) -> int:
    """Logits of the rows of trees are those of a fresh model over each row's path alone.

    Returns how many rows after a branch were compared.
    """
    exact, bound = copy.deepcopy(model).double(), forward_bound(model, 120).logits
    choose = random.Random(5)
    own = Context(ours.models)
    prompt, branched = random_ids(50), 0
    own.prefill(prompt, 60, lambda _: None)
    for rows in (2, 30, 64):
        parents = [-1, *(max(-1, row - choose.choice((1, 1, 1, 2))) for row in range(1, rows))]
        tokens = torch.tensor(random_ids(rows, rows))
        logits = own.run(PassInput(tokens, tuple(parents), False, False))
        for row in {0, rows // 2, rows - 1}:
            branch, at = [], row
            while at >= 0:
                branch.insert(0, int(tokens[at]))
                at = parents[at]
            with torch.no_grad():
                expected = exact(torch.tensor([prompt + branch])).logits[0, -1:]
            assert_within(logits[row : row + 1], expected, bound)
            branched += len(branch) <= row
        # Keep the path of the last row.
        path, at = [], rows - 1
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        if rows < 64:
            own.keep(path)
            branch = [int(tokens[at]) for at in path]
            own.text.commit(branch)
            prompt = prompt + branch
        else:
            own.keep([])
        own.end()
    own.close()
    return branched


def walk_cuts(ours: Engine, model: torch.nn.Module, seed: str) -> tuple[int, int]:
    """Logits are those of a fresh model after prompts that share any beginning with the text,
    passes, and prefills that are interrupted.

    Returns how often the text was cut to a mark, and how often to a place before what is shared.
    """
    exact, bound = copy.deepcopy(model).double(), forward_bound(model, 160).logits
    choose, known = random.Random(seed), []
    by_mark = between = 0
    before = ours.runtime.memory.available_bytes, ours.runtime.host_blocks.taken_bytes
    own = Context(ours.models)
    for _ in range(40):
        kept = choose.choice((0, choose.randint(0, len(known)), len(known)))
        new = choose.choice((1, choose.randint(1, 6), choose.randint(1, 60)))
        prompt = [*known[: min(kept, 160 - new)], *random_ids(new, choose.randrange(999))]
        shared = next(
            (i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b),
            min(len(known), len(prompt)),
        )
        if choose.random() < 0.3:

            def interrupt(layer: int, stop: int = choose.randrange(3)) -> None:
                if layer == stop:
                    raise Interrupted

            with pytest.raises(Interrupted):
                own.prefill(prompt, 20, interrupt)
        marks = {mark.length for store in own.sequence.recent for mark in store.marks}
        read = own.prefill(prompt, 20, lambda _: None)
        by_mark += read.reused in marks and read.reused > 0
        between += 0 < read.reused < min(shared, len(prompt) - 1)
        with torch.no_grad():
            expected = exact(torch.tensor([prompt])).logits[0, -1:]
        assert_within(read.logits, expected, bound)
        own.text.commit([read.logits.argmax().item()])
        for _ in range(choose.randint(0, 20)):
            token = torch.tensor(own.text.tokens[-1:])
            logits = own.run(PassInput(token, None, True, False))
            own.text.commit([logits.argmax().item()])
        known = own.text.tokens[: own.length]
        own.end()
    own.close()
    assert (ours.runtime.memory.available_bytes, ours.runtime.host_blocks.taken_bytes) == before
    return by_mark, between
