"""Texts of checkpoints whose low bits stream, beside those of the stored numbers."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from helpers import BLOCK, random_ids

from triforce_core import Engine, SamplingParams
from triforce_offload.plan.placement import Placement

PROMPT, NEW = random_ids(60), 24
GREEDY = SamplingParams(NEW, temperature=0)
# What streams of a model of three layers.
STREAMED = ("all", "one slot", "and whole ones")


def engine(path: Path, **options: object) -> Engine:
    return Engine.from_pretrained(
        path, **{"device": "cpu", "max_context": 90, "block_tokens": BLOCK, **options}
    )


def by_low_bits(name: str) -> Placement:
    """Low bits stream of some layers, or of all. name: one of STREAMED"""
    layers = {"all": (0, 1, 2), "one slot": (0, 2), "and whole ones": (1,)}[name]
    streamed = (0, 1, 2) if name == "and whole ones" else layers
    slots = 1 if name == "one slot" else 2
    return Placement(streamed, True, 10**6, slots, 1, 1, split_layers=layers)


def check_texts(path: Path, name: str, dtype: str) -> None:
    """Check that split weights give the text of stored ones, and that their high bits draft for
    it. name: one of STREAMED
    """
    options = {"dtype": dtype, "method": "autoregressive", "kv": "dense"}
    with engine(path, weights="stored", **options) as plain:
        expected = plain.generate(PROMPT, GREEDY).token_ids
    options |= {"weights": "split", "placement": by_low_bits(name)}
    with engine(path, **options) as running:
        result = running.generate(PROMPT, GREEDY)
        demand = running.runtime.plan.requirements
        assert running.plan.weights == "split"
    # In bfloat16 an output matrix that is not quantised is split too, which changes no token here.
    assert result.token_ids == expected
    memory = result.stats["memory"]
    assert memory["device_peak_bytes"] <= memory["device_budget_bytes"]
    if name == "all":
        crossed = result.stats["link"]["bytes_to_device"]
        assert crossed == sum(demand.low_bytes) * result.stats["passes"]
    if name == "and whole ones":
        return
    options |= {"method": "triforce", "budget": 80, "draft": "none", "draft_tokens": 4}
    with engine(path, draft_weights="split", **options) as drafting:
        result = drafting.generate(PROMPT, GREEDY)
        drawn = [
            drafting.generate(PROMPT, SamplingParams(NEW, temperature=1.0, seed=seed)).stats
            for seed in (3, 4, 5)
        ]
    assert result.token_ids == expected
    assert result.stats["levels"] == ["retrieval", "target"]
    assert result.stats["retrieval"]["reads_high_bits"]
    assert fmean(stats["acceptance"]["target"] for stats in drawn) > 0.4
