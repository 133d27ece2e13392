"""Latent attention: published configs, what is refused, and matrices that are stored transposed."""

from __future__ import annotations

import json
import math

import gguf
import pytest
import torch
from gguf_files import write_gguf
from helpers import make_model, random_ids
from oracle import assert_equal_but_for_ties, greedy

from triforce_core import Engine
from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_core.model.checkpoints.gguf_fields import OWN_FIELDS
from triforce_core.model.families.hf import from_hf
from triforce_core.model.families.reading.fields import Fields
from triforce_core.model.feed_forward import Scores
from triforce_core.model.known.mixes import pieces_of
from triforce_core.model.parts.kept import kv_shape
from triforce_core.model.tensors import dense_layouts
from triforce_kernels.weights.block_types import F8_E4M3
from triforce_kernels.weights.split_bf16 import SplitBF16Weight, decode
from triforce_offload.errors import CheckpointError, UnsupportedModelError
from triforce_offload.weights.formats import DTYPES
from triforce_offload.weights.split_formats import SplitBF16

ONES = {"mscale": 1.0, "mscale_all_dim": 1.0}
# As published, without fields that say nothing of the layers.
GLM = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "partial_rotary_factor": 1.0,
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}


@pytest.mark.parametrize(
    ("raw", "billions", "token_bytes"), [(GLM, 29.9, 54_144), (V2_LITE, 15.7, 31_104)]
)
def test_published_configs_have_the_published_sizes(raw, billions, token_bytes) -> None:
    config = from_hf(raw, {})
    dtype = DTYPES["bfloat16"]
    assert dense_layouts(config, dtype).nbytes / 2e9 == pytest.approx(billions, rel=0.01)
    shape = kv_shape(config, 16, dtype)
    assert shape.token_bytes * shape.layers == token_bytes
    assert config.rope.rotated(config.attention.head_dim) == 64
    assert [spec.mlp.active for spec in config.layers[:2]] == [0, raw["num_experts_per_tok"]]


def test_scores_are_scaled_and_routed_as_published() -> None:
    glm, lite = from_hf(GLM, {}), from_hf(V2_LITE, {})
    assert glm.attention.scale == pytest.approx(256**-0.5)
    # DeepSeek's softmax_scale: 192 ** -0.5 times the square of yarn_get_mscale(40, 0.707).
    assert lite.attention.scale == pytest.approx(192**-0.5 * 1.2608038**2)
    assert glm.layers[-1].mlp.router.scores is Scores.SIGMOID
    assert lite.layers[-1].mlp.router.scores is Scores.SOFTMAX
    assert lite.layers[-1].mlp.shared == 2 * 1408


@pytest.mark.parametrize(
    ("raw", "change", "named"),
    [
        (GLM, {"attention_bias": True}, "attention_bias"),
        (GLM, {"rope_interleave": False}, "rope_interleave"),
        (GLM, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (GLM, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V2_LITE, {"topk_method": "group_limited_greedy"}, "group_limited_greedy"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2_LITE, {"n_group": 8}, "n_group"),
        (V2_LITE, {"scoring_func": "sqrtsoftplus"}, "sqrtsoftplus"),
    ],
)
def test_what_is_not_computed_is_refused(raw: dict, change: dict, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        from_hf(raw | change, {})


def test_odd_parts_of_vectors_are_refused() -> None:
    with pytest.raises(CheckpointError, match="kv_lora_rank 511 and qk_rope_head_dim 65 must be"):
        from_hf(GLM | {"kv_lora_rank": 511, "qk_rope_head_dim": 65}, {})


def test_gguf_files_that_would_be_computed_wrongly_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"attention\.key_length_mla"):
        OWN_FIELDS["deepseek2"](Fields({"block_count": 3}, "m.gguf"), frozenset())


def test_gguf_files_whose_queries_grow_otherwise_are_refused(tiny, tmp_path) -> None:
    write_gguf(
        tiny("mistral4-moe")[1],
        tmp_path / "m.gguf",
        describe=lambda writer: writer.add_uint32("mistral4.attention.temperature_length", 64),
    )
    with pytest.raises(UnsupportedModelError, match="temperature_length 64"):
        open_checkpoint(tmp_path / "m.gguf")


def test_gguf_files_of_mistral_4_need_not_say_that_queries_grow(tiny, tmp_path) -> None:
    """As those that llama.cpp's converter makes of files of transformers."""
    model = tiny("mistral4-moe")[1]
    expected = open_checkpoint(tiny("mistral4-moe")[0]).config.rope.query_growth

    def describe(writer: gguf.GGUFWriter) -> None:
        finish = writer.write_header_to_file

        def changed() -> None:
            del writer.kv_data[0]["mistral4.attention.temperature_scale"]
            finish()

        writer.write_header_to_file = changed

    write_gguf(model, tmp_path / "m.gguf", describe=describe)
    found = open_checkpoint(tmp_path / "m.gguf").config.rope.query_growth
    assert (expected, found) == ((0.4, 20), (0.1, 20))


def test_scores_of_mistral_4_are_not_sharpened(tmp_path) -> None:
    """As its publisher's params.json says (apply_scale false). The config.json that is published
    with it has an mscale_all_dim of 1, of which the first versions of transformers made nothing.
    """
    model = make_model("mistral4-moe", tmp_path)
    prompt = random_ids(80)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = config["rope_parameters"]
    assert rope.pop("attention_factor") == 1.0
    file.write_text(json.dumps(config | {"rope_parameters": rope | ONES}))
    with Engine.from_pretrained(tmp_path, device="cpu", max_context=100) as ours:
        text = ours.generate(prompt, greedy(12)).token_ids
        scale = ours.models.target.config.attention.scale
    assert_equal_but_for_ties(model, prompt, text, theirs[0, 80:].tolist())
    assert scale == (16 + 8) ** -0.5
    # Those of DeepSeek are, by the same fields.
    sharpened = from_hf(GLM | {"rope_parameters": rope | ONES}, {}).attention.scale
    assert sharpened == pytest.approx((0.1 * math.log(4) + 1) ** 2 / 16)


def test_gguf_files_of_softmax_routers_with_groups_are_refused(tiny, tmp_path) -> None:
    """Of DeepSeek-V2 with 236 billion parameters."""
    write_gguf(
        tiny("deepseek_v2-moe")[1],
        tmp_path / "m.gguf",
        describe=lambda writer: writer.add_expert_group_count(4),
    )
    with pytest.raises(UnsupportedModelError, match="n_group 4"):
        open_checkpoint(tmp_path / "m.gguf")


def test_gguf_files_without_experts_are_read(tmp_path) -> None:
    model = make_model("glm4_lite-moe", tmp_path / "m", mlp_layer_types=["dense"] * 3)
    model.config.n_routed_experts = 0
    write_gguf(model, tmp_path / "m.gguf")
    prompt = random_ids(40)
    with Engine.from_pretrained(tmp_path / "m.gguf", device="cpu", max_context=80) as engine:
        found = engine.generate(prompt, greedy(20)).token_ids
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    assert_equal_but_for_ties(model, prompt, found, theirs[0, 40:].tolist())


def test_only_matrices_of_keys_are_not_in_fp8() -> None:
    """They are stored transposed, with the scales of other numbers."""
    pieces = pieces_of(from_hf(GLM, {}), "fp8")
    kinds = {
        part: pieces(f"layers.1.{part}")[0][1] for part in ("qkv", "q_up", "k_up", "v_up", "o")
    }
    assert kinds.pop("k_up") is None
    assert set(kinds.values()) == {F8_E4M3}


def test_matrices_of_keys_are_transposed_in_any_format(tmp_path) -> None:
    model = make_model("glm4_lite-moe", tmp_path)
    stored = model.model.layers[1].self_attn.kv_b_proj.weight.detach()
    mixer = open_checkpoint(tmp_path).config.attention
    heads = stored.view(mixer.heads, -1, mixer.latent)
    keys = heads[:, : mixer.key_dim].transpose(1, 2).reshape(-1, mixer.key_dim)
    values = heads[:, mixer.key_dim :].reshape(-1, mixer.latent)
    checkpoint = open_checkpoint(tmp_path)
    for name, expected in (("k_up", keys), ("v_up", values)):
        dense = torch.empty(expected.shape)
        checkpoint.read(f"layers.1.{name}", dense)
        assert torch.equal(dense, expected)
        form = SplitBF16(*expected.shape)
        split = form.view(torch.zeros(form.nbytes, dtype=torch.uint8))
        assert isinstance(split, SplitBF16Weight)
        checkpoint.read(f"layers.1.{name}", split)
        assert torch.equal(decode(split), expected.bfloat16())
    checkpoint.close()
