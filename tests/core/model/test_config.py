"""What a config.json may say, and that everything else is refused by name."""

from __future__ import annotations

import json

import pytest
from helpers import FAMILIES, full_layers

from triforce_core.model.families.hf import from_hf
from triforce_offload.errors import CheckpointError, UnsupportedModelError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_understood(tiny, family: str) -> None:
    path, model = tiny(family)
    config = from_hf(json.loads((path / "config.json").read_text()), {})
    latent = family.startswith(("deepseek", "glm4_lite", "mistral4"))
    kv_heads = 1 if latent else full_layers(model.config).num_key_value_heads
    assert config.attention.kv_heads == kv_heads
    assert config.tied == model.config.tie_word_embeddings
    # Nothing rotates in Nemotron-H.
    rope = getattr(model.config, "rope_parameters", {"rope_type": "default", "rope_theta": 1e4})
    rope = rope.get("full_attention", rope)
    assert (config.rope.type, config.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    normed = ("qwen3", "olmo2", "olmo3", "exaone4", "gemma3", "gemma4", "gemma4-unified")
    normed += ("qwen3_5", "lfm2", "lfm2-bias", "qwen3_moe", "qwen3_5_moe", "olmoe", "glm4_moe")
    normed += (
        "lfm2-moe",
        *("gemma4-moe", "gemma4-small", "exaone_moe-moe", "hy_v3-moe", "flex_olmo-moe"),
        "qwen3_next-moe",
        "minimax_m2-moe",
        "laguna-moe",
        *("afmoe-moe", "dots1-moe", "mellum-moe", "lfm3"),
        "qwen4_exp-moe",
    )
    assert config.attention.qk_norm == (family.removesuffix("-windows") in normed)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"sliding_window": 1024}, "sliding_window"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "eetq"}}, "quantization_config of method 'eetq'"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size \\[64, 64\\] is not supported",
        ),
        ({"rope_scaling": {"rope_type": "ntk"}}, "ntk"),
        ({"use_bias": True}, "use_bias"),
    ],
)
def test_unsupported_models_are_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        from_hf(LLAMA | change, {})


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": 1024},
        {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192},
        {"architectures": ["Phi3ForCausalLM"], "sliding_window": 2047},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 1024,
            "max_window_layers": 0,
        },
    ],
)
def test_every_layer_may_have_a_window(change: dict) -> None:
    config = from_hf(LLAMA | change, {})
    assert (config.kv_layers, config.window_layers) == ((), (0, 1))
    assert config.attention.window == config.windowed.window in (1024, 2047, 4096)


@pytest.mark.parametrize(
    "fine",
    [
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024},
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
        {"architectures": None, "model_type": "llama"},
    ],
)
def test_windows_that_are_off_are_fine(fine: dict) -> None:
    assert len(from_hf(LLAMA | fine, {}).layers) == 2


@pytest.mark.parametrize("field", sorted(set(LLAMA) - {"architectures", "rms_norm_eps"}))
@pytest.mark.parametrize("value", ["many", -1, 0, 2.5, True, [], 1 << 80])
def test_fields_that_are_no_numbers_are_named(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=field):
        from_hf(LLAMA | {field: value}, {})


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"]
)
def test_missing_fields_are_named(field: str) -> None:
    with pytest.raises(CheckpointError, match=f"{field} is missing"):
        from_hf({k: v for k, v in LLAMA.items() if k != field}, {})


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({}, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
            16384,
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            4096,
        ),
    ],
)
def test_positions_count_the_scaling_of_rope(scaling: dict, positions: int) -> None:
    assert from_hf(LLAMA | {"rope_scaling": scaling}, {}).positions == positions


def test_end_of_text_comes_from_the_generation_config_first() -> None:
    assert from_hf(LLAMA | {"eos_token_id": 2}, {}).eos_token_ids == (2,)
    assert from_hf(LLAMA | {"eos_token_id": 2}, {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        from_hf(LLAMA | {"eos_token_id": "x"}, {})
