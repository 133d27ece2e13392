"""Assistants of Gemma 4 where ranks share the model, and the assistant's layers."""

from __future__ import annotations

import gguf
import pytest
import torch
from assistant_files import KINDS, RandomAssistant
from head_walks import ON_RANKS
from helpers import make_model, random_ids
from oracle import assert_equal_but_for_ties, greedy
from thread_ranks import engine

from triforce_core.decoding.contexts.calls import RunHead
from triforce_core.decoding.drafters.assistant import AssistantDrafter

PROMPT, NEW = 120, 40


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of the first rank's rows, in order."""
    logits, run = [], AssistantDrafter.run

    def recorded(drafter: AssistantDrafter, *given: object) -> torch.Tensor:
        found = run(drafter, *given)
        if found.shape[1]:
            logits.append(found.clone())
        return found

    monkeypatch.setattr(AssistantDrafter, "run", recorded)
    return logits


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("method", ON_RANKS)
def test_the_assistant_of_ranks_drafts_what_that_of_one_does(
    tmp_path, leaders, drafted, method: str, ranks: int
) -> None:
    model = make_model("gemma4", tmp_path / "model")
    made = RandomAssistant(model, tmp_path / "assistant", KINDS["usual"])
    prompt, texts, counts = random_ids(PROMPT), [], []
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    for count in (1, ranks):
        options = {"draft": made.directory, **ON_RANKS[method]}
        with engine(tmp_path / "model", count, "kv", **options) as ours:
            result = ours.generate(prompt, greedy(NEW))
            assert result.stats["levels"][0] == "assistant"
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


def test_ranks_share_an_assistant_in_blocks(tmp_path, leaders) -> None:
    model = make_model("gemma4", tmp_path / "model")
    made = RandomAssistant(model, tmp_path / "assistant", KINDS["usual"])
    file = made.write_gguf(tmp_path / "a.gguf", gguf.GGMLQuantizationType.Q8_0)
    prompt, texts = random_ids(PROMPT), []
    for count in (1, 2):
        with engine(tmp_path / "model", count, "kv", draft=file, **ON_RANKS["tree"]) as ours:
            result = ours.generate(prompt, greedy(NEW))
            texts.append((result.token_ids, result.stats["acceptance"]))
    assert texts[0] == texts[1]
