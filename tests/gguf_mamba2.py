"""Mamba-2 layers of GGUF files, and what else those of Granite 4 and Nemotron-H have."""

from __future__ import annotations

import gguf
import numpy as np


def describe_mamba2(writer: gguf.GGUFWriter, config: object) -> None:
    """Adds what the converter adds of Mamba-2 layers."""
    heads = config.num_key_value_heads
    kinds = config.layer_types
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
    if config.model_type == "granitemoehybrid":
        sizes = config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups
        heads, size = config.mamba_n_heads, config.mamba_d_head
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    else:
        sizes = config.conv_kernel, config.ssm_state_size, config.n_groups
        heads, size = config.mamba_num_heads, config.mamba_head_dim
    writer.add_ssm_conv_kernel(sizes[0])
    writer.add_ssm_state_size(sizes[1])
    writer.add_ssm_group_count(sizes[2])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * size)
    writer.add_rope_scaling_finetuned(False)


def of_shared_mlp(name: str, array: np.ndarray, *, beside: bool) -> dict[str, np.ndarray]:
    """The MLP of Granite 4 as the converter stores it. beside: whether there are experts"""
    prefix = f"blk.{name.split('.')[2]}.ffn_"
    ending = "_shexp.weight" if beside else ".weight"
    if "output" in name:
        return {f"{prefix}down{ending}": array}
    gate, up = np.split(array, 2)
    return {f"{prefix}gate{ending}": gate, f"{prefix}up{ending}": up}


def of_mamba2(config: object, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """A tensor as the converter stores it: factors of decays and skips as columns, norms by
    group.
    """
    if name.endswith("A_log"):
        array = -np.exp(array)
    if name.endswith(("A_log", ".D")):
        array = array[:, None]
    if name.endswith("conv1d.weight"):
        array = array.squeeze(1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = getattr(config, "n_groups", None) or config.mamba_n_groups
        array = array.reshape(groups, -1)
    if config.model_type == "granitemoehybrid":
        return name.replace("dt_bias", "dt_proj.bias"), array
    return name.replace("dt_bias", "dt.bias").replace("model.", "backbone.", 1), array
