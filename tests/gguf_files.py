"""Writes tiny GGUF files as llama.cpp's converter would."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf_experts import describe_experts, expert_tensors
from gguf_latent import describe_latent, latent_tensors
from gguf_mamba2 import describe_mamba2, of_mamba2, of_shared_mlp
from gguf_qwen4 import describe_qwen4, qwen4_tensors
from helpers import full_layers

# Where the half-precision numbers of a block lie, in types that the gguf package does not write.
_SCALES = {
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **{"IQ1_M": (), "IQ4_NL": (0,), "IQ4_XS": (0,)},
}


def in_blocks(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Matrices [..., columns] in a block type, [..., bytes of a row]. Where the gguf package does
    not write that type: random bits, with small scales.
    """
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(array.size)
    shape = *array.shape[:-1], array.shape[-1] // block * nbytes
    data = random.integers(0, 256, shape, np.uint8)
    blocks = data.reshape(-1, nbytes)
    for start in _SCALES[kind.name]:
        scales = (random.random(len(blocks)) * 0.01).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind.name == "IQ1_M":
        # Its scale lies in the high four bits of each of the last four numbers: .0078.
        blocks[:, -8:] = blocks[:, -8:] & 0x0F | np.array([0, 0, 0, 0, 0, 0, 0, 0x20], np.uint8)
    return data


_ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
_RENAMED = {
    **{"mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2"},
    **{"gemma4_text": "gemma4", "gemma4_unified_text": "gemma4", "qwen3_5_text": "qwen35"},
    **{"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"},
    **{"qwen3_5_moe_text": "qwen35moe", "ernie4_5_moe": "ernie4_5-moe", "glm4_moe": "glm4moe"},
    **{"gpt_oss": "gpt-oss", "qwen3_next": "qwen3next", "minimax_m2": "minimax-m2"},
    "qwen4_exp_text": "qwen4exp",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
    "ministral3": "mistral3",
    **{"granitemoehybrid": "granitehybrid", "nemotron_h": "nemotron_h_moe", "lfm2_moe": "lfm2moe"},
}
# Those that the package does not know, and one whose tensors have the same names.
_NAMED_AS = {"laguna": "qwen3", "qwen4exp": "qwen35moe"}
# Those whose q and k llama.cpp's converter permutes.
_PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "granitehybrid", "nemotron_h_moe")
_PERMUTED += ("mistral3", "arcee")
_LARGER = re.compile(r"blk\.\d*[02468]\.(ffn_down|ffn_down_exps|attn_v)\.weight")


def write_gguf(
    model: torch.nn.Module,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, np.ndarray] | None = None,
    describe: Callable[[gguf.GGUFWriter], None] | None = None,
    *,
    larger: gguf.GGMLQuantizationType | None = None,
    head: dict[str, torch.Tensor] | None = None,
    **metadata: object,
) -> None:
    """A transformers model as GGUF: q and k permuted for the llama architecture, matrices in `kind`
    where their rows divide into its blocks, vectors in float32.

    describe: adds more metadata
    larger: the type of `down` and `v` of even layers, if it is another
    head: tensors of an MTP head, as Qwen names them
    """
    config = model.config
    architecture = _RENAMED.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    head_dim = _describe_sizes(writer, model, architecture, has_head=bool(head))
    for name, value in metadata.items():
        writer.add_uint32(name.replace("__", "."), value)
    if describe:
        describe(writer)
    _describe_family(writer, config, head_dim)
    tensors = (extra or {}) | _tensors(model, architecture)
    tensors |= _of_head(head, config) if head else {}
    for name, array in tensors.items():
        stored = larger if larger is not None and _LARGER.match(name) else kind
        if architecture == "gpt-oss" and not name.endswith("_exps.weight"):
            # Only experts are quantised.
            stored = gguf.GGMLQuantizationType.F32
        block = gguf.GGML_QUANT_SIZES[stored][0]
        if array.ndim > 1 and array.shape[-1] % block == 0 and "_inp" not in name:
            writer.add_tensor(name, in_blocks(array, stored), raw_dtype=stored)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe_sizes(
    writer: gguf.GGUFWriter, model: torch.nn.Module, architecture: str, *, has_head: bool
) -> int:
    """Add the sizes of a model. Return the size of a head."""
    config = model.config
    writer.add_block_count(_blocks(config) + has_head)
    if has_head:
        writer.add_nextn_predict_layers(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    mlp = model.model.layers[0].feed_forward.w1 if architecture.startswith("lfm2") else None
    width = mlp.out_features if mlp else getattr(config, "intermediate_size", None)
    if architecture == "nemotron_h_moe":
        kinds = config.layer_types
        writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    elif getattr(config, "use_double_wide_mlp", False):
        wide = config.num_kv_shared_layers
        writer.add_feed_forward_length([width] * (_blocks(config) - wide) + [2 * width] * wide)
    elif width:
        writer.add_feed_forward_length(width)
    describe_experts(writer, config)
    heads = getattr(config, "num_attention_heads_per_layer", config.num_attention_heads)
    writer.add_head_count(heads)
    if architecture == "gemma4":
        describe_gemma4(writer, config)
    elif architecture in ("qwen35", "qwen35moe", "qwen3next", "qwen4exp", "lfm2", "lfm2moe"):
        _describe_recurrent(writer, config)
        if architecture == "qwen4exp":
            describe_qwen4(writer, model)
    elif architecture in ("granitehybrid", "nemotron_h_moe"):
        describe_mamba2(writer, config)
    elif architecture in ("deepseek2", "mistral4"):
        describe_latent(writer, config)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    if architecture == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
    else:
        names = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
        found = (getattr(config, name, None) for name in names)
        writer.add_layer_norm_rms_eps(next(filter(None, found)))
    writer.add_vocab_size(config.vocab_size)
    # The layers of Gemma 4 have a config each.
    first = config.per_layer_config[0] if architecture == "gemma4" else config
    head_dim = getattr(first, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if architecture not in ("gemma4", "deepseek2", "mistral4"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    return head_dim


def _tensors(model: torch.nn.Module, architecture: str) -> dict[str, np.ndarray]:
    """The tensors of a model under their names in a file, as the converter stores them."""
    config, tensors = model.config, {}
    known = _ARCHITECTURES[_NAMED_AS.get(architecture, architecture)]
    names = gguf.get_tensor_name_map(known, _blocks(config))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if architecture in _PERMUTED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = (
                array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
                .swapaxes(1, 2)
                .reshape(array.shape)
            )
        if architecture in ("gemma2", "gemma3") and "norm" in name:
            array = array + 1
        if (
            architecture == "qwen4exp"
            and (of_parts := qwen4_tensors(config, name, array)) is not None
        ):
            tensors |= of_parts
            continue
        if architecture in ("qwen35", "qwen35moe", "qwen4exp"):
            name, array = _of_qwen35(config, name, array)
        if architecture == "qwen3next":
            name, array = _of_qwen3next(config, name, array)
        if architecture in ("granitehybrid", "nemotron_h_moe"):
            name, array = of_mamba2(config, name, array)
        layer = name.removeprefix("model.layers.").partition(".")[0]
        if name.endswith("in_proj_qkvz.weight"):
            joint = _by_projection(config, array)
            tensors |= {f"blk.{layer}.{part}.weight": rows for part, rows in joint.items()}
            continue
        if name.endswith("kv_b_proj.weight"):
            tensors |= latent_tensors(config, layer, array)
            continue
        if name.endswith("self_attn.g_proj.weight"):
            tensors[f"blk.{layer}.attn_gate.weight"] = array
            continue
        if name.endswith("conv.conv.weight"):
            array = array.squeeze(1)
        if name.endswith("layer_scalar"):
            name += ".weight"
        if name.endswith("self_attn.sinks"):
            name += ".weight"
        if "shared_mlp" in name:
            tensors |= of_shared_mlp(name, array, beside=config.num_local_experts > 0)
            continue
        alternating = architecture == "gpt-oss"
        if of_experts := expert_tensors(name, array, alternating=alternating):
            tensors |= of_experts
            continue
        tensors[names.get_name(name, (".weight", ".bias"))] = array
    if architecture == "gemma4":
        full = full_layers(config).head_dim
        still = [1e30] * (full // 2 - full // 8)
        tensors["rope_freqs.weight"] = np.array([1.0] * (full // 8) + still, np.float32)
    return tensors


def _of_head(head: dict[str, torch.Tensor], config: object) -> dict[str, np.ndarray]:
    """The tensors of an MTP head as the converter stores them: as one more layer."""
    layers, latent = config.num_hidden_layers, hasattr(config, "kv_lora_rank")
    folded = not latent and config.model_type != "glm4_moe"
    known = gguf.MODEL_ARCH.DEEPSEEK2 if latent else gguf.MODEL_ARCH.QWEN35
    names = gguf.get_tensor_name_map(known, layers + 1)
    others = {
        "mtp.fc.weight": "eh_proj",
        "mtp.pre_fc_norm_embedding.weight": "enorm",
        "mtp.pre_fc_norm_hidden.weight": "hnorm",
        "mtp.norm.weight": "shared_head_norm",
    }
    tensors = {}
    for name, tensor in head.items():
        array = tensor.numpy() + (folded and "norm" in name)
        if name in others:
            tensors[f"blk.{layers}.nextn.{others[name]}.weight"] = array
        else:
            whole = name.replace("mtp.layers.0.", f"model.layers.{layers}.")
            if whole.endswith("kv_b_proj.weight"):
                tensors |= latent_tensors(config, str(layers), array)
                continue
            of_experts = expert_tensors(whole, array)
            tensors |= of_experts or {names.get_name(whole, (".weight",)): array}
    return tensors


def _of_qwen35(config: object, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """A tensor of Qwen3.5 as the converter stores it: norms with 1 added, decays as factors, value
    heads of all key heads side by side.
    """
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    stored, array = _of_qwen3next(config, name, array)
    before = 2 * keys * config.linear_key_head_dim
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        array = np.concatenate((array[:before], _tiled(array[before:], keys, size)))
    elif name.endswith("in_proj_z.weight"):
        array = _tiled(array, keys, size)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        array = _tiled(array, keys, 1)
    elif name.endswith("out_proj.weight"):
        array = _tiled(array.T, keys, size).T
    return stored, array


def _of_qwen3next(config: object, name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """A tensor of Qwen3-Next as the converter stores it: norms with 1 added, decays as factors."""
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return name, array + 1
    if name.endswith("conv1d.weight"):
        array = array.squeeze(1)
    if name.endswith("A_log"):
        array = -np.exp(array)
    return name.replace("dt_bias", "dt_proj.bias"), array


def _by_projection(config: object, array: np.ndarray) -> dict[str, np.ndarray]:
    """Queries, keys and values, and gates, of which the rows of a key head were side by side."""
    heads, key, value = (
        config.linear_num_key_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim * config.linear_num_value_heads // config.linear_num_key_heads,
    )
    rows = array.reshape(heads, -1, array.shape[-1])
    parts = np.split(rows, (key, 2 * key, 2 * key + value), 1)
    *qkv, gate = (part.reshape(-1, array.shape[-1]) for part in parts)
    return {"attn_qkv": np.concatenate(qkv), "attn_gate": gate}


def _tiled(rows: np.ndarray, keys: int, size: int) -> np.ndarray:
    """Rows of value heads, of which those of a key head were side by side."""
    heads = rows.reshape(keys, -1, size, *rows.shape[1:])
    return heads.swapaxes(0, 1).reshape(rows.shape)


def _describe_recurrent(writer: gguf.GGUFWriter, config: object) -> None:
    """Adds what the converter adds of recurrent layers."""
    if config.model_type in ("lfm2", "lfm2_moe"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
        heads = config.num_key_value_heads
        writer.add_head_count_kv(
            [heads if kind == "full_attention" else 0 for kind in config.layer_types]
        )
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    kinds = [kind != "linear_attention" for kind in config.layer_types]
    writer.add_full_attention_interval(kinds.index(True) + 1)
    if config.model_type == "qwen3_next":
        return
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _blocks(config: object) -> int:
    """The number of layers, or of mixers and MLPs if these are numbered."""
    return getattr(config, "num_hidden_layers", None) or len(config.layer_types)


def describe_gemma4(writer: gguf.GGUFWriter, config: object, shared: int | None = None) -> None:
    """Adds the heads of Gemma 4, whose full layers have others.

    shared: number of layers that share keys, if it is not that of the config
    """
    layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    full = full_layers(config)
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_key_length_swa(layers[0].head_dim)
    writer.add_value_length_swa(layers[0].head_dim)
    writer.add_shared_kv_layers(config.num_kv_shared_layers if shared is None else shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_rope_dimension_count_swa(layers[0].head_dim)


def _describe_family(writer: gguf.GGUFWriter, config: object, head_dim: int) -> None:
    """Adds what the converter adds for some families alone."""
    if config.model_type == "nemotron_h":
        return
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    share = rope.get("partial_rotary_factor") or 1.0
    if rope["rope_type"] == "proportional":
        writer.add_rope_dimension_count(full_layers(config).head_dim)
    else:
        writer.add_rope_dimension_count(int(head_dim * share))
    kinds = getattr(config, "layer_types", None) or ()
    if "sliding_attention" in kinds:
        writer.add_sliding_window(config.sliding_window)
        if config.model_type not in ("cohere2", "gemma2"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    elif config.model_type.startswith(("gemma", "laguna")):
        writer.add_float32(
            f"{_RENAMED.get(config.model_type, config.model_type)}.rope.freq_base_swa",
            config.rope_parameters["sliding_attention"]["rope_theta"],
        )
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if beta := rope.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(beta)
    if config.model_type in ("granite", "granitemoe", "granitemoehybrid"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "phi3":
        # What it writes where there is no window, as in Phi-4.
        writer.add_sliding_window(config.sliding_window or 0)
