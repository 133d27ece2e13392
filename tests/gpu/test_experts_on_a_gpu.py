"""Experts that are away from the device: they stream, the processor computes them, or pools have
them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import BLOCK, PLACEMENTS, random_ids
from simulated_gpu import TOKENS

from triforce_core import Engine, SamplingParams
from triforce_core.model.transformer import Model
from triforce_offload.link.cuda import CudaLink
from triforce_offload.memory.host import CudaDriver, HostMemory
from triforce_offload.plan.placement import Placement

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_new_tokens=TOKENS, temperature=0)
DEVICE = torch.device("cuda:0")


@pytest.mark.first
@pytest.mark.parametrize(
    ("processor", "slots"), [((0, 1, 2), 2), ((0, 1, 2), 0), ((), 0), ((1,), 1)]
)
@pytest.mark.parametrize("family", ["gpt-oss-moe", "qwen2_moe", "gemma4-moe", "laguna-moe"])
def test_experts_are_away_from_the_rest_of_their_layers(
    tiny, family: str, processor: tuple[int, ...], slots: int
) -> None:
    """In host memory: they cross the link, the processor computes them, or a pool has them."""
    path, _ = tiny(family)
    options = {"max_context": 200, "block_tokens": BLOCK, "dtype": "float32", "draft": "ngram"}
    with Engine.from_pretrained(path, device="cpu", **options) as engine:
        expected = engine.generate(random_ids(75), GREEDY).token_ids
    placement = replace(PLACEMENTS["weights"], expert_layers=(0, 1, 2), processor_layers=processor)
    placement = replace(placement, expert_slots=slots)
    with Engine.from_pretrained(path, device="cuda:0", placement=placement, **options) as engine:
        result, plan = engine.generate(random_ids(75), GREEDY), engine.memory_plan
    assert result.token_ids == expected
    crossing = result.stats["passes"] * sum(layer.link_bytes for layer in plan.layers)
    if pools := result.stats["experts"]:
        assert pools["found"] > 0
        crossing += pools["bytes_to_device"]
    assert result.stats["link"]["bytes_to_device"] == crossing


@pytest.mark.parametrize(
    "placement",
    [
        replace(PLACEMENTS["weights"], file_layers=(0, 1, 2)),
        replace(
            PLACEMENTS["weights"],
            **{"expert_layers": (0, 1, 2), "processor_layers": (0, 1, 2), "expert_slots": 2},
        ),
    ],
    ids=["layers in files", "pools of experts"],
)
def test_memory_is_registered_in_pieces_smaller_than_a_layer(
    tiny, monkeypatch, placement: Placement
) -> None:
    """An expert, and the second layer that is read ahead, begin in the middle of a piece."""
    path, _ = tiny("qwen2_moe")
    options = {"max_context": 200, "block_tokens": BLOCK, "dtype": "float32", "draft": "ngram"}
    with Engine.from_pretrained(path, device="cpu", **options) as engine:
        expected = engine.generate(random_ids(75), GREEDY).token_ids
    # The link's probe copies more than such a piece.
    CudaLink(DEVICE, HostMemory(CudaDriver(DEVICE))).close()
    monkeypatch.setattr("triforce_offload.memory.host.PIECE_BYTES", 16 << 10)
    with Engine.from_pretrained(path, device="cuda:0", placement=placement, **options) as engine:
        assert engine.generate(random_ids(75), GREEDY).token_ids == expected


@pytest.mark.first
@pytest.mark.parametrize(("processor", "slots"), [((0, 1, 2), 2), ((0, 1, 2), 0), ((), 0)])
def test_experts_that_are_split_each_for_itself(
    tiny, monkeypatch, processor: tuple[int, ...], slots: int
) -> None:
    """Passes of the same tokens give what they give with dense experts, but for rounding."""
    path, _ = tiny("qwen2_moe")
    away = {"expert_layers": (0, 1, 2), "processor_layers": processor, "expert_slots": slots}
    options = {"max_context": 200, "block_tokens": BLOCK, "method": "autoregressive"}
    options |= {"dtype": "bfloat16", "placement": replace(PLACEMENTS["weights"], **away)}
    always, forward, seen = replace(GREEDY, logit_bias={7: 1e4}), Model._forward, {}
    for weights in ("dense", "split-experts"):
        hidden: list[torch.Tensor] = []

        def noted(*given: object, hidden: list[torch.Tensor] = hidden) -> torch.Tensor:
            hidden.append(found := forward(*given))
            return found

        monkeypatch.setattr(Model, "_forward", noted)
        with Engine.from_pretrained(path, device="cuda:0", weights=weights, **options) as engine:
            assert engine.generate(random_ids(75), always).token_ids.count(7) > 5
        seen[weights] = torch.cat(hidden[1:]).float()
    gap = seen["split-experts"] - seen["dense"]
    assert gap.norm() < 0.02 * seen["dense"].norm()
