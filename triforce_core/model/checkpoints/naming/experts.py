"""Names of the tensors of experts in checkpoints: one for each expert, or stacked ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from triforce_core.model.checkpoints.naming.pieces import (
    Piece,
    alternating,
    even_columns,
    odd_columns,
    pieces_of,
)
from triforce_core.model.feed_forward import Experts
from triforce_offload.checkpoint.source import Corner


@dataclass(frozen=True)
class ExpertNames:
    """Full names of the tensors of a layer's experts.

    gate_up, down: names with a place for the number of the expert, or of tensors that have those of
        all experts one above the other. Gate and up projections are apart, or in one tensor; where
        there are no gates, the up projections are the last of these
    stacked: the other names that files may have instead
    alternating: whether rows of gate and up projections, in one tensor, come by turns
    shared_gate_up, shared_down: names of the shared expert's, or those of the MLP beside experts
    """

    router: str = "mlp.gate.weight"
    bias: str = "mlp.gate.e_score_correction_bias"
    gate_up: tuple[str, ...] = (
        "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.{}.up_proj.weight",
    )
    down: str = "mlp.experts.{}.down_proj.weight"
    shared_gate_up: tuple[str, ...] = (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    )
    shared_down: str = "mlp.shared_experts.down_proj.weight"
    shared_gate: str = "mlp.shared_expert_gate.weight"
    stacked: tuple[str, str] | None = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    gate_up_bias: tuple[str, ...] = ("mlp.experts.gate_up_proj_bias",)
    down_bias: str = "mlp.experts.down_proj_bias"
    router_linear_bias: str = "mlp.router.bias"
    alternating: bool = False
    router_scale: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    latent_down: str = "mixer.fc1_latent_proj.weight"
    latent_up: str = "mixer.fc2_latent_proj.weight"

    def as_held(self, held: Collection[str], layer: str, layers: int) -> ExpertNames:
        """Return the names that files with tensors of these names have.

        layer: with what the names of a layer's tensors begin, with a place for its number
        layers: number of layers; others only draft, and may be stored otherwise
        """
        if self.stacked is None:
            return self
        stacked = (layer.format(index) + self.stacked[0] for index in range(layers))
        if not any(name in held for name in stacked):
            return self
        return replace(self, gate_up=self.stacked[:1], down=self.stacked[1])


HF_MIXTRAL = ExpertNames(
    router="block_sparse_moe.gate.weight",
    gate_up=(
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
    ),
    down="block_sparse_moe.experts.{}.w2.weight",
)
HF_MINIMAX = replace(HF_MIXTRAL, bias="block_sparse_moe.e_score_correction_bias")
HF_LFM2 = ExpertNames(
    router="feed_forward.gate.weight",
    bias="feed_forward.expert_bias",
    gate_up=("feed_forward.experts.{}.w1.weight", "feed_forward.experts.{}.w3.weight"),
    down="feed_forward.experts.{}.w2.weight",
    stacked=("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
)
HF_QWEN2 = ExpertNames(
    shared_gate_up=("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
    shared_down="mlp.shared_expert.down_proj.weight",
)
HF_LAGUNA = replace(HF_QWEN2, bias="mlp.experts.e_score_correction_bias")
HF_EXAONE = ExpertNames(bias="mlp.e_score_correction_bias")
HF_HY_V3 = ExpertNames(
    router="mlp.router.gate.weight",
    bias="mlp.expert_bias",
    shared_gate_up=("mlp.shared_mlp.gate_proj.weight", "mlp.shared_mlp.up_proj.weight"),
    shared_down="mlp.shared_mlp.down_proj.weight",
)
HF_AFMOE = ExpertNames(router="mlp.router.gate.weight", bias="mlp.expert_bias")
HF_GEMMA4 = ExpertNames(
    router="router.proj.weight",
    gate_up=("experts.gate_up_proj",),
    down="experts.down_proj",
    shared_gate_up=("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    shared_down="mlp.down_proj.weight",
    stacked=None,
)
HF_GRANITE = ExpertNames(
    router="block_sparse_moe.router.layer.weight",
    gate_up=("block_sparse_moe.input_linear.weight",),
    down="block_sparse_moe.output_linear.weight",
    stacked=None,
)
HF_GRANITE4 = replace(
    HF_GRANITE,
    shared_gate_up=("shared_mlp.input_linear.weight",),
    shared_down="shared_mlp.output_linear.weight",
)
HF_NEMOTRON = ExpertNames(
    router="mixer.gate.weight",
    bias="mixer.gate.e_score_correction_bias",
    gate_up=("mixer.experts.{}.up_proj.weight",),
    down="mixer.experts.{}.down_proj.weight",
    shared_gate_up=("mixer.shared_experts.up_proj.weight",),
    shared_down="mixer.shared_experts.down_proj.weight",
    stacked=None,
)
HF_GPT_OSS = ExpertNames(
    router="mlp.router.weight",
    gate_up=("mlp.experts.gate_up_proj",),
    down="mlp.experts.down_proj",
    stacked=None,
    alternating=True,
)
HF_ERNIE = ExpertNames(bias="mlp.moe_statics.e_score_correction_bias")
GGUF_EXPERTS = ExpertNames(
    router="ffn_gate_inp.weight",
    bias="exp_probs_b.bias",
    gate_up=("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    down="ffn_down_exps.weight",
    shared_gate_up=("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    shared_down="ffn_down_shexp.weight",
    shared_gate="ffn_gate_inp_shexp.weight",
    stacked=("ffn_gate_up_exps.weight", "ffn_down_exps.weight"),
    router_scale="ffn_gate_inp.scale",
    expert_scale="ffn_down_exps.scale",
    latent_down="ffn_latent_down.weight",
    latent_up="ffn_latent_up.weight",
    gate_up_bias=("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    down_bias="ffn_down_exps.bias",
    router_linear_bias="ffn_gate_inp.bias",
)
GGUF_GEMMA4 = replace(
    GGUF_EXPERTS,
    shared_gate_up=("ffn_gate.weight", "ffn_up.weight"),
    shared_down="ffn_down.weight",
)


def expert_pieces(mlp: Experts, hidden: int, names: ExpertNames) -> dict[str, list[Piece]]:
    """Return the pieces of the checkpoint that make up each tensor of a mixture of experts."""
    width, experts, inner = mlp.width, range(mlp.count), mlp.inner(hidden)
    count = mlp.activation.projections
    stored, shared = names.gate_up[-count:], names.shared_gate_up[-count:]
    # Rows of an expert in a tensor that has all of them.
    projected = mlp.rows // len(stored)
    gate_up = [
        _of_expert(name, expert, projected, Piece(name, width, corner=Corner(first, 0)))
        for expert in experts
        for name, first in _first_rows(stored, width, count)
    ]
    if names.alternating:
        whole = Piece(names.gate_up[0], 2 * width, alternating(width, 2))
        gate_up = [_of_expert(whole.name, expert, 2 * width, whole) for expert in experts]
    biases = [Piece(name, mlp.count) for name in names.gate_up_bias]
    if len(biases) == 1:
        name, both = names.gate_up_bias[0], 2 * width
        changes = even_columns, odd_columns
        biases = [Piece(name, mlp.count, change=each, columns=both) for each in changes]
    down = [_of_expert(names.down, e, inner, Piece(names.down, inner)) for e in experts]
    return {
        "router": [Piece(names.router, mlp.count)],
        "router_bias": [Piece(names.bias, mlp.count)],
        "experts_gate_up": gate_up,
        "experts_down": down,
        "latent_down": [Piece(names.latent_down, inner)],
        "latent_up": [Piece(names.latent_up, hidden)],
        "gate_up": pieces_of(shared, (mlp.shared,) * count, (None,) * count),
        "down": [Piece(names.shared_down, hidden)],
        "shared_gate": [Piece(names.shared_gate, 1)],
        "router_linear_bias": [Piece(names.router_linear_bias, mlp.count)],
        "experts_gate_bias": biases[:1],
        "experts_up_bias": biases[1:],
        "experts_down_bias": [Piece(names.down_bias, mlp.count)],
        "router_scale": [Piece(names.router_scale, hidden)],
        "expert_scale": [Piece(names.expert_scale, mlp.count)],
    }


def _first_rows(names: tuple[str, ...], width: int, count: int) -> list[tuple[str, int]]:
    """Return the tensor of each of an expert's `count` projections, with its first row there."""
    if len(names) == count:
        return [(name, 0) for name in names]
    return [(names[0], first * width) for first in range(count)]


def _of_expert(name: str, expert: int, rows: int, piece: Piece) -> Piece:
    """Return an expert's piece: of a tensor of its own, or of one with `rows` rows for each."""
    if "{}" in name:
        return replace(piece, name=name.format(expert))
    return replace(piece, corner=Corner(piece.corner.row + expert * rows, 0))
