"""Computation of the MLPs, with one class for each kind of MLP in `feed_forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from triforce_core.model.elsewhere import Sums, moved
from triforce_core.model.feed_forward import (
    Activation,
    DenseMLP,
    Experts,
    ExpertsBeside,
    NoMLP,
    Scores,
)
from triforce_core.model.layers import LayerSpec
from triforce_core.model.norms import Norm
from triforce_kernels.elementwise import sigmoid
from triforce_kernels.experts import grouped
from triforce_kernels.experts.routing import Choice, choose
from triforce_kernels.layer import clamped_swiglu, geglu, rms_norm, swiglu
from triforce_kernels.weights import inputs
from triforce_kernels.weights.linear import linear
from triforce_offload.link.waiting import come
from triforce_offload.weights.layouts import Pool, Views
from triforce_offload.weights.locations import processor_dtype


def _squared_relu(up: torch.Tensor) -> torch.Tensor:
    return torch.relu(up).square_()


_GATED = {
    Activation.SILU: swiglu,
    Activation.GELU_TANH: geglu,
    Activation.CLAMPED: clamped_swiglu,
    Activation.RELU2: _squared_relu,
}


class MLPLayer(Protocol):
    """The computation of a layer's MLP. Rows keep the same bits, as those of a mixer do."""

    def __call__(self, w: Views, normed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output [rows, hidden], summed over the ranks that share its columns.

        normed, hidden: hidden states after the MLP's norm, and before it, [rows, hidden]
        """


class WholeMLP:
    """An MLP over every token."""

    def __init__(self, spec: DenseMLP, norm: Norm, sums: Sums) -> None:
        self._gated = _GATED[spec.activation]
        self._sums = sums

    def __call__(self, w: Views, normed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """MLPLayer.__call__."""
        return self._sums.sum(linear(self._gated(linear(normed, w["gate_up"])), w["down"]))


class ExpertsMLP:
    """Experts that a router chooses for each token, and those that every token goes through."""

    def __init__(self, spec: Experts, norm: Norm, sums: Sums) -> None:
        self._spec = spec
        self._norm = norm
        self._sums = sums
        self._gated = _GATED[spec.activation]
        router = spec.router
        self._choice = Choice(
            spec.active,
            sigmoid=router.scores is Scores.SIGMOID,
            normalised=router.normalised,
            scale=router.scale,
            groups=router.groups,
            chosen_groups=router.chosen_groups,
        )

    def __call__(self, w: Views, normed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """MLPLayer.__call__."""
        spec, wide = self._spec, normed.float()
        products = linear(wide, w["router"])
        if spec.router.linear_bias:
            products += w["router_linear_bias"]
        chosen, weights = choose(products, w.get("router_bias"), self._choice)
        x = linear(normed, w["latent_down"]) if spec.latent else normed
        out = self._experts(w, x, chosen, weights)
        if spec.latent:
            out = linear(out, w["latent_up"])
        if spec.shared:
            shared = self._shared(w, normed)
            if spec.gated_shared:
                shared *= sigmoid(linear(wide, w["shared_gate"]))
            out += shared
        return self._sums.sum(out)

    def _experts(
        self, w: Views, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of each row's experts, as long as rows of x [rows, inner]; this
        rank's summand.
        """
        if w.note is not None:
            w.note(chosen)
        inputs.note(x, w["experts_gate_up"])
        if w.pool is not None:
            return self._by_both(w, w.pool, x, chosen, weights)
        # The processor may have them, and none of the rest of the layer.
        there, here = w["experts_down"].device, x.device
        if w.by_processor:
            return self._by_processor(w, x, chosen, weights)
        if there == here:
            return self._outputs(w, self._spec.count, x, chosen, weights)
        rows, chosen, weights = (moved(each, there) for each in (x, chosen, weights))
        out = self._by_processor(w, rows, chosen, weights)
        return moved(out.to(x.dtype), here)

    def _by_both(
        self,
        w: Views,
        pool: Pool,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """`_experts`, of which the device computes those that are in a pool, and the processor the
        others meanwhile.
        """
        there, here, out = w["experts_down"].device, x.device, None
        chosen = come(chosen).cpu()
        slots, others = pool.divide(chosen)
        # What the processor takes crosses before the device has more to compute.
        theirs = [moved(each, there) for each in (x, weights)] if (others >= 0).any() else None
        if (slots >= 0).any():
            out = self._outputs(pool.views, pool.slots, x, slots.to(here), weights)
        if theirs:
            rows, their_weights = theirs
            computed = moved(self._by_processor(w, rows, others, their_weights), here)
            out = computed.to(x.dtype) if out is None else out.add_(computed)
        pool.used(chosen)
        return out

    def _by_processor(
        self, w: Views, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """`_outputs` of experts in host memory, in the dtype in which the processor computes."""
        x = x.to(processor_dtype(x.dtype))
        if self._spec.biases and x.dtype not in (kept := w.biases):
            kept[x.dtype] = self._biases(w, x.dtype)
        biases = w.biases.get(x.dtype)
        return self._outputs(w, self._spec.count, x, chosen, weights, biases)

    def _biases(self, w: Views, dtype: torch.dtype) -> grouped.Biases:
        gate_up = torch.cat((w["experts_gate_bias"], w["experts_up_bias"]), 1)
        down = w.get("experts_down_bias")
        return gate_up.to(dtype), None if down is None else down.to(dtype)

    def _outputs(
        self,
        w: Views,
        count: int,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        biases: grouped.Biases | None = None,
    ) -> torch.Tensor:
        """Return the weighted sums of each row's experts, where these are.

        count: of the experts in w. biases: theirs, if they are at hand
        """
        if self._spec.biases and biases is None:
            biases = self._biases(w, x.dtype)
        experts = grouped.Experts(count, w["experts_gate_up"], w["experts_down"], biases)
        return grouped.gated_experts(x, experts, chosen, weights, self._gated, come)

    def _shared(self, w: Views, normed: torch.Tensor) -> torch.Tensor:
        return linear(self._gated(linear(normed, w["gate_up"])), w["down"])


class ExpertsBesideMLP(ExpertsMLP):
    """Experts beside a dense MLP, each with norms of its own."""

    def __call__(self, w: Views, normed: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """MLPLayer.__call__."""
        norm = self._norm
        wide = rms_norm(hidden.float(), w["router_scale"], norm.eps) * hidden.shape[1] ** -0.5
        chosen, weights = choose(linear(wide, w["router"]), None, self._choice)
        weights = weights * w["expert_scale"][chosen]
        experts = self._experts(w, norm(hidden, w["experts_norm"]), chosen, weights)
        dense = self._shared(w, normed)
        if self._sums.ranks.count > 1:
            dense, experts = self._sums.sum(torch.stack((dense, experts)))
        dense = norm(dense, w["dense_out_norm"])
        return dense.add_(norm(experts, w["experts_out_norm"]))


def _no_mlp(w: Views, hidden: torch.Tensor, mixed: torch.Tensor) -> None:
    hidden += mixed


def mlp_layer(
    spec: LayerSpec, norm: Norm, sums: Sums
) -> Callable[[Views, torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """Return the computation of a layer's MLP with its norm.

    It takes the layer's tensors, the hidden states before the norm and what the mixer adds to them,
    [rows, hidden] each, which it adds in place. It returns the MLP's output, [rows, hidden], or
    None if the layer has no MLP.

    sums: over the ranks that share the MLP's columns
    """
    if isinstance(spec.mlp, NoMLP):
        return _no_mlp
    mlp = mlp_alone(spec, norm, sums)

    def layer(w: Views, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor | None:
        if spec.parallel:
            normed = norm(hidden, w["input_norm"])
            hidden += mixed
        elif "post_norm" in w:
            normed = norm(hidden, w["post_norm"], mixed)
        else:
            normed = hidden.add_(mixed)
        return mlp(w, normed, hidden)

    return layer


def mlp_alone(spec: LayerSpec, norm: Norm, sums: Sums) -> MLPLayer:
    """Return the computation of a layer's MLP without its norm. See `mlp_layer`."""
    return _KINDS[type(spec.mlp)](spec.mlp, norm, sums)


_KINDS: dict[type, Callable[..., MLPLayer]] = {
    DenseMLP: WholeMLP,
    Experts: ExpertsMLP,
    ExpertsBeside: ExpertsBesideMLP,
}
