"""What GGUF files of mixtures of experts have beside others, as llama.cpp's converter writes it."""

from __future__ import annotations

import re

import gguf
import numpy as np

# Names of tensors of a layer in a file, by a pattern of transformers' names.
_NAMES = {
    r"((mlp|mixer|feed_forward)\.gate|router|router\.proj)\.weight": "ffn_gate_inp.weight",
    r"router\.scale": "ffn_gate_inp.scale",
    r"router\.per_expert_scale": "ffn_down_exps.scale",
    r"(e_score_correction|expert)_bias": "exp_probs_b.bias",
    # As one tensor where they are not in "mlp" (Gemma 4).
    r"experts\.gate_up_proj": "ffn_gate_up_exps.weight",
    r"experts\.down_proj": "ffn_down_exps.weight",
    r"experts\.up_proj": "ffn_up_exps.weight",
    r"shared_experts?\.gate_proj\.weight": "ffn_gate_shexp.weight",
    r"shared_experts?\.up_proj\.weight": "ffn_up_shexp.weight",
    r"shared_experts?\.down_proj\.weight": "ffn_down_shexp.weight",
    r"shared_expert_gate\.weight": "ffn_gate_inp_shexp.weight",
}


def expert_tensors(
    name: str, array: np.ndarray, *, alternating: bool = False
) -> dict[str, np.ndarray]:
    """The tensors of a file that one of transformers becomes; none if it is not of experts.

    alternating: whether matrices are transposed, with gates and up projections by turns
    """
    layer = re.match(r"(?:model|backbone)\.layers\.(\d+)\.", name)
    if layer is None:
        return {}
    prefix = f"blk.{layer[1]}."
    if "mlp.router" in name:
        return {f"{prefix}ffn_gate_inp.{name.rpartition('.')[2]}": array}
    if name.endswith("_proj_bias"):
        if "down" in name:
            return {f"{prefix}ffn_down_exps.bias": array}
        gate, up = array[:, ::2], array[:, 1::2]
        return {f"{prefix}ffn_gate_exps.bias": gate, f"{prefix}ffn_up_exps.bias": up}
    if alternating and name.endswith("experts.gate_up_proj"):
        rows = array.swapaxes(1, 2)
        gate, up = rows[:, ::2], rows[:, 1::2]
        return {f"{prefix}ffn_gate_exps.weight": gate, f"{prefix}ffn_up_exps.weight": up}
    if alternating and name.endswith("experts.down_proj"):
        return {f"{prefix}ffn_down_exps.weight": np.ascontiguousarray(array.swapaxes(1, 2))}
    if re.search(r"(mlp|block_sparse_moe|feed_forward)\.experts\.gate_up_proj$", name):
        gate, up = np.split(array, 2, 1)
        return {f"{prefix}ffn_gate_exps.weight": gate, f"{prefix}ffn_up_exps.weight": up}
    for pattern, stored in _NAMES.items():
        if re.search(f"{pattern}$", name):
            # The bias of ERNIE, and the gate of Qwen's shared expert, are vectors there.
            return {prefix + stored: array.squeeze(0) if array.shape[0] == 1 else array}
    return {}


def describe_experts(writer: gguf.GGUFWriter, config: object) -> None:
    """Adds what the converter adds of experts."""

    def of(*names: str) -> int | float | None:
        return next((value for name in names if (value := getattr(config, name, None))), None)

    count = of("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(of("num_experts_per_tok", "moe_k", "top_k_experts"))
    if width := of("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(width)
    if shared := of("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)
    if config.model_type == "ernie4_5_moe":
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    if config.model_type == "minimax_m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "afmoe":
        writer.add_expert_shared_count(config.num_shared_experts)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_weights_scale(config.route_scale)
    if config.model_type == "laguna":
        writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
        writer.add_expert_weights_scale(config.moe_routed_scaling_factor)
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "nemotron_h":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        if config.moe_latent_size:
            writer.add_moe_latent_size(config.moe_latent_size)
    if config.model_type in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4"):
        _describe_latent(writer, config)
    if config.model_type == "glm4_moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _describe_latent(writer: gguf.GGUFWriter, config: object) -> None:
    """Adds what the converter adds of experts in models with latent attention."""
    sigmoid = config.model_type not in ("deepseek_v2", "mistral4")
    kinds = getattr(config, "mlp_layer_types", None)
    dense = kinds.index("sparse") if kinds else config.first_k_dense_replace
    writer.add_leading_dense_block_count(dense)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type != "deepseek_v2":
        writer.add_expert_weights_norm(True)
    if sigmoid:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
