"""Recorded forwards: equal to eager ones, whatever was fed before, and exact in the speculative."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from float_bounds import assert_within, forward_bound
from helpers import BLOCK, FAMILIES, PLACEMENTS, random_ids
from oracle import greedy
from recorder import ReplayRecorder
from tiny_families import WITH_EXPERTS

from triforce_core import Engine, SamplingParams
from triforce_core.decoding import speculative
from triforce_core.decoding.distributions import distributions
from triforce_core.decoding.drafters.drafted_rows import DraftedRows
from triforce_core.decoding.drafters.resident import ResidentModel
from triforce_core.decoding.recorded import padded
from triforce_offload.kv.caches.dense import DenseKV
from triforce_offload.kv.caches.rounded import RoundedKV
from triforce_offload.kv.recent.stores import RecentStores
from triforce_offload.kv.states.store import StateStore
from triforce_offload.kv.windows.store import WindowStore
from triforce_offload.link.trace import NoTrace
from triforce_offload.memory.device import DeviceMemory
from triforce_offload.weights.store import ResidentWeights

pytestmark = pytest.mark.usefixtures("recordable")

CPU = torch.device("cpu")
# A nucleus has an edge, where rounding decides.
SAMPLED = SamplingParams(temperature=0.8, top_p=1)


# The host computes frequencies, or without kernels chooses the experts to multiply by.
NEVER_RECORDED = {"dynamic-rope", *WITH_EXPERTS}


def test_sizes_are_powers_of_two() -> None:
    assert [padded(n) for n in (1, 2, 3, 4, 5, 8, 9, 17, 32)] == [1, 2, 4, 4, 8, 8, 16, 32, 32]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("family", "kind"),
    [*((f, DenseKV) for f in FAMILIES if f not in NEVER_RECORDED), ("llama", RoundedKV)],
)
def test_recorded_forwards_equal_eager_ones(tiny, family: str, kind: type[DenseKV]) -> None:
    """Feeding, keeping and rolling back by random lengths."""
    path, twin = tiny(family)
    bound = forward_bound(twin, 150)
    # Two computations. In 8 bits what lies between two whole numbers may become either.
    near = 2 * bound.probs(SAMPLED.temperature) if kind is DenseKV else 2e-2
    recorder = ReplayRecorder()
    generator = torch.Generator().manual_seed(0)
    options = {"device": "cpu", "max_context": 200, "method": "autoregressive"}
    with Engine.from_pretrained(path, **options) as engine, torch.inference_mode():
        memory = DeviceMemory(CPU, None)
        needs = engine.runtime.plan.requirements
        both = []
        for how in (None, recorder):
            recent = RecentStores(
                needs.windows and WindowStore(needs.windows, 150, memory),
                needs.states and StateStore(needs.states, 150, memory),
            )
            kv = kind(needs.kv, 150, memory, "test", recent)
            model = ResidentModel(
                engine.model,
                ResidentWeights(engine.runtime.weights),
                kv,
                how,
                NoTrace(),
                "test",
            )
            both.append((model, kv))
        while both[0][1].end < 80:
            count = int(2 ** (5.1 * torch.rand((), generator=generator)))
            kept = int(torch.randint(min(count, 3) + 1, (), generator=generator))
            tokens = torch.tensor(random_ids(count, int(both[0][1].end)))
            eager, recorded = (
                distributions(model.logits(tokens, kv.end + 7), SAMPLED) for model, kv in both
            )
            assert recorded.shape == eager.shape == (count, engine.config.vocab)
            assert_within(recorded, eager, near)
            last = distributions(both[1][0].logits(tokens, both[1][1].end + 7, last=True), SAMPLED)
            assert_within(last, eager[-1:], near)
            for _, kv in both:
                kv.keep(range(kept))
        rows = [kv.rows[:, :, :, : kv.end].float() for _, kv in both]
        assert_within(*rows, 2 * bound.keys_values if kind is DenseKV else 1)
    assert recorder.recorded == 6
    assert recorder.replayed > 50


@pytest.mark.parametrize("kind", [DenseKV, RoundedKV])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_recorded_forwards_continue_trees_as_eager_ones_do(tiny, family: str, kind) -> None:
    """Rows that follow any earlier ones, some kept, with the cache forgotten now and then."""
    path, twin = tiny(family)
    bound = forward_bound(twin, 150)
    near = 2 * bound.probs(SAMPLED.temperature) if kind is DenseKV else 2e-2
    recorder, draw = ReplayRecorder(), random.Random(1)
    options = {"device": "cpu", "max_context": 200, "method": "autoregressive"}
    with Engine.from_pretrained(path, **options) as engine, torch.inference_mode():
        memory, needs, both = DeviceMemory(CPU, None), engine.runtime.plan.requirements, []
        weights = ResidentWeights(engine.runtime.weights)
        for how in (None, recorder):
            recent = RecentStores(needs.windows and WindowStore(needs.windows, 150, memory))
            kv = kind(needs.kv, 150, memory, "test", recent)
            both.append(
                (ResidentModel(engine.model, weights, kv, how, NoTrace(), "test", drafted=60), kv)
            )
            both[-1][0].logits(torch.tensor(random_ids(20, 3)), 0)
            kv.keep(range(20))
        for _ in range(8):
            drafted = DraftedRows()
            for _ in range(4):
                held, count = len(drafted), draw.choice((1, 2, 3, 7))
                parents = [draw.randint(-1, held + row - 1) for row in range(count)]
                rows = drafted.follow(count, parents, 20)
                tokens = torch.tensor(random_ids(count, draw.randint(0, 99)))
                eager, recorded = (
                    distributions(model.logits(tokens, 20 + held, rows), SAMPLED)
                    for model, _ in both
                )
                assert_within(recorded, eager, near)
                leaves = {row for row in range(count) if held + row not in parents}
                kept = [row for row in range(count) if row not in leaves or not row]
                kept = [row for row in kept if parents[row] < held or parents[row] - held in kept]
                drafted.keep(kept)
                for _, kv in both:
                    kv.keep(kept)
            for _, kv in both:
                kv.end = 20
                kv.recent.forget()
    assert recorder.recorded >= 3
    assert recorder.replayed > 10


def test_rounds_know_whether_anything_was_recorded_in_them(tiny, monkeypatch) -> None:
    path, _ = tiny("llama")
    options = {"device": "cpu", "max_context": 200, "method": "triforce", "draft": "none"}
    rounds, recorder = [], ReplayRecorder()
    propose, verify_draft, known = speculative.propose_draft, speculative.verify_draft, []

    def proposing(*values):
        known.append(recorder.recorded)
        return propose(*values)

    def settling(*values):
        outcome = verify_draft(*values)
        rounds.append((outcome.warm, recorder.recorded == known[-1]))
        return outcome

    monkeypatch.setattr(speculative, "propose_draft", proposing)
    monkeypatch.setattr(speculative, "verify_draft", settling)
    with Engine.from_pretrained(path, draft_tokens=5, budget=48, **options) as engine:
        engine.models = replace(engine.models, recorder=recorder)
        engine.generate(random_ids(100), greedy(60))
    assert {warm for warm, _ in rounds} == {True, False}
    assert all(warm == calm for warm, calm in rounds)


def test_what_cannot_be_recorded_runs_eagerly_with_a_warning(tiny, recwarn) -> None:
    class Refusing:
        def record(self, run):
            raise RuntimeError("no graphs here\nand a long story")

    path, _ = tiny("llama")
    options = {"device": "cpu", "max_context": 120, "draft": "none", "draft_tokens": 5}
    options["budget"] = 64
    texts = []
    for recorder in (None, Refusing()):
        with Engine.from_pretrained(path, **options) as engine:
            engine.models = replace(engine.models, recorder=recorder)
            texts.append(engine.generate(random_ids(60), greedy(30)).token_ids)
    assert texts[0] == texts[1]
    (warning,) = [w for w in recwarn.list if "recording them failed" in str(w.message)]
    assert str(warning.message).endswith("no graphs here")


def test_what_the_host_computes_is_not_recorded(tiny) -> None:
    """Dynamic rope, and an embedding in host memory."""
    path, _ = tiny("dynamic-rope")
    with Engine.from_pretrained(path, device="cpu", max_context=60) as engine:
        assert not engine.model.recordable
    path, _ = tiny("llama")
    with Engine.from_pretrained(path, device="cpu", max_context=60) as engine:
        assert engine.model.recordable


@pytest.mark.first
@pytest.mark.parametrize("draft", ["ngram", "none", "{self}", "{other}"])
def test_the_hierarchy_over_recorded_forwards_changes_no_text(tiny, draft: str) -> None:
    """Many passes, refreshes and requests; at temperature 0, and coupled at 0.8."""
    path, _ = tiny("llama")
    other, _ = tiny("qwen3")
    prompt = random_ids(38, 6) * 2
    options = {"device": "cpu", "max_context": 200, "block_tokens": BLOCK, "accept": "coupled"}
    requests = (greedy(28), SamplingParams(28, temperature=0.8, top_p=0.9, seed=4))
    with Engine.from_pretrained(path, method="autoregressive", **options) as engine:
        expected = [engine.generate(prompt, params).token_ids for params in requests]
    with Engine.from_pretrained(
        path,
        draft={"{self}": path, "{other}": other}.get(draft, draft),
        budget=48,
        draft_tokens=9,
        inner_draft_tokens=4,
        placement=PLACEMENTS["kv"],
        **options,
    ) as engine:
        recorder = ReplayRecorder()
        engine.models = replace(engine.models, recorder=recorder)
        assert [engine.generate(prompt, params).token_ids for params in requests] == expected
        assert engine.generate(prompt, requests[0]).token_ids == expected[0]
    assert recorder.replayed > 20
