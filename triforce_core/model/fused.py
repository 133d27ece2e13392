"""Layers that a processor computes by one call, or by two around their mixer.

Rows get the same bits as from `Model`'s own operations, which are of the same kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose

import torch

from triforce_core.model.feed_forward import Activation, DenseMLP
from triforce_core.model.layers import Attention, LayerSpec
from triforce_core.model.norms import Norm
from triforce_kernels.dispatch import HOST, backend
from triforce_kernels.host.layer import Operation
from triforce_kernels.host.sequence import Rows, Sequence
from triforce_kernels.host.weights import computes, has_struct
from triforce_kernels.weights.linear import Weight, matrices
from triforce_offload.forward_batch import Cache, ForwardBatch
from triforce_offload.weights.layouts import Views

_OPERATIONS = {
    Activation.SILU: Operation.SILU,
    Activation.GELU_TANH: Operation.GELU,
    Activation.CLAMPED: Operation.CLAMPED,
}
_NORMS = ("input_norm", "mixer_norm", "post_norm", "mlp_norm")
_HEAD_NORMS = ("q_norm", "k_norm")
_MATRICES = ("qkv", "o", "gate_up", "down")
_BIASES = ("qkv_bias", "o_bias")


class WholeLayer:
    """All of a layer with plain attention by one call, where all of its keys are dense."""

    def __init__(self, calls: Sequence, place: int, *, has_window: bool) -> None:
        """calls: add what the layer computes to hidden states
        place, has_window: of the layer, as `Cache.dense` takes them
        """
        self._calls = calls
        self._place = place
        self._has_window = has_window

    def run(self, hidden: torch.Tensor, cache: Cache, batch: ForwardBatch) -> bool:
        """Add the mixer and the MLP to `hidden` [rows, hidden]. Return False, before any write, if
        one call cannot.
        """
        if batch.query_scale is not None or not self._calls.fits(hidden):
            return False
        keys = cache.dense(self._place, batch, has_window=self._has_window)
        if keys is None or not self._calls.reads(keys):
            return False
        self._calls.run(hidden, keys=keys, rotation=batch.rotation, visible=batch.visible)
        return True


@dataclass(frozen=True)
class FusedLayer:
    """A layer's computations before its mixer and after it, and all of it.

    before: takes hidden states, and writes what the mixer takes
    after: takes what the mixer returns, and adds its output and the MLP's to hidden states
    whole: both, and the mixer between them

    All are None unless norms and biases are float32 and there are kernels for all matrices. `after`
    is None, too, if the MLP has experts or no gate, or does not follow the mixer; then, or if the
    mixer is not a plain attention, so is `whole`.
    """

    before: Sequence | None = None
    after: Sequence | None = None
    whole: WholeLayer | None = None

    @classmethod
    def of(cls, spec: LayerSpec, norm: Norm, w: Views, place: int) -> FusedLayer:
        """w: tensors of a layer, whose addresses the computations keep
        place: index of the layer among those that keep the same, see `ModelConfig.kv_places`
        """
        names = (*_NORMS, *_HEAD_NORMS, *_BIASES)
        small = [w[name] for name in names if name in w]
        parts = [part for name in _MATRICES if name in w for part in matrices(w[name])]
        if any(each.dtype != torch.float32 for each in small) or not all(map(_fits, parts)):
            return cls()
        before = Sequence()
        hidden, qkv = before.given(w["qkv"].shape[1]), before.given(w["qkv"].shape[0])
        _project(before, norm, w, hidden, qkv)
        if not _goes_on(spec):
            return cls(before)
        after = Sequence()
        mixed = after.given(w["o"].shape[1])
        _finish(after, spec, norm, w, mixed, after.given(w["o"].shape[0]))
        whole = None
        # The mixer of an EAGLE-3 head takes other rows than those that it adds to.
        alike = hidden.width == w["o"].shape[0]
        if alike and type(spec.mixer) is Attention and _plain(spec.mixer):
            calls = _whole(spec, spec.mixer, norm, w)
            whole = WholeLayer(calls, place, has_window=spec.mixer.window is not None)
        return cls(before, after, whole)


def _goes_on(spec: LayerSpec) -> bool:
    """Return whether one call computes what comes after the mixer."""
    scaled = spec.residual_scale != 1 and spec.norms.after
    gated = isinstance(spec.mlp, DenseMLP) and spec.mlp.activation in _OPERATIONS
    return gated and not spec.parallel and not scaled


def _plain(mixer: Attention) -> bool:
    """Return whether an attention has nothing that `Sequence.attention` does not know."""
    more = (mixer.value_norm, mixer.output_gate, mixer.head_gate, mixer.sinks, mixer.score_cap)
    scaled = mixer.scale is not None and not isclose(mixer.scale * mixer.head_dim**0.5, 1)
    projects = mixer.projects_keys and mixer.projects_values
    return not any(more) and projects and not scaled


def _whole(spec: LayerSpec, mixer: Attention, norm: Norm, w: Views) -> Sequence:
    calls = Sequence()
    hidden = calls.given(w["o"].shape[0])
    mixed, qkv = calls.own(mixer.queries), calls.own(w["qkv"].shape[0])
    _project(calls, norm, w, hidden, qkv)
    if mixer.qk_norm:
        both = ("q_norm", mixer.heads, 0), ("k_norm", mixer.kv_heads, mixer.queries)
        for name, count, first in both:
            heads = 1 if mixer.norm_over_heads else count
            calls.norm(qkv, w[name], qkv, *norm.on_host, norm.eps, heads=heads, first=first)
    calls.attention(qkv, mixed, mixer.heads, mixer.kv_heads, mixer.head_dim)
    calls.drop(mixed)
    _finish(calls, spec, norm, w, mixed, hidden)
    return calls


def _project(calls: Sequence, norm: Norm, w: Views, hidden: Rows, out: Rows) -> None:
    """Write what a mixer takes of hidden states."""
    rows = _normed(calls, norm, hidden, w, "input_norm", calls.own(hidden.width))
    calls.product(rows, w["qkv"], out, w.get("qkv_bias"))


def _finish(
    calls: Sequence, spec: LayerSpec, norm: Norm, w: Views, mixed: Rows, hidden: Rows
) -> None:
    """Add the projection of what a mixer returned, and the MLP's output, to hidden states."""
    width = spec.mlp.width
    # Before and after norms; nothing is in it when the next one writes it.
    room = calls.own(hidden.width)

    def add(rows: Rows, matrix: str, bias: str, norm_after: str) -> None:
        """Add the product of rows to the hidden states."""
        if norm_after in w:
            calls.product(rows, w[matrix], room, w.get(bias))
            calls.norm(room, w[norm_after], hidden, *norm.on_host, norm.eps, adds=True)
        else:
            factor = spec.residual_scale
            calls.product(rows, w[matrix], hidden, w.get(bias), adds=True, factor=factor)

    add(mixed, "o", "o_bias", "mixer_norm")
    gate_up, activated = calls.own(2 * width), calls.own(width)
    normed = _normed(calls, norm, hidden, w, "post_norm", room)
    calls.product(normed, w["gate_up"], gate_up)
    calls.gated(gate_up, activated, _OPERATIONS[spec.mlp.activation])
    add(activated, "down", "", "mlp_norm")


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
    return matrix.small_batch_matmul() is not None and has_struct(matrix)
