"""Layers of which a processor computes all but the mixing of tokens by two calls.

Rows get the same bits as from `Model`'s own operations, which are of the same kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triforce_core.model.feed_forward import Activation, DenseMLP
from triforce_core.model.layers import LayerSpec
from triforce_core.model.norms import Norm
from triforce_kernels.dispatch import HOST, backend
from triforce_kernels.host.layer import Operation
from triforce_kernels.host.sequence import Rows, Sequence
from triforce_kernels.host.weights import computes
from triforce_kernels.weights.linear import Weight, matrices
from triforce_offload.weights.layouts import Views

_OPERATIONS = {
    Activation.SILU: Operation.SILU,
    Activation.GELU_TANH: Operation.GELU,
    Activation.CLAMPED: Operation.CLAMPED,
}
_NORMS = ("input_norm", "mixer_norm", "post_norm", "mlp_norm")
_MATRICES = ("qkv", "o", "gate_up", "down")
_BIASES = ("qkv_bias", "o_bias")


@dataclass(frozen=True)
class FusedLayer:
    """A layer's computations before its mixer and after it.

    before: takes hidden states, and writes what the mixer takes
    after: takes what the mixer returns, and adds its output and the MLP's to hidden states

    Both are None unless norms and biases are float32 and there are kernels for all matrices.
    `after` is None, too, if the MLP has experts or no gate, or does not follow the mixer.
    """

    before: Sequence | None = None
    after: Sequence | None = None

    @classmethod
    def of(cls, spec: LayerSpec, norm: Norm, w: Views) -> FusedLayer:
        """w: tensors of a layer, whose addresses the computations keep"""
        small = [w[name] for name in (*_NORMS, *_BIASES) if name in w]
        parts = [part for name in _MATRICES if name in w for part in matrices(w[name])]
        if any(each.dtype != torch.float32 for each in small) or not all(map(_fits, parts)):
            return cls()
        before = Sequence()
        hidden = before.given(w["qkv"].shape[1])
        out = before.given(w["qkv"].shape[0])
        rows = _normed(before, norm, hidden, w, "input_norm", before.own(hidden.width))
        before.product(rows, w["qkv"], out, w.get("qkv_bias"))
        return cls(before, _after(spec, norm, w))


def _after(spec: LayerSpec, norm: Norm, w: Views) -> Sequence | None:
    scaled = spec.residual_scale != 1 and spec.norms.after
    gated = isinstance(spec.mlp, DenseMLP) and spec.mlp.activation in _OPERATIONS
    if not gated or spec.parallel or scaled:
        return None
    after, width = Sequence(), spec.mlp.width
    mixed = after.given(w["o"].shape[1])
    hidden = after.given(w["o"].shape[0])
    # Before and after norms; nothing is in it when the next one writes it.
    room = after.own(hidden.width)

    def added(rows: Rows, matrix: str, bias: str, norm_after: str) -> None:
        """Add the product of rows to the hidden states."""
        if norm_after in w:
            after.product(rows, w[matrix], room, w.get(bias))
            after.norm(room, w[norm_after], hidden, *norm.on_host, norm.eps, adds=True)
        else:
            factor = spec.residual_scale
            after.product(rows, w[matrix], hidden, w.get(bias), adds=True, factor=factor)

    added(mixed, "o", "o_bias", "mixer_norm")
    gate_up, activated = after.own(2 * width), after.own(width)
    normed = _normed(after, norm, hidden, w, "post_norm", room)
    after.product(normed, w["gate_up"], gate_up)
    after.gated(gate_up, activated, _OPERATIONS[spec.mlp.activation])
    added(activated, "down", "", "mlp_norm")
    return after


def _normed(calls: Sequence, norm: Norm, hidden: Rows, w: Views, name: str, room: Rows) -> Rows:
    """Return hidden states, normed into `room` if the layer has this norm."""
    if name not in w:
        return hidden
    calls.norm(hidden, w[name], room, *norm.on_host, norm.eps)
    return room


def _fits(matrix: Weight) -> bool:
    """Return whether products with few rows are made by the processor's kernels."""
    if backend(matrix.device) != HOST:
        return False
    if isinstance(matrix, torch.Tensor):
        return computes(matrix.dtype) and matrix.stride(1) == 1
    return matrix.small_batch_matmul() is not None
