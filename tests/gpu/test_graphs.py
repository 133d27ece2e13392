"""Recorded forwards on a GPU. Simulated without one."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers import BLOCK, PLACEMENTS, SPLIT, random_ids, turns
from simulated_gpu import TOKENS

from triforce_core import Engine, SamplingParams
from triforce_offload.graphs import CudaRecorder, Recorder, Run

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0)
DEVICE = torch.device("cuda:0")


FAMILIES = ("llama", "llama-mqa", "qwen3", "yarn-rope", "dynamic-rope", "exaone4-windows")
FAMILIES += ("gemma4-small",)
DRAFTS = list(product(("ngram", "none", "{model}"), ("off", 12)))


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize(
    ("family", "draft", "tree"),
    [(family, *each) for i, each in enumerate(DRAFTS) for family in turns(FAMILIES, i, 1)],
)
def test_graphs_change_no_text(tiny, family: str, draft: str, tree: str | int) -> None:
    """Greedy in float32; and the recorded forwards were there, where they can be."""
    path, _ = tiny(family)
    prompt = random_ids(38) * 2
    options = {"device": "cuda:0", "max_context": 200, "block_tokens": BLOCK, "dtype": "float32"}
    options |= {"draft": draft.format(model=path), "budget": 48, "draft_tokens": 6, "tree": tree}
    texts = []
    for graphs in (False, True):
        with Engine.from_pretrained(
            path, placement=PLACEMENTS["kv"], cuda_graphs=graphs, **options
        ) as engine:
            assert (engine.models.recorder is not None) == graphs
            texts += [engine.generate(prompt, GREEDY).token_ids for _ in range(2)]
    assert texts == [texts[0]] * 4


PASSES = {
    "none": {"method": "autoregressive"},
    "chain": {"method": "speculative", "draft_tokens": 5, "tree": "off"},
    "tree": {"method": "speculative", "tree": 12},
}


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.usefixtures("recorded_passes")
@pytest.mark.parametrize("kv", ["dense", "split"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "gemma4-small"])
@pytest.mark.parametrize("draft", list(PASSES))
def test_recorded_passes_change_no_text(tiny, draft: str, family: str, kv: str) -> None:
    """Of models that are all on the device, while blocks fill."""
    path, _ = tiny(family)
    prompt = random_ids(BLOCK + 5) * 2
    options = {"device": "cuda:0", "max_context": 200, "block_tokens": BLOCK, "kv": kv}
    options |= {"dtype": "float32" if kv == "dense" else "bfloat16", **PASSES[draft]}
    if draft == "tree":
        options["draft"] = tiny("llama-mqa")[0]
    texts = []
    for graphs in (False, True):
        with Engine.from_pretrained(path, cuda_graphs=graphs, **options) as engine:
            assert not engine.runtime.streams
            if graphs:
                counting = _Counting(engine.models.recorder)
                engine.models = replace(engine.models, recorder=counting)
            texts += [engine.generate(prompt, GREEDY).token_ids for _ in range(2)]
    # Drafts of different lengths are of different sizes.
    assert counting.recorded or draft != "none"
    if kv == "dense":
        assert texts == [texts[0]] * 4


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("size", [1, 3, 32])
def test_a_graph_computes_what_eager_forwards_do(tiny, size: int, rounded: bool) -> None:
    from triforce_core.decoding.drafters.resident import ResidentModel
    from triforce_offload.kv.caches.dense import DenseKV
    from triforce_offload.kv.caches.rounded import RoundedKV
    from triforce_offload.link.trace import NoTrace
    from triforce_offload.weights.store import ResidentWeights

    path, _ = tiny("llama")
    options = {"device": "cuda:0", "max_context": 200, "dtype": "float32"}
    with Engine.from_pretrained(path, **options) as engine, torch.inference_mode():
        both = []
        for recorder in (None, CudaRecorder(DEVICE)):
            kind = RoundedKV if rounded else DenseKV
            kv = kind(engine.runtime.plan.kv.shape, 150, engine.runtime.memory, "test")
            weights = ResidentWeights(engine.runtime.weights)
            model = ResidentModel(engine.model, weights, kv, recorder, NoTrace(), "test")
            both.append((model, kv))
        for step in range(8):
            tokens = torch.tensor(random_ids(size, step), device=DEVICE)
            eager, recorded = (model.logits(tokens, kv.end + 3).clone() for model, kv in both)
            # In 8 bits what lies between two whole numbers may become either.
            near = 2e-1 if rounded else 1e-4
            torch.testing.assert_close(recorded, eager, rtol=1e-4, atol=near)
            for _, kv in both:
                kv.keep(range(min(size, 4)))
        for _, kv in both:
            kv.close()


def test_no_garbage_is_collected_while_a_forward_is_recorded() -> None:
    """The driver refuses to release a graph meanwhile."""
    recorder, seen = CudaRecorder(DEVICE), []
    number = torch.zeros(1, device=DEVICE)

    def run() -> torch.Tensor:
        seen.append(gc.isenabled())
        return number + 1

    def failing() -> torch.Tensor:
        raise RuntimeError("planted")

    assert recorder.record(run)().item() == 1
    with pytest.raises(RuntimeError, match="planted"):
        recorder.record(failing)
    assert seen == [False]
    assert gc.isenabled()


def test_forwards_are_recorded_whose_embeddings_the_host_looks_up(tiny) -> None:
    """As where weights stream: the embedding is the first that leaves the device."""
    path, _ = tiny("llama")
    prompt = random_ids(38) * 2
    options = {"device": "cuda:0", "max_context": 200, "block_tokens": BLOCK, "dtype": "float32"}
    options |= {"draft": "none", "budget": 48, "draft_tokens": 6}
    with Engine.from_pretrained(path, placement=PLACEMENTS["int4"], **options) as engine:
        counting = _Counting(engine.models.recorder)
        engine.models = replace(engine.models, recorder=counting)
        assert engine.model.embeds_apart
        text = engine.generate(prompt, GREEDY).token_ids
        assert counting.recorded
    with Engine.from_pretrained(path, method="autoregressive", **options) as engine:
        assert engine.generate(prompt, GREEDY).token_ids == text


class _Counting:
    """A recorder that counts."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorded, self._recorder = 0, recorder

    def record(self, run: Run) -> Run:
        self.recorded += 1
        return self._recorder.record(run)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["kv", "split"])
def test_graphs_change_no_text_of_weights_and_kv_split(tiny, placement: str) -> None:
    """The retrieval level computes with high bits, over a cache of 8 bits, as on a GPU unasked."""
    path, _ = tiny("llama")
    options = {"device": "cuda:0", "max_context": 200, "block_tokens": BLOCK, "dtype": "bfloat16"}
    options |= {"weights": "split", "kv": "split", "draft_kv": "int8", "draft_weights": "split"}
    options |= {"draft": "none", "budget": 48, "draft_tokens": 6}
    where = {"kv": PLACEMENTS["kv"], "split": SPLIT}[placement]
    prompt = random_ids(38) * 2
    texts, accepted = [], []
    for graphs in (False, True):
        with Engine.from_pretrained(path, placement=where, cuda_graphs=graphs, **options) as engine:
            result = engine.generate(prompt, GREEDY)
        texts.append(result.token_ids)
        accepted.append(result.stats["acceptance"])
    assert texts[0] == texts[1]
    assert accepted[0] == accepted[1]
