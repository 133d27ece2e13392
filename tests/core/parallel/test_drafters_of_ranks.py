"""Drafters in files of their own whose layers ranks share, as they share the model's: DFlash
drafters, and assistants of Gemma 4.
"""

from __future__ import annotations

from pathlib import Path

import assistant_files
import dflash_files
import gguf
import pytest
import torch
from head_walks import ON_RANKS, note_logits
from helpers import make_model, random_ids
from oracle import assert_equal_but_for_ties, greedy
from thread_ranks import engine

from triforce_core.decoding.contexts.calls import RunHead
from triforce_core.decoding.drafters.assistant import AssistantDrafter
from triforce_core.decoding.drafters.block import BlockDrafter

PROMPT, NEW = 120, 40
Made = dflash_files.RandomDrafter | assistant_files.RandomAssistant


def make(drafter: str, kind: str, path: Path) -> tuple[torch.nn.Module, Made]:
    """A model in `path`/model, and a random drafter for it."""
    model = make_model("llama" if drafter == "dflash" else "gemma4", path / "model")
    if drafter == "dflash":
        return model, dflash_files.RandomDrafter(model, path / "d", dflash_files.KINDS[kind])
    return model, assistant_files.RandomAssistant(model, path / "d", assistant_files.KINDS[kind])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("drafter", "kind"), [("dflash", "biases"), ("dflash", "second"), ("assistant", "usual")]
)
@pytest.mark.parametrize("method", ON_RANKS)
def test_the_drafter_of_ranks_drafts_what_that_of_one_does(
    tmp_path, leaders, monkeypatch, drafter: str, kind: str, method: str, ranks: int
) -> None:
    model, made = make(drafter, kind, tmp_path)
    drafted = note_logits(monkeypatch, BlockDrafter if drafter == "dflash" else AssistantDrafter)
    prompt, texts, counts = random_ids(PROMPT), [], []
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    for count in (1, ranks):
        options = {"draft": made.directory, **ON_RANKS[method]}
        with engine(tmp_path / "model", count, "kv", **options) as ours:
            result = ours.generate(prompt, greedy(NEW))
            assert result.stats["levels"][0] == drafter
            # A text that goes on, and one that turns back.
            longer = prompt + result.token_ids + random_ids(5, 3)
            found = [ours.generate(other, greedy(12)).token_ids for other in (longer, longer[:90])]
            texts.append([result.token_ids, *found])
            counts.append(len(drafted))
    assert_equal_but_for_ties(model, prompt, texts[0][0], theirs[0, PROMPT:].tolist())
    assert texts[0] == texts[1]
    assert leaders[-1].calls.count(RunHead) == counts[1] - counts[0]
    if method in ("speculative", "retrieval"):
        # As many drafts: their lengths follow neither from time nor, as trees, from rounding.
        alone, shared = drafted[: counts[0]], drafted[counts[0] :]
        assert len(alone) == len(shared) > 5
        for one, other in zip(alone, shared, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("drafter", "kind"), [("dflash", "first"), ("assistant", "usual")])
def test_ranks_share_a_drafter_in_blocks(tmp_path, leaders, drafter: str, kind: str) -> None:
    """Rows of its down projection are divided in whole blocks."""
    _, made = make(drafter, kind, tmp_path)
    file = made.write_gguf(tmp_path / "d.gguf", gguf.GGMLQuantizationType.Q8_0)
    prompt, texts = random_ids(PROMPT), []
    for count in (1, 2):
        with engine(tmp_path / "model", count, "kv", draft=file, **ON_RANKS["tree"]) as ours:
            result = ours.generate(prompt, greedy(NEW))
            texts.append((result.token_ids, result.stats["acceptance"]))
    assert texts[0] == texts[1]
