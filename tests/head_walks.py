"""What tests of MTP heads and of EAGLE-3 heads have in common."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from helpers import random_ids

from triforce_core import Engine
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.decoder import Ask
from triforce_core.decoding.drafters.head import HeadDrafter

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
            own.run(Ask(torch.tensor(rows)))
            own.keep(range(kept))
            own.text.commit(rows[1:kept])
            own.end()
    own.close()
