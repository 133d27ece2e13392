"""Contexts of several ranks: saved whole, they go on on any number of GPUs (C2); a file that is
damaged, or a fault of any rank, leaves an engine that answers or says so.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from float_bounds import assert_within, forward_bound
from helpers import BLOCK, make_model, random_ids
from thread_ranks import engine

from triforce_core import Engine, SamplingParams
from triforce_core.server.contexts import KeptContexts
from triforce_offload.errors import LinkError, UsageError

PROMPT = random_ids(5 * BLOCK + 3)
PARAMS = SamplingParams(20, temperature=0)
DRAFTS = {"method": "triforce", "budget": 32, "draft_tokens": 4, "draft": "none"}


def kept(ours: Engine, path: Path) -> tuple[list[int], list[int]]:
    """Of a context that an engine writes: a prompt that begins with it, and what follows that."""
    # Passes of the target have scored its chunks.
    begun = ours.generate(PROMPT, PARAMS).token_ids
    assert ours.save_context(path) == len(PROMPT) + len(begun) - 1
    prompt = [*PROMPT, *begun, 5, 6, 7]
    return prompt, ours.generate(prompt, PARAMS).token_ids


def goes_on(ours: Engine, path: Path, prompt: list[int]) -> list[int]:
    tokens = ours.load_context(path).tokens
    assert tokens == len(prompt) - 4
    result = ours.generate(prompt, PARAMS)
    assert result.stats["reused_tokens"] == tokens
    return result.token_ids


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("family", "saves", "loads"),
    [
        *(("llama", 2, 1), ("llama", 1, 2), ("llama-mha", 4, 2), ("llama-mqa", 2, 4)),
        *(("exaone4-windows", 2, 1), ("exaone4-windows", 1, 2)),
        *(("mistral-windows", 2, 1), ("mistral-windows", 1, 2)),
        *(("gemma4", 2, 1), ("gemma4", 1, 2)),
        *(("qwen3_5", 2, 1), ("qwen3_5", 1, 2), ("lfm2", 2, 1), ("lfm2", 1, 2)),
        *(("nemotron_h-moe", 2, 1), ("nemotron_h-moe", 1, 2)),
    ],
)
@pytest.mark.parametrize("placement", ["resident", "kv-in-part"])
def test_a_context_goes_on_with_any_number_of_ranks(
    tiny, tmp_path, leaders, family: str, saves: int, loads: int, placement: str
) -> None:
    path, file = tiny(family)[0], tmp_path / "context"
    with engine(path, saves, placement, **DRAFTS) as first:
        prompt, expected = kept(first, file)
    with engine(path, loads, placement, **DRAFTS) as other:
        assert goes_on(other, file, prompt) == expected


def test_its_numbers_are_those_of_one_rank(tmp_path, leaders) -> None:
    """Of heads that are spread unevenly, and of the scores of their chunks."""
    twin = make_model(
        "llama",
        tmp_path / "model",
        num_attention_heads=6,
        num_key_value_heads=3,
        hidden_size=96,
        max_position_embeddings=300,
    )
    snapshots = []
    for ranks in (1, 2):
        with engine(tmp_path / "model", ranks, "kv-in-part", **DRAFTS) as ours:
            ours.generate(PROMPT, PARAMS)
            saved = ours.snapshot()
            layers = [saved.layer_kv(layer) for layer in range(saved.layers)]
            snapshots.append((torch.stack(layers), saved.scores))
    bound = forward_bound(twin, len(PROMPT) + 20)
    for each in zip(*snapshots, strict=True):
        assert all(numbers.count_nonzero() > numbers.numel() / 2 for numbers in each)
    (kv, scores), (kv_of_two, scores_of_two) = snapshots
    assert_within(kv_of_two, kv, 2 * bound.keys_values)
    # Masses are rounded to bfloat16 and added up, where they fade by a tenth in each pass.
    rounding = torch.finfo(torch.bfloat16).eps * scores
    assert_within(scores_of_two, scores, 2 * 10 * bound.attention + rounding)


def test_scores_of_heads_that_several_ranks_have_are_not_kept(tiny, tmp_path, leaders) -> None:
    """Each of these knows what its own query heads attend to."""
    path, file = tiny("llama-mqa")[0], tmp_path / "context"
    with engine(path, 2, "kv", **DRAFTS) as ours:
        prompt, expected = kept(ours, file)
        assert ours.snapshot().scores is None
        assert goes_on(ours, file, prompt) == expected


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_damaged_file_leaves_all_ranks_as_they_can_be_used(
    tiny, tmp_path, leaders, fails: int
) -> None:
    path, file = tiny("llama")[0], tmp_path / "context"
    with engine(path, 2, "kv", **DRAFTS) as ours:
        prompt, expected = kept(ours, file)
        whole = file.read_bytes()
        # In the first layer, in one of the middle, in the last: others were handed over before.
        at = len(whole) * (2 + 3 * fails) // 10
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(UsageError, match="is damaged"):
            ours.load_context(file)
        assert ours.generate(prompt, PARAMS).token_ids == expected
        file.write_bytes(whole)
        assert goes_on(ours, file, prompt) == expected


def test_a_rank_that_leads_and_fails_while_it_restores_can_go_on(
    tiny, tmp_path, leaders, monkeypatch
) -> None:
    path, file = tiny("llama")[0], tmp_path / "context"
    with engine(path, 2, "kv", **DRAFTS) as ours:
        prompt, expected = kept(ours, file)
        kv = type(ours._contexts.latest.sequence.kv)
        original, calls = kv.fill, []

        def fill(self, layer: int, *arguments, **options) -> None:
            latest = ours._contexts.latest
            # None once it has failed here, which others may notice before they fill theirs.
            if latest is not None and self is latest.sequence.kv:
                calls.append(layer)
                if layer == 1:
                    raise LinkError("planted")
            original(self, layer, *arguments, **options)

        monkeypatch.setattr(kv, "fill", fill)
        with pytest.raises(LinkError, match="planted"):
            ours.load_context(file)
        assert calls == [0, 1]
        monkeypatch.undo()
        assert goes_on(ours, file, prompt) == expected


@pytest.mark.slow
def test_conversations_of_a_server_wait_in_host_memory(tiny, leaders) -> None:
    path, one, two = tiny("llama")[0], random_ids(300, 1), random_ids(280, 2)
    with engine(path, 2, "kv", max_context=400, **DRAFTS) as ours:
        contexts = KeptContexts(ours, 2)
        texts = []
        for prompt in (one, two, one, two):
            contexts.prepare(prompt)
            result = ours.generate(prompt, PARAMS)
            texts.append((result.token_ids, result.stats["reused_tokens"]))
    assert [text for text, _ in texts[:2]] == [text for text, _ in texts[2:]]
    assert [reused for _, reused in texts] == [0, 0, 299, 279]
