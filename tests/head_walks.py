"""What tests of heads and of drafters in files of their own have in common."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from helpers import random_ids

from triforce_core import Engine
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.decoder import PassInput
from triforce_core.decoding.drafters.head import HeadDrafter
from triforce_core.decoding.drafters.model_proposer import ModelDrafter
from triforce_core.decoding.drafters.of_states import DrafterOfStates
from triforce_core.decoding.trees.growing import Tree

# Ways in which ranks draft with a head.
ON_RANKS = {
    "tree": {"method": "speculative", "tree": 9},
    "speculative": {"method": "speculative", "draft_tokens": 6},
    "retrieval": {"method": "triforce", "budget": 32, "draft_tokens": 8, "inner_draft_tokens": 3},
    "learned": {"method": "triforce"},
}


def walk(engine: Engine) -> Iterator[tuple[HeadDrafter, list[int]]]:
    """Yield the drafter of a context and a text whose last token it has not run: after prefills of
    any length, passes that keep some of their rows, and cuts.
    """
    own, choose = Context(engine.models), random.Random(0)
    for prompt in (random_ids(2, 1), random_ids(60, 2), [*random_ids(60, 2)[:40], 3, 4, 5]):
        own.prefill(prompt, 60, lambda _: None)
        for _ in range(5):
            text = [*own.text.tokens, choose.randrange(90)]
            yield own.levels.drafter, text
            own.text.commit(text[-1:])
            rows = [text[-1], *random_ids(5, len(text))]
            kept = choose.randint(1, 6)
            own.run(PassInput(torch.tensor(rows)))
            own.keep(range(kept))
            own.text.commit(rows[1:kept])
            own.end()
    own.close()


def grown(
    drafter: ModelDrafter, levels: int, choose: random.Random
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Grow a random tree, of which not every row is run. Yield the logits of each row that is, and
    the tokens on its path.
    """
    tree, level = Tree(), [0]
    for _ in range(levels):
        rows = [
            tree.add(row, choose.randrange(97), 1.0, 1.0)
            for row in level
            for _ in range(choose.randint(1, 2))
        ]
        level = sorted(choose.sample(rows, min(3, len(rows))))
        for row, logits in zip(level, drafter.forward_tree(tree, level), strict=True):
            tokens = []
            while row:
                tokens.insert(0, tree.tokens[row - 1])
                row = tree.parents[row - 1]
            yield logits, tokens


def note_logits(monkeypatch: pytest.MonkeyPatch, kind: type[DrafterOfStates]) -> list[torch.Tensor]:
    """Return a list that takes the logits of all that drafters of a kind run from now on, but those
    of ranks behind the first.
    """
    logits, run = [], kind.run

    def noted(drafter: DrafterOfStates, *given: object) -> object:
        found = run(drafter, *given)
        own = found if isinstance(found, torch.Tensor) else found.logits
        if own.shape[1]:
            logits.append(own.clone())
        return found

    monkeypatch.setattr(kind, "run", noted)
    return logits
