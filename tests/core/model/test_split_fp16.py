"""Weights of float16 in two byte split: bitwise what dense ones give, at every placement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import BLOCK, PLACEMENTS, make_model, placed, random_ids

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.decoder import Ask
from triforce_core.model.known.shapes import read_shape
from triforce_core.model.tensors import dense_layouts, split_layouts
from triforce_offload.plan.placement import Placement
from triforce_offload.weights.formats import Dtype

PROMPT, GREEDY = random_ids(75), SamplingParams(24, temperature=0)
HALVED = Placement((0, 1, 2), True, 10**6, 2, 0, 0, split_layers=(0, 1, 2))


def engine(path: Path, weights: str, **options: object) -> Engine:
    options = {"device": "cpu", "dtype": "float16", "max_context": 120, **options}
    return Engine.from_pretrained(path, weights=weights, block_tokens=BLOCK, **options)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2"])
@pytest.mark.parametrize("placement", ["resident", "both-one-slot", "halved"])
def test_logits_are_bitwise_those_of_dense_weights(tiny, family: str, placement: str) -> None:
    path, _ = tiny(family)
    logits = []
    for weights in ("dense", "split"):
        where = HALVED if placement == "halved" else PLACEMENTS[placement]
        if weights == "dense" and placement == "halved":
            where = PLACEMENTS["weights"]
        options = {"method": "speculative", "draft_tokens": 4, "placement": where}
        with engine(path, weights, **options) as running:
            context = Context(running.models)
            read = context.prefill(PROMPT, 8, lambda layer: None).logits
            one = context.run(Ask(torch.tensor([5]), is_kept=True, more=False))
            several = context.run(Ask(torch.tensor([7, 8, 9])))
            context.close()
        logits.append(torch.cat((read, one, several)))
    dense, split = logits
    assert dense.std() > 1e-3, "it would be no test"
    assert torch.equal(split, dense)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("placement", [*PLACEMENTS, "halved"])
def test_texts_are_the_same_at_every_placement(tiny, placement: str) -> None:
    path, _ = tiny("llama")
    params = SamplingParams(24, temperature=0.8, top_p=0.9, seed=3)
    options = {"budget": 32, "accept": "coupled", "draft_tokens": 4, "draft_weights": "auto"}
    texts = []
    for weights in ("dense", "split"):
        own = dict(options)
        if placement != "halved":
            own = placed(placement, own)
        elif weights == "split":
            own |= {"placement": HALVED}
        with engine(path, weights, **own) as running:
            result = running.generate(PROMPT, params)
        texts.append(result.token_ids)
        memory = result.stats["memory"]
        assert memory["device_peak_bytes"] <= memory["device_budget_bytes"]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_half_of_a_pass_streams_and_half_of_a_number_drafts(tmp_path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 24}
    make_model("llama", tmp_path, **sizes, initializer_range=0.05)
    with engine(tmp_path, "dense", method="autoregressive") as plain:
        dense_bytes = plain.runtime.plan.requirements.weights_bytes
        expected = plain.generate(PROMPT, GREEDY)
    less = expected.stats["memory"]["device_peak_bytes"] - int(0.3 * dense_bytes)
    options = {"draft": "none", "draft_tokens": 4, "budget": 32, "device_memory": less}
    with engine(tmp_path, "split", **options) as running:
        placement = running.runtime.plan.placement
        stats = running.generate(PROMPT, GREEDY).stats
    assert placement.split_layers == placement.streamed_layers
    assert len(placement.split_layers) > 0
    assert stats["levels"] == ["retrieval", "target"]
    streamed = len(placement.split_layers) / 24
    assert stats["link"]["bytes_to_device"] / stats["passes"] <= 0.51 * streamed * dense_bytes
    bits = stats["bits_per_number"]["weights"]
    # Vectors, and what fills up rows of 256 bytes.
    assert (bits["stored"], bits["link"]) == pytest.approx((16, 8), rel=0.02)


def test_a_model_takes_what_it_took() -> None:
    config, dtype = read_shape("llama2-7b"), Dtype("float16", 2)
    dense, split = dense_layouts(config, dtype), split_layouts(config, dtype)
    assert split.split
    assert split.nbytes == dense.nbytes
    assert split.layers[0].low_bytes == pytest.approx(dense.layers[0].nbytes / 2, rel=0.001)
