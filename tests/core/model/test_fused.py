"""Layers that a processor computes by one call, or by two around their mixer, at few rows: the bits
are those of the layer's single operations.
"""

from __future__ import annotations

from math import isclose
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import FAMILIES, make_model, random_ids
from same_bits_runs import in_passes, in_trees

from triforce_core import Engine
from triforce_core.model.feed_forward import DenseMLP
from triforce_core.model.fused import FusedLayer
from triforce_core.model.layers import Attention, LayerSpec
from triforce_kernels.host.library import library
from triforce_kernels.host.sequence import Sequence

pytestmark = pytest.mark.skipif(library() is None, reason="needs the compiled kernels")

PROMPT, TEXT, ROWS = 20, 60, 7
# Passes of ROWS rows in which the text is read.
PASSES = 7
# One for each way in which layers differ around their mixers; the others with `--all`.
FEW = (
    *("llama", "llama-bias", "qwen3", "gemma3", "gemma4", "granite", "olmo3", "cohere2", "phi3"),
    *("qwen3_5", "lfm2-bias", "mixtral", "olmoe"),
)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each run of a sequence."""
    seen, own = [], Sequence.run

    def run(self: Sequence, *given: torch.Tensor, **keys: Any) -> None:
        seen.append(len(given[0]))
        own(self, *given, **keys)

    monkeypatch.setattr(Sequence, "run", run)
    return seen


def logits(path: Path) -> tuple[torch.Tensor, int]:
    """Logits of passes, and how many runs a pass has if all is fused that can be."""
    drafts = {"method": "speculative", "draft": "ngram", "draft_tokens": 24}
    with Engine.from_pretrained(path, device="cpu", max_context=128, **drafts) as engine:
        config = engine.models.target.config
        scales = config.rope.query_growth is not None
        runs = sum(runs_of(each, scales=scales) for each in config.layers)
        text = random_ids(TEXT, seed=1)
        # A chain after trees: the calls that serve both keep nothing of a tree.
        found = in_trees(engine, text, PROMPT), in_passes(engine, text, PROMPT, ROWS)
        return torch.cat(found), runs


def runs_of(layer: LayerSpec, *, scales: bool) -> int:
    """How many calls compute a layer: one, two around its mixer, or one before it. scales: whether
    factors of queries grow with their positions
    """
    dense = isinstance(layer.mlp, DenseMLP) and layer.mlp.activation.gated
    if layer.streams:
        return 0
    if layer.parallel or not dense or (layer.residual_scale != 1 and layer.norms.after):
        return 1
    mixer = layer.mixer
    if not isinstance(mixer, Attention) or not mixer.projects_values or scales:
        return 2
    if mixer.scale is not None and not isclose(mixer.scale, mixer.head_dim**-0.5):
        return 2
    more = (mixer.value_norm, mixer.output_gate, mixer.head_gate, mixer.sinks, mixer.score_cap)
    return 2 if any(more) else 1


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_are_those_of_single_operations(
    family: str, tmp_path, runs, monkeypatch, *, whole: bool
) -> None:
    if family not in FEW and not whole:
        pytest.skip("with --all")
    make_model(family, tmp_path)
    check(tmp_path, runs, monkeypatch)


def test_norms_of_gemma_in_one_call(tmp_path, runs, monkeypatch) -> None:
    """The factors of its norms are 1 + weight, and heads are normed. The scale of its scores is the
    common one, as in real models.
    """
    make_model("gemma3", tmp_path, query_pre_attn_scalar=16)
    assert check(tmp_path, runs, monkeypatch) == 3


def check(tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch) -> int:
    """Compare the bits. Return the number of runs of a pass."""
    fused, runs_of_a_pass = logits(tmp_path)
    # More runs would mean that two calls computed a layer that one could.
    assert runs.count(ROWS) == PASSES * runs_of_a_pass
    monkeypatch.setattr(FusedLayer, "of", lambda *layer: FusedLayer())
    runs.clear()
    assert torch.equal(logits(tmp_path)[0], fused)
    assert not runs
    return runs_of_a_pass


def test_half_precision_is_left_to_single_operations(tmp_path, runs) -> None:
    make_model("llama", tmp_path)
    with Engine.from_pretrained(tmp_path, device="cpu", dtype="bfloat16") as engine:
        in_passes(engine, random_ids(TEXT, seed=1), PROMPT, ROWS)
    assert not runs
