"""Every share of layers with every share of KV blocks that the processor may compute: the text, and
links that fail (F2).
"""

from __future__ import annotations

from itertools import product

import pytest
from helpers import BLOCK, random_ids
from oracle import assert_own_texts
from test_link_faults import FaultyLink

from triforce_core import Engine, SamplingParams
from triforce_offload.errors import LinkError
from triforce_offload.memory.host import HostMemory
from triforce_offload.plan.placement import Placement

GREEDY = SamplingParams(14, temperature=0)
SAMPLED = SamplingParams(14, temperature=0.8, seed=5)
# Twice the same, so that n-grams draft.
PROMPT = random_ids(40) * 2
LAYERS = {"no layer": (), "one layer": (1,), "all layers": (0, 1, 2)}
SHARES = (0.0, 0.3, 0.6, 1.0)
OPTIONS = {"device": "cpu", "max_context": 120, "block_tokens": BLOCK, "dtype": "float32"}
WAYS: dict[str, dict[str, object]] = {
    "plain": {"method": "autoregressive"},
    "chains": {"method": "speculative", "draft": "ngram", "draft_tokens": 4},
    "trees": {"method": "speculative", "draft": "ngram", "tree": 6},
    "several sequences": {"method": "speculative", "draft": "ngram", "sequences": 2},
}


def left_to_the_processor(layers: str, share: float) -> Placement:
    """All weights and nearly all KV are away; some of both are the processor's."""
    return Placement(
        *((0, 1, 2), False, 2, 2, 3, 2), processor_layers=LAYERS[layers], processor_kv=share
    )


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("family", "way"), [*product(("llama", "gemma3", "qwen3_5", "qwen3_moe"), WAYS)]
)
@pytest.mark.parametrize("layers", LAYERS)
def test_the_text_is_the_models_at_every_share_of_kv(
    tiny, family: str, way: str, layers: str
) -> None:
    path, model = tiny(family)
    prompts, texts, counts, drawn = [PROMPT, PROMPT[:50]], [], [], set()
    for share in SHARES:
        placement = left_to_the_processor(layers, share)
        with Engine.from_pretrained(
            path, **OPTIONS | WAYS[way], accept="coupled", placement=placement
        ) as engine:
            texts.append(engine.generate_all(prompts, GREEDY))
            drawn.add(tuple(engine.generate(PROMPT, SAMPLED).token_ids))
            kv, computed = engine.memory_plan.kv, engine.memory_plan.layer_counts
        counts.append(kv.by_processor)
        assert computed["processor_layers"] == len(LAYERS[layers])
    assert counts[0] == 0 < counts[1] < counts[2] < counts[3] == kv.away
    assert_own_texts(model, prompts, [GREEDY] * 2, *texts)
    assert len(drawn) == 1


@pytest.mark.one_in(5)
@pytest.mark.parametrize("fault", ["fail", "refuse"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("share", SHARES)
def test_a_link_that_fails_is_an_error_and_the_next_request_is_right(
    tiny, monkeypatch, fault: str, layers: str, share: float
) -> None:
    """At some copies of the prefill and of the passes, the last one among them."""
    (path, model), link = tiny("llama"), FaultyLink(fault)
    monkeypatch.setattr("triforce_core.loading.load.open_link", lambda *_: (link, HostMemory()))
    options = {"method": "autoregressive", "placement": left_to_the_processor(layers, share)}
    with Engine.from_pretrained(path, **OPTIONS | options) as engine:
        memory = engine.runtime.memory.available_bytes
        link.count_from_here()
        results = [engine.generate(PROMPT, GREEDY, reuse=False)]
        copies = link.copies
        for at in sorted({*range(1, copies, max(1, copies // 8)), copies}):
            link.count_from_here(at)
            with pytest.raises(LinkError, match="planted"):
                engine.generate(PROMPT, GREEDY, reuse=False)
            assert engine.runtime.memory.available_bytes == memory
            link.count_from_here()
            results.append(engine.generate(PROMPT, GREEDY, reuse=False))
    assert len(results) > 5
    assert_own_texts(model, [PROMPT], [GREEDY], *([each] for each in results))
