"""Parts of passes that the processor computes for several ranks, each of which has a share."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from helpers import PLACEMENTS, random_ids
from oracle import assert_equal_but_for_ties, greedy
from thread_ranks import engine

from triforce_core.plan import resolve
from triforce_kernels.host.library import library

PROMPT, NEW = random_ids(60), 16
WEIGHTS = PLACEMENTS["weights"]
PLACED = {
    "layers": replace(WEIGHTS, processor_layers=(0, 2)),
    "layers and KV": PLACEMENTS["processor"],
    "experts": replace(WEIGHTS, expert_layers=(0, 1, 2), processor_layers=(0, 2)),
    "pools": replace(WEIGHTS, expert_layers=(0, 1, 2), processor_layers=(0, 1, 2), expert_slots=2),
}
DENSE = ("llama", "olmo2", "gemma3", "qwen3_5", "granite4-h")
SPARSE = ("qwen3_moe", "gpt-oss-moe", "gemma4-moe", "glm4_lite-moe", "nemotron_h-latent-moe")
CASES = [
    *((family, placed) for family in (*DENSE, *SPARSE) for placed in ("layers", "layers and KV")),
    *((family, placed) for family in SPARSE for placed in ("experts", "pools")),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("family", "placed"), CASES)
def test_the_text_is_the_model_s(tiny, leaders, family: str, placed: str) -> None:
    path, model = tiny(family)
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    with engine(path, 2, PLACED[placed], method="speculative") as ours:
        result = ours.generate(PROMPT, greedy(NEW))
        hits = [pool.hits + pool.misses for pool in ours.runtime.expert_pools.values()]
    assert_equal_but_for_ties(model, PROMPT, result.token_ids, theirs[0, len(PROMPT) :].tolist())
    assert bool(hits) == (placed == "pools")
    assert all(hits)
    layers = len(PLACED[placed].processor_layers)
    assert result.stats["placement"]["processor_layers"] == layers


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_share_may_be_asked_for(tiny, leaders, share: float) -> None:
    """And what crosses each link falls with it."""
    path, model = tiny("llama")
    crossed = []
    for asked in (0.0, share):
        with engine(path, 2, "weights", method="autoregressive", host_compute=asked) as ours:
            result = ours.generate(PROMPT, greedy(NEW))
        theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
        expected = theirs[0, len(PROMPT) :].tolist()
        assert_equal_but_for_ties(model, PROMPT, result.token_ids, expected)
        crossed.append([rank["bytes_to_device"] for rank in result.stats["ranks"]])
    for none, some in zip(*crossed, strict=True):
        assert (some == 0) if share == 1 else (0 < some < none)


@pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "olmo2"])
def test_one_rank_may_have_a_layer_that_the_processor_computes_for_another(
    tiny, leaders, monkeypatch, family: str
) -> None:
    """The processor computes in float32, the device in bfloat16: `thread_ranks` checks that all
    ranks add the same kind of numbers.
    """
    path, _ = tiny(family)
    placed, plans = resolve.fit_machine, []

    def unlike(*arguments: object, **options: object) -> object:
        found = placed(*arguments, **options)
        if threading.current_thread() is not threading.main_thread():
            found = replace(found, memory=found.memory.placed(processor_layers=(1,)))
        plans.append(found.memory.placement.processor_layers)
        return found

    monkeypatch.setattr(resolve, "fit_machine", unlike)
    options = {"method": "speculative", "dtype": "bfloat16", "same_bits": "off"}
    with engine(path, 2, PLACED["layers"], **options) as ours:
        result = ours.generate(PROMPT, greedy(NEW))
    assert sorted(plans) == [(0, 2), (1,)]
    assert len({rank["checksum"] for rank in result.stats["ranks"]}) == 1
