"""Computation of the MLPs, with one class for each kind of MLP in `feed_forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from triforce_core.model.feed_forward import Activation, DenseMLP, Experts, Scores
from triforce_core.model.layers import LayerSpec
from triforce_core.model.norms import Norm
from triforce_kernels.experts import grouped
from triforce_kernels.experts.routing import Choice, choose
from triforce_kernels.layer import geglu, swiglu
from triforce_kernels.weights.linear import linear
from triforce_offload.weights.layouts import Views

_GATED = {Activation.SILU: swiglu, Activation.GELU_TANH: geglu}


class MLPLayer(Protocol):
    """The computation of a layer's MLP."""

    def __call__(self, w: Views, normed: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output [rows, hidden] for normed hidden states [rows, hidden]; if ranks
        share the model, this rank's summand.
        """


class GatedMLP:
    """A gated MLP over every token."""

    def __init__(self, spec: DenseMLP) -> None:
        self._gated = _GATED[spec.activation]

    def __call__(self, w: Views, normed: torch.Tensor) -> torch.Tensor:
        """MLPLayer.__call__."""
        return linear(self._gated(linear(normed, w["gate_up"])), w["down"])


class ExpertsMLP:
    """Experts that a router chooses for each token, and those that every token goes through."""

    def __init__(self, spec: Experts) -> None:
        self._spec = spec
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

    def __call__(self, w: Views, normed: torch.Tensor) -> torch.Tensor:
        """MLPLayer.__call__."""
        spec = self._spec
        wide = normed.float()
        chosen, weights = choose(wide @ w["router"].T, w.get("router_bias"), self._choice)
        experts = grouped.Experts(spec.count, w["experts_gate_up"], w["experts_down"])
        out = grouped.gated_experts(normed, experts, chosen, weights, self._gated)
        if spec.shared:
            shared = linear(self._gated(linear(normed, w["gate_up"])), w["down"])
            if spec.gated_shared:
                shared *= (wide @ w["shared_gate"].T).sigmoid_()
            out += shared
        return out


def mlp_layer(
    spec: LayerSpec, norm: Norm
) -> Callable[[Views, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the computation of a layer's MLP with its norm.

    It takes the layer's tensors, the hidden states before the norm and what the mixer adds to them,
    [rows, hidden] each, which it adds in place. It returns the MLP's output, [rows, hidden].
    """
    mlp: MLPLayer = _KINDS[type(spec.mlp)](spec.mlp)

    def layer(w: Views, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        if spec.parallel:
            normed = norm(hidden, w["input_norm"])
            hidden += mixed
        elif "post_norm" in w:
            normed = norm(hidden, w["post_norm"], mixed)
        else:
            normed = hidden.add_(mixed)
        return mlp(w, normed)

    return layer


_KINDS: dict[type, Callable[..., MLPLayer]] = {DenseMLP: GatedMLP, Experts: ExpertsMLP}
