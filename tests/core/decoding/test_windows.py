"""W1: layers with a window compute what transformers' do, whatever is drafted across its edge, and
a context is cut only where its windows are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import BLOCK, PLACEMENTS, random_ids
from oracle import assert_equal_but_for_ties, greedy
from recent_walks import walk_cuts, walk_trees

from triforce_core import Engine
from triforce_core.decoding.contexts import context
from triforce_core.decoding.drafters import draft_levels
from triforce_kernels.attention.dense import DenseKeys
from triforce_offload.forward_batch import ForwardBatch
from triforce_offload.kv.direct import DirectReader
from triforce_offload.kv.recent import marks
from triforce_offload.kv.recent.marks import Marks
from triforce_offload.kv.windows import prefill, shape
from triforce_offload.kv.windows.store import WindowStore

WINDOW, NEW = 24, 40
FAMILY, EVERYWHERE = "exaone4-windows", "mistral-windows"
RUNS = {
    "plain": {"method": "autoregressive"},
    "retrieval": {"draft": "none", "budget": 16, "draft_tokens": 30},
    "two-levels": {"draft": "{self}", "budget": 16, "draft_tokens": 17, "inner_draft_tokens": 5},
    "tree": {"draft": "{self}", "method": "speculative", "tree": 40, "draft_tokens": 30},
}


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows leave the windows every few tokens, and a text can hardly be cut without a mark."""
    monkeypatch.setattr(shape, "SPARE_TOKENS", 1)
    monkeypatch.setattr(shape, "ROOM_TOKENS", 2)
    monkeypatch.setattr(marks, "MARK_TOKENS", 16)
    monkeypatch.setattr(context, "PREFILL_CHUNK", 8)


def engine(path: Path, placement: str = "kv-in-part", **options: object) -> Engine:
    options = {name: path if each == "{self}" else each for name, each in options.items()}
    fixed = {"device": "cpu", "max_context": 200, "block_tokens": BLOCK, "dtype": "float32"}
    return Engine.from_pretrained(path, **fixed, placement=PLACEMENTS[placement], **options)


def transformers_text(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    return theirs[0, len(prompt) :].tolist()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("tokens", [WINDOW + 1, WINDOW, WINDOW - 1, 1, 3 * WINDOW, 130])
@pytest.mark.parametrize("run", sorted(RUNS, reverse=True))
@pytest.mark.parametrize("family", [EVERYWHERE, FAMILY])
def test_prompts_about_the_window_equal_transformers(
    tiny, little_room, run: str, tokens: int, family: str
) -> None:
    """Drafts are longer than the window, so rows hide the first of the draft from the last."""
    path, model = tiny(family)
    prompt = random_ids(tokens, tokens)
    with engine(path, **RUNS[run]) as ours:
        assert ours.config.windowed.window == WINDOW
        result = ours.generate(prompt, greedy(NEW))
    theirs = transformers_text(model, prompt)
    assert_equal_but_for_ties(model, prompt, result.token_ids, theirs)


def test_logits_of_trees_equal_those_of_their_paths(tiny, little_room) -> None:
    """Branches deeper than the window."""
    path, model = tiny(FAMILY)
    with engine(path, "kv", method="speculative", draft_tokens=64) as ours:
        assert walk_trees(ours, model) > 2


@pytest.mark.parametrize("placement", ["kv", "both-one-slot"])
def test_logits_equal_those_of_a_fresh_model_wherever_a_text_is_cut(
    tiny, little_room, placement: str
) -> None:
    """C1 with marks."""
    path, model = tiny(FAMILY)
    with engine(path, placement, method="speculative", draft_tokens=6) as ours:
        by_mark, between = walk_cuts(ours, model, placement)
    assert by_mark > 3, "texts were cut to marks"
    assert between > 2, "texts were cut further than what they share, where no mark was nearer"


def _window(more: int, *, of_trees: bool = False) -> Callable:
    """Keys of passes, of which each row sees `more` more; of trees only, if asked for."""
    own = WindowStore.dense

    def dense(self: WindowStore, layer: int, batch: ForwardBatch, end: int) -> DenseKeys:
        keys = own(self, layer, batch, end)
        changed = batch.visible is not None or not of_trees
        return keys._replace(window=keys.window + more) if changed else keys

    return dense


def _prefilled(own: Callable, more: int) -> Callable:
    """Attention of a prefill to `more` keys more."""

    def attend(*args: object, **named: object) -> object:
        return own(*args[:-1], args[-1] + more if args[-1] else args[-1], **named)

    return attend


def _stale(marks: Marks, tokens: int) -> None:
    """Keep marks of a text that has changed."""


def _one_late(windows: WindowStore, mark: object) -> None:
    taken(windows, mark)
    windows.start += 1


taken = WindowStore.take
PLANTED = {
    "a pass sees one more": (WindowStore, "dense", _window(1)),
    "a prefill sees one more": (prefill, "attend_text", _prefilled(prefill.attend_text, 1)),
    "a prefill sees one less": (prefill, "attend_text", _prefilled(prefill.attend_text, -1)),
    "a tree sees one less": (WindowStore, "dense", _window(-1, of_trees=True)),
    "a stale mark": (Marks, "cut", _stale),
    "a mark one place late": (WindowStore, "take", _one_late),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", ["none", *PLANTED])
def test_a_planted_fault_shows(tiny, little_room, monkeypatch, fault: str) -> None:
    """Texts after a cut, as trees and plainly: some text differs from transformers'."""
    path, model = tiny(FAMILY)
    if fault != "none":
        monkeypatch.setattr(*PLANTED[fault])
    first, alike = random_ids(70, 1), []
    for run in ("plain", "tree"):
        with engine(path, **RUNS[run]) as ours:
            told = ours.generate(first, greedy(NEW)).token_ids
            # Cut to a mark inside of the prompt and go on otherwise, twice.
            prompts = [first, [*first[:40], *random_ids(40, 2)], [*first[:40], *random_ids(40, 3)]]
            texts = [told, *(ours.generate(each, greedy(NEW)).token_ids for each in prompts[1:])]
            # Cut where only the last text has a mark, and texts before it had others.
            prompts.append([*prompts[2][:75], *random_ids(20, 4)])
            texts.append(ours.generate(prompts[-1], greedy(NEW)).token_ids)
        alike += [
            text == transformers_text(model, prompt)
            for text, prompt in zip(texts, prompts, strict=True)
        ]
    assert all(alike) == (fault == "none")


def test_the_plan_counts_the_windows_that_are_taken(tiny) -> None:
    path, _ = tiny(FAMILY)
    with engine(path, "kv", draft="none", budget=32) as ours:
        needs = ours.runtime.plan.requirements
        ours.generate(random_ids(60), greedy(4))
        assert ours.runtime.memory.by_purpose()["windows"] == needs.window_bytes
        windows = needs.windows
        assert (windows.layers, windows.window) == (2, WINDOW)
        assert needs.kv.layers == 1
        one = 2 * windows.kv_heads * windows.head_dim * 4
        least = windows.layers * one * (WINDOW - 1 + needs.max_pass_tokens)
        assert least < needs.window_bytes < 10 * least
        without = replace(needs, windows=None)
        assert needs.marks_bytes > without.marks_bytes == without.window_bytes == 0


@pytest.mark.parametrize("draft_kv", ["exact", "int8"])
def test_a_retrieval_level_without_kv_to_choose_drafts_on_a_gpu_too(
    tiny, monkeypatch, draft_kv: str
) -> None:
    """Where chunks are read in place, as on a GPU. Here the host reads them."""
    path, twin = tiny(EVERYWHERE)
    monkeypatch.setattr(draft_levels, "reader", DirectReader)
    prompt = random_ids(75)
    with engine(path, "int4", budget=48, draft_tokens=4, draft_kv=draft_kv) as ours:
        result = ours.generate(prompt, greedy(NEW))
    assert result.token_ids == transformers_text(twin, prompt)
    assert result.stats["retrieval"]["steps"] > 0
