"""Conversations that share the beginning of their prompts, each in a context of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import BLOCK, PLACEMENTS, random_ids
from oracle import greedy

from triforce_core import Completion, Engine
from triforce_core.requests import loss, pool
from triforce_offload.errors import DoesNotFitError

NEW = 30


def engine(path: Path) -> Engine:
    return Engine.from_pretrained(
        path,
        device="cpu",
        dtype="float32",
        max_context=160,
        block_tokens=BLOCK,
        placement=replace(PLACEMENTS["kv"], resident_kv_blocks=2),
        sequences=3,
        draft="none",
        budget=32,
        draft_tokens=5,
    )


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_a_copied_context_goes_on_as_its_own_would(tiny, monkeypatch, family: str) -> None:
    """A prompt that shares its beginning with another conversation gets a copy of the context, also
    while that conversation is under way.
    """
    monkeypatch.setattr(loss, "WORTH_COPYING", 16)
    path, _ = tiny(family)
    shared, own = random_ids(60, 1), [random_ids(30, seed) for seed in (2, 3, 4)]
    asked = [shared + each for each in own]
    with engine(path) as ours:
        expected = [ours.generate(prompt, greedy(NEW), reuse=False).token_ids for prompt in asked]
        ours.forget()
        assert ours.generate(asked[0], greedy(NEW)).token_ids == expected[0]
        received: list = []
        ours.add_request(asked[1], greedy(NEW), received.append)
        ours.step()
        ours.add_request(asked[2], greedy(NEW), received.append)
        while ours.step():
            pass
        results = [item for item in received if isinstance(item, Completion)]
        assert sorted(result.token_ids for result in results) == sorted(expected[1:])
        reused = [result.stats["reused_tokens"] for result in results]
        again = ours.generate(asked[0] + expected[0], greedy(4))
    # A model with windows or states goes back to a length at which it knows them.
    assert min(reused) > 0 if family == "llama" else min(reused) >= 0
    assert again.stats["reused_tokens"] >= len(asked[0])


def test_a_copy_for_which_there_is_no_room_is_left_out(tiny, monkeypatch) -> None:
    """The prompt is prefilled as a whole, and no conversation loses its context but the one that
    was unused for longest.
    """
    monkeypatch.setattr(loss, "WORTH_COPYING", 16)
    path, _ = tiny("llama")
    shared = random_ids(60, 1)
    asked = [shared + random_ids(30, seed) for seed in (2, 3)]

    def refused(nbytes: int, what: str) -> None:
        raise DoesNotFitError(what, nbytes, 0, "planted")

    with engine(path) as ours:
        expected = [ours.generate(prompt, greedy(NEW), reuse=False).token_ids for prompt in asked]
        ours.forget()
        assert ours.generate(asked[0], greedy(NEW)).token_ids == expected[0]
        with monkeypatch.context() as patch:
            patch.setattr(pool, "check_available", refused)
            second = ours.generate(asked[1], greedy(NEW))
        assert second.token_ids == expected[1]
        assert second.stats["reused_tokens"] == 0
        assert ours.generate(asked[0] + expected[0], greedy(2)).stats["reused_tokens"] >= 90
