"""Passes and steps of heads recorded as graphs, of models that are all on the device."""

from __future__ import annotations

import random
from pathlib import Path

import assistant_files
import dflash_files
import pytest
import torch
from eagle3_heads import KINDS, RandomHead
from float_bounds import assert_within, forward_bound
from head_walks import note_logits
from helpers import BLOCK, VOCAB, add_head, make_model, placed, random_ids
from oracle import assert_equal_but_for_ties, greedy
from recorder import ReplayRecorder
from tiny_families import FAMILIES, WITH_EXPERTS

from triforce_core import Engine
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.decoder import PassInput
from triforce_core.decoding.drafters.assistant import AssistantDrafter
from triforce_core.decoding.drafters.block import BlockDrafter
from triforce_core.decoding.drafters.head import HeadDrafter
from triforce_core.decoding.drafters.of_states import DrafterOfStates
from triforce_offload.kv.store import KVStore
from triforce_offload.plan.memory_plan import Where

pytestmark = pytest.mark.usefixtures("recordable")

DRAFTS = {
    "none": {"method": "autoregressive"},
    "chain": {"method": "speculative", "draft_tokens": 6, "tree": "off"},
    "tree": {"method": "speculative", "tree": 12},
}
# The host computes frequencies, or without kernels chooses the experts to multiply by.
RECORDED = [name for name in FAMILIES if name != "dynamic-rope" and name not in WITH_EXPERTS]
PROMPT = random_ids(BLOCK + 5) * 2


def engine(
    path: Path, recorder: ReplayRecorder | None, where: str = "resident", **options: object
) -> Engine:
    """An engine that records passes as one on a GPU does, if there is a recorder."""
    given = {"device": "cpu", "max_context": 200, "block_tokens": BLOCK, "dtype": "float32"}
    ours = Engine.from_pretrained(path, **placed(where, given | options))
    if recorder is not None:
        layers = ours.runtime.plan.layers
        here = all(layer.where is Where.DEVICE for layer in layers)
        ours.models.records_passes = here and not ours.models.budget
        ours.models.recorder = recorder
    return ours


@pytest.mark.one_in(12)
@pytest.mark.parametrize("draft", list(DRAFTS))
@pytest.mark.parametrize("family", RECORDED)
def test_recorded_passes_change_no_text(tiny, family: str, draft: str) -> None:
    """While blocks fill, and in a second request, which reuses a part of the first one's KV."""
    path, twin = tiny(family)
    recorder, texts = ReplayRecorder(), []
    for how in (None, recorder):
        with engine(path, how, **DRAFTS[draft]) as ours:
            for prompt in (PROMPT, PROMPT[:-7]):
                texts.append((prompt, ours.generate(prompt, greedy(50)).token_ids))
    for (prompt, plain), (_, recorded) in zip(texts[:2], texts[2:], strict=True):
        assert_equal_but_for_ties(twin, prompt, recorded, plain)
    assert recorder.replayed > 2 * recorder.recorded > 0


@pytest.mark.one_in(6)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "qwen3_5", "lfm2", "granite4-h"])
def test_recorded_passes_compute_what_eager_ones_do(tiny, family: str) -> None:
    """Chains and random trees, of which any path is kept, over some blocks."""
    path, twin = tiny(family)
    bound = 2 * forward_bound(twin, 200).logits
    recorder, draw = ReplayRecorder(), random.Random(family)
    with (
        engine(path, None, **DRAFTS["tree"]) as plain,
        engine(path, recorder, **DRAFTS["tree"]) as ours,
        torch.inference_mode(),
    ):
        both = [Context(each.models) for each in (plain, ours)]
        for context in both:
            context.prefill(PROMPT[: BLOCK // 2], 150, lambda layer: None)
        for step in range(60):
            # Some passes of each size between two blocks.
            count = draw.choice((1, 7))
            chain = range(-1, count - 1)
            parents = [draw.randint(-1, row - 1) for row in range(count)] if step % 3 else chain
            tokens = torch.tensor([draw.randrange(VOCAB) for _ in range(count)])
            ask = PassInput(tokens, None if parents is chain else tuple(parents))
            eager, recorded = (context.run(ask).clone() for context in both)
            assert_within(recorded, eager, bound)
            kept = [draw.randrange(count)]
            while parents[kept[0]] >= 0:
                kept.insert(0, parents[kept[0]])
            for context in both:
                context.keep(kept[:2])
        assert both[0].length == both[1].length > 2 * BLOCK
        for context in both:
            context.close()
    assert recorder.recorded > 0
    assert recorder.replayed > 8


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("kv", DRAFTS["chain"]),
        ("weights", DRAFTS["chain"]),
        ("processor", DRAFTS["chain"]),
        ("kv", {"method": "triforce", "draft": "none", "budget": 32}),
    ],
)
def test_what_streams_is_not_recorded(tiny, where: str, options: dict[str, object]) -> None:
    """Unless a retrieval level is, whose forwards end at logits."""
    path, recorder = tiny("llama")[0], ReplayRecorder()
    with engine(path, recorder, where, **options) as ours:
        ours.generate(PROMPT, greedy(20))
        context = ours._contexts.latest
        assert not context.recorded.fits(1)
        assert bool(recorder.recorded) == ("budget" in options)


def test_a_context_that_begins_to_stream_is_not_recorded_any_longer(tiny) -> None:
    path, twin = tiny("llama")
    texts, recorder = [], ReplayRecorder()
    for how in (None, recorder):
        with engine(path, how, "kv-in-part", **DRAFTS["none"]) as ours:
            texts.append(ours.generate(PROMPT, greedy(40)).token_ids)
            assert not ours._contexts.latest.recorded.fits(1)
    assert_equal_but_for_ties(twin, PROMPT, texts[1], texts[0])
    assert recorder.recorded == 1


def test_passes_over_several_sequences_are_not_recorded(tiny) -> None:
    path, recorder = tiny("llama")[0], ReplayRecorder()
    prompts = [PROMPT, PROMPT[3:]]
    with engine(path, None, sequences=2, **DRAFTS["none"]) as ours:
        expected = [ours.generate(prompt, greedy(15)).token_ids for prompt in prompts]
    with engine(path, recorder, sequences=2, **DRAFTS["none"]) as ours:
        results = ours.generate_all(prompts, greedy(15))
        assert [result.token_ids for result in results] == expected
        assert recorder.recorded == 0


def test_a_pass_is_recorded_anew_where_blocks_have_moved(tiny, monkeypatch) -> None:
    """A graph of other addresses would read what is no longer there."""
    path, twin = tiny("llama")
    recorder = ReplayRecorder()
    with engine(path, recorder, **DRAFTS["none"]) as ours:
        expected = ours.generate(PROMPT, greedy(40)).token_ids
        recorded = recorder.recorded
        # A pass of one row, anew for each block that fills.
        assert recorded == 1 + (len(PROMPT) + 37) // BLOCK - len(PROMPT) // BLOCK
        again = ours.generate(PROMPT, greedy(40)).token_ids
        assert_equal_but_for_ties(twin, PROMPT, again, expected)
    # Without the check of addresses the text is another one.
    monkeypatch.setattr(KVStore, "addresses", lambda self: torch.zeros(1))
    with engine(path, ReplayRecorder(), **DRAFTS["none"]) as ours:
        assert ours.generate(PROMPT, greedy(40)).token_ids != expected


def test_recorded_passes_serve_the_next_request(tiny) -> None:
    path, recorder = tiny("llama")[0], ReplayRecorder()
    with engine(path, recorder, **DRAFTS["none"]) as ours:
        for _ in range(3):
            ours.generate(PROMPT[:BLOCK], greedy(8), reuse=False)
            recorded = recorder.recorded
        assert recorded == 1


def assert_recorded_alike(
    monkeypatch: pytest.MonkeyPatch,
    kind: type[DrafterOfStates],
    path: Path,
    options: dict[str, object],
    least: int,
) -> None:
    """That a drafter computes the same whether its forwards and passes are recorded or not, in
    more than `least` forwards.
    """
    recorder, texts, counts = ReplayRecorder(), [], []
    logits = note_logits(monkeypatch, kind)
    for how in (None, recorder):
        with engine(path, how, method="speculative", **options) as ours:
            texts.append(ours.generate(PROMPT, greedy(30)).token_ids)
        counts.append(len(logits))
    assert texts[0] == texts[1]
    eager, recorded = logits[: counts[0]], logits[counts[0] :]
    assert len(eager) == len(recorded) > least
    for one, other in zip(eager, recorded, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    assert recorder.replayed > least


CHAINS_AND_TREES = pytest.mark.parametrize(
    "draft", [{"draft_tokens": 5, "tree": "off"}, {"tree": 9}]
)


@CHAINS_AND_TREES
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_recorded_heads_compute_what_eager_ones_do(
    tmp_path, monkeypatch, kind: str, draft: dict[str, object]
) -> None:
    """Over hidden states that passes leave, recorded ones too."""
    model = make_model("qwen3_5" if kind == "mtp" else "llama", tmp_path)
    head: object = kind
    if kind == "mtp":
        add_head(tmp_path, model)
    else:
        head = RandomHead(model, tmp_path / "head", KINDS["specforge"]).directory
    assert_recorded_alike(monkeypatch, HeadDrafter, tmp_path, {"draft": head, **draft}, 30)


@CHAINS_AND_TREES
@pytest.mark.parametrize("kind", assistant_files.KINDS)
def test_recorded_assistants_compute_what_eager_ones_do(
    tmp_path, monkeypatch, kind: str, draft: dict[str, object]
) -> None:
    """With padding behind their rows, and with what recorded passes show of the model's keys."""
    model = make_model("gemma4", tmp_path)
    made = assistant_files.RandomAssistant(model, tmp_path / "a", assistant_files.KINDS[kind])
    options = {"draft": made.directory, **draft}
    assert_recorded_alike(monkeypatch, AssistantDrafter, tmp_path, options, 30)


@CHAINS_AND_TREES
@pytest.mark.parametrize("kind", ["first", "both kinds", "causal windows", "second, scaled"])
def test_recorded_blocks_compute_what_eager_ones_do(
    tmp_path, monkeypatch, kind: str, draft: dict[str, object]
) -> None:
    """With padding behind their rows, in layers that are causal and in others."""
    model = make_model("llama", tmp_path)
    made = dflash_files.RandomDrafter(model, tmp_path / "d", dflash_files.KINDS[kind])
    options = {"draft": made.directory, **draft}
    assert_recorded_alike(monkeypatch, BlockDrafter, tmp_path, options, 10)
