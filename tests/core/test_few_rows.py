"""Passes that multiply with weights as they are stored."""

from __future__ import annotations

import torch
from triforce_kernels import linear as products
from triforce_kernels.planes import encode

from triforce_core.settings import MethodSettings


def test_a_pass_over_the_longest_automatic_draft_decodes_no_weight_first(monkeypatch) -> None:
    """It has a row more than the draft has tokens: the text's last token."""
    multiplied: list[int] = []

    def matmul(x: torch.Tensor, weight: object) -> torch.Tensor:
        multiplied.append(x.shape[0])
        return x[:, :2]

    monkeypatch.setattr(products, "_own_product", lambda weight, device: matmul)
    weight = encode(torch.ones(2, 4, dtype=torch.bfloat16))
    rows = MethodSettings().max_draft_tokens + 1
    products.linear(torch.ones(rows, 4), weight)
    assert multiplied == [rows]
    products.linear(torch.ones(rows + 1, 4), weight)
    assert multiplied == [rows], "more rows would read the weights twice"
