"""Passes that multiply with weights as they are stored, and prompts that decode them first."""

from __future__ import annotations

from dataclasses import replace

import torch

from triforce_core.model.known.shapes import read_shape
from triforce_core.model.tensors import split_layouts
from triforce_core.plan.machine import Device
from triforce_core.plan.sizes import ModelSizes
from triforce_core.settings import MethodSettings
from triforce_kernels.limits import (
    DECODED_AT_ONCE,
    SPLIT_AT_ONCE_ON_GPU,
    SPLIT_BYTES,
    SPLIT_BYTES_ON_GPU,
)
from triforce_kernels.weights import linear as products
from triforce_kernels.weights.split_bf16 import SplitBF16Weight, encode
from triforce_offload.weights.formats import DTYPES


def test_a_pass_over_the_longest_automatic_draft_decodes_no_weight_first(monkeypatch) -> None:
    """It has a row more than the draft has tokens: the text's last token."""
    multiplied: list[int] = []

    def matmul(x: torch.Tensor, weight: object) -> torch.Tensor:
        multiplied.append(x.shape[0])
        return x[:, :2]

    monkeypatch.setattr(SplitBF16Weight, "small_batch_matmul", lambda weight: matmul)
    weight = encode(torch.ones(2, 4, dtype=torch.bfloat16))
    rows = MethodSettings().max_draft_tokens() + 1
    products.linear(torch.ones(rows, 4), weight)
    assert multiplied == [rows]
    products.linear(torch.ones(rows + 1, 4), weight)
    assert multiplied == [rows], "more rows would read the weights twice"


def test_the_slices_that_a_prompt_decodes_on_a_gpu_are_counted() -> None:
    """They are 32 times as large there: a pass over few rows decodes none."""
    shape, longest = read_shape("llama3.1-8b"), MethodSettings(draft_tokens=64)
    dtype = DTYPES["bfloat16"]
    layouts = split_layouts(shape, dtype)
    wanted = ModelSizes(shape, dtype, 8192, MethodSettings(), layouts=layouts)
    kernels = replace(wanted, device=Device(gpu=True, kernels=True))
    more = SPLIT_AT_ONCE_ON_GPU * SPLIT_BYTES_ON_GPU - DECODED_AT_ONCE * SPLIT_BYTES
    here, there = wanted.requirements(0), kernels.requirements(0)
    assert there.prefill_workspace_bytes - here.prefill_workspace_bytes == more > 0
    assert there.pass_workspace_bytes == here.pass_workspace_bytes
    here, there = (replace(each, method=longest).requirements(0) for each in (wanted, kernels))
    assert there.pass_workspace_bytes - here.pass_workspace_bytes == more, "65 rows"
