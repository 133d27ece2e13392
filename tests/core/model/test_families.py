"""What families describe beside the usual: rotations of a part, layers that do not rotate, norms
elsewhere, tensors that are one in the files. That their texts are transformers' own is held by the
table of families, FAMILIES, in `test_greedy` and others.
"""

from __future__ import annotations

import json
from pathlib import Path

import helpers
import pytest
import torch
from helpers import VOCAB, make_model, random_ids
from oracle import assert_equal_but_for_ties, greedy

from triforce_core import Engine
from triforce_core.model.checkpoints.naming.names import head_order
from triforce_core.model.config import ModelConfig
from triforce_core.model.families.dense import FAMILIES
from triforce_core.model.families.family import EXPERT_COUNTS
from triforce_core.model.families.hf import from_hf
from triforce_core.model.feed_forward import Experts
from triforce_core.model.layers import LatentAttention, Norms
from triforce_core.model.parts.specs import Keeps
from triforce_kernels.layer import rotate
from triforce_offload.errors import CheckpointError, UnsupportedModelError, UsageError

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 4096,
    "sliding_window": None,
    "head_dim": 16,
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [2, 4, 10, 16])
def test_rows_in_our_order_are_rotated_by_our_kernel(rotated: int, interleaved: bool) -> None:
    """Scores of heads as files store them, rotated as their family does, are those of ours."""
    torch.manual_seed(rotated)
    head_dim, tokens = 16, 5
    stored = torch.randn(2, tokens, head_dim, dtype=torch.float64)
    angles = torch.outer(torch.arange(tokens), torch.rand(rotated // 2)).double()
    pairs = stored[..., :rotated]
    pairs = pairs.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = first * angles.cos() - second * angles.sin()
    other = second * angles.cos() + first * angles.sin()
    theirs = torch.cat((turned, other, stored[..., rotated:]), -1)
    order = head_order(head_dim, rotated, interleaved=interleaved)
    ours = stored if order is None else stored[..., list(order)]
    still = torch.zeros(tokens, head_dim // 2 - rotated // 2)
    every = torch.cat((angles, still), -1).repeat(1, 2)
    ours = rotate(ours, every.cos(), every.sin())
    scores = [heads[0] @ heads[1].T for heads in (theirs, ours)]
    torch.testing.assert_close(*scores, rtol=1e-12, atol=1e-12)
    assert (order is None) == (rotated == head_dim and not interleaved)
    assert order is None or sorted(order) == list(range(head_dim))


def test_layers_are_as_each_family_says() -> None:
    def layers(family: str, **more: object) -> list:
        return list(from_hf(CONFIG | {"model_type": family} | more, {}).layers)

    assert [spec.mixer.rotated for spec in layers("smollm3")] == [True, True, True, False]
    chosen = layers("smollm3", no_rope_layers=[0, 1, 1, 0])
    assert [spec.mixer.rotated for spec in chosen] == [False, True, True, False]
    assert {spec.norms for spec in layers("glm4")} == {Norms.AROUND}
    assert {spec.norms for spec in layers("olmo2")} == {Norms.AFTER}
    assert layers("olmo2")[0].mixer.norm_over_heads
    assert layers("seed_oss")[0].mixer.qkv_bias
    granite = layers("granite", attention_multiplier=0.1, residual_multiplier=0.3)[0]
    assert (granite.mixer.scale, granite.residual_scale) == (0.1, 0.3)
    config = from_hf(
        CONFIG | {"model_type": "granite", "embedding_multiplier": 12, "logits_scaling": 8}, {}
    )
    assert (config.embedding_scale, config.logit_scale) == (12, 1 / 8)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers must be a list of 4"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
        ({"model_type": "glm4", "partial_rotary_factor": 2.0}, "partial_rotary_factor 2"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.07}, "partial_rotary_factor"),
        ({"model_type": "phi3", "partial_rotary_factor": "half"}, "partial_rotary_factor"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}},
            "long_factor must be a list of 8 positive numbers",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "short_factor must be a list of 8",
        ),
        ({"model_type": "ministral3", "rope_parameters": {"llama_4_scaling_beta": "x"}}, "llama_4"),
        ({"model_type": "granite", "attention_multiplier": -1}, "attention_multiplier"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling"),
        ({"model_type": "ernie4_5", "attention_bias": "no", "rms_norm_eps": "no"}, "rms_norm_eps"),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": [1]},
            "text_config",
        ),
    ],
)
def test_what_a_description_cannot_hold_is_named(change: dict, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        from_hf(CONFIG | change, {})


# What configs of some families always say of experts.
SAID = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "granitemoehybrid": {"num_local_experts": 0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_does_not_mention_is_as_in_transformers(family: str) -> None:
    import transformers

    named = {"model_type": family, "num_hidden_layers": 2, "hidden_size": 256}
    named |= {"intermediate_size": 128, "num_attention_heads": 16, "vocab_size": 97}
    named |= {"max_position_embeddings": 4096, "sliding_window": None}
    if family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp_text"):
        named["layer_types"] = ["linear_attention", "full_attention"]
    elif family in ("exaone4", "granitemoehybrid") or family.startswith("gemma4"):
        named["layer_types"] = ["full_attention"] * 2
    named |= SAID.get(family, {})
    if family in ("lfm2_moe", "lfm3"):
        named |= {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    if family == "nemotron_h":
        named |= {"num_hidden_layers": 3, "mlp_hidden_act": "relu2"}
        named["layers_block_type"] = ["linear_attention", "full_attention", "moe"]
    if family.startswith("gemma4"):
        named |= {"sliding_window": 64, "hidden_size_per_layer_input": 0}
    elif family in ("laguna", "cwm", "exaone_moe"):
        del named["sliding_window"]
        if family == "exaone_moe":
            named["num_key_value_heads"] = 4
    elif family not in (
        *("ministral3", "smollm3", "glm", "glm4", "ernie4_5", "gemma3_text", "qwen3_5_text"),
        *("lfm2", "qwen3_5_moe_text", "qwen3_moe", "ernie4_5_moe", "glm4_moe", "mixtral"),
        *("qwen3_next", "minimax_m2", "nemotron_h", "lfm2_moe", "glm4_moe_lite"),
        *("deepseek_v2", "deepseek_v3", "qwen4_exp_text", "mistral4"),
    ):
        # Published configs always say so.
        named["num_key_value_heads"] = 4
    theirs = getattr(transformers, f"{FAMILIES[family].hf_class}ForCausalLM").config_class(
        **{name: value for name, value in named.items() if name != "model_type"}
    )
    ours = from_hf(named, {})
    assert ours.norm_eps == getattr(theirs, FAMILIES[family].norm_eps)
    assert ours.tied == bool(theirs.tie_word_embeddings)
    full = helpers.full_layers(theirs)
    mixer = ours.attention
    if isinstance(mixer, LatentAttention):
        _assert_latent(ours, theirs)
    else:
        assert mixer.kv_heads == full.num_key_value_heads
        assert mixer.head_dim == (getattr(full, "head_dim", None) or 256 // 16)
    rope = getattr(theirs, "rope_parameters", {"rope_type": "default", "rope_theta": 1e4})
    rope = rope.get("full_attention", rope)
    assert (ours.rope.theta, ours.rope.type) == (rope["rope_theta"], rope["rope_type"])
    share = 1 if ours.rope.type == "proportional" else rope.get("partial_rotary_factor")
    if not isinstance(mixer, LatentAttention):
        assert ours.rope.rotated(100) == int(100 * (share or 1))
    assert ours.rope.query_growth is None or rope["llama_4_scaling_beta"] == 0.1
    kinds = getattr(theirs, "layer_types", None) or ()
    assert any(spec.mixer.keeps is Keeps.WINDOW for spec in ours.layers) == (
        "sliding_attention" in kinds and bool(getattr(theirs, "sliding_window", None))
    )
    assert ours.attention.qkv_bias == (
        family in ("qwen2", "qwen2_moe") or bool(getattr(theirs, "attention_bias", False))
    )
    if isinstance(mlp := ours.layers[-1].mlp, Experts):
        _assert_experts(mlp, theirs)


def _assert_latent(ours: ModelConfig, theirs: object) -> None:
    mixer = ours.attention
    assert (mixer.kv_heads, mixer.rope_dim) == (1, theirs.qk_rope_head_dim)
    assert (mixer.latent, mixer.query_rank) == (theirs.kv_lora_rank, theirs.q_lora_rank or 0)
    assert (mixer.key_dim, mixer.value_dim) == (theirs.qk_nope_head_dim, theirs.v_head_dim)
    assert ours.rope.rotated(mixer.head_dim) == mixer.rope_dim


def _assert_experts(mlp: Experts, theirs: object) -> None:
    assert mlp.count in (getattr(theirs, name, None) for name in EXPERT_COUNTS)
    active = ("num_experts_per_tok", "moe_k", "top_k_experts")
    assert mlp.active in (getattr(theirs, name, None) for name in active)
    own = getattr(theirs, "moe_intermediate_size", None)
    assert mlp.width == (own or theirs.intermediate_size)
    assert mlp.router.normalised == getattr(theirs, "norm_topk_prob", True)


def test_configs_of_other_versions() -> None:
    ernie = from_hf(CONFIG | {"architectures": ["Ernie4_5_ForCausalLM"]}, {})
    assert ernie.family == "ernie4_5"
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    named = {"model_type": "phi3", "original_max_position_embeddings": None}
    phi = from_hf(CONFIG | named | {"rope_scaling": {"type": "su", **factors}}, {})
    assert phi.rope.type == "longrope"
    assert phi.rope.parameters["original_max_position_embeddings"] == 4096
    exaone = from_hf(CONFIG | {"model_type": "exaone4", "sliding_window": 4096}, {})
    assert not exaone.attention.rotated, "full layers of a model with windows do not rotate"


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_of_any_type_are_read_or_refused(family: str) -> None:
    names = {*CONFIG, *FAMILIES[family].defaults, "rope_scaling", "rope_parameters"}
    names |= {"no_rope_layers", "architectures", "layer_types", "quantization_config", "dtype"}
    names |= {"rotary_dim", "num_attention_heads_per_layer", "mlp_layer_types"}
    names |= {"partial_rotary_factor", "original_max_position_embeddings", "text_config"}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "llama_4_scaling_beta": 0.1}
    read, refused, own = 0, 0, {"model_type": family}
    # By default it has what is not supported.
    if family == "lfm2_moe":
        own["layer_types"] = ["conv", "full_attention"] * (CONFIG["num_hidden_layers"] // 2)
    if family == "dots1":
        own |= {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
        own["moe_intermediate_size"] = 64
    if family == "granitemoehybrid":
        own |= {"num_local_experts": 0, "layer_types": ["attention"] * CONFIG["num_hidden_layers"]}
    if family == "nemotron_h":
        names |= {"hybrid_override_pattern", "layers_block_type", "time_step_limit"}
        # A mixer and its MLP are one layer.
        own["hybrid_override_pattern"] = "M*" * (CONFIG["num_hidden_layers"] // 2 - 1) + "*-"
    for value in ([], ["x"], [[]], {}, {"x": [1]}, "x", True, -1, 0.3, 1 << 70, None):
        for raw in (
            *(CONFIG | own | {name: value} for name in names),
            *(
                CONFIG | own | {"rope_parameters": rope | {name: value}}
                for name in (*rope, "type", "partial_rotary_factor", "short_factor", "mscale")
            ),
        ):
            try:
                config = from_hf(raw, {})
            except (CheckpointError, UnsupportedModelError) as error:
                assert str(error)
                refused += 1
            else:
                assert len(config.layers) == CONFIG["num_hidden_layers"] - (family == "nemotron_h")
                read += 1
    assert min(read, refused) > 30, "many of these values are as good as none, and many are not"


def test_a_repr_has_no_field_of_a_newer_version_that_is_as_usual() -> None:
    """The repr is a part of a checkpoint's identity, which saved contexts name."""
    shown = repr(from_hf(CONFIG | {"model_type": "llama"}, {}))
    assert "qk_norm=False)" in shown
    assert not any(name in shown for name in ("scale", "norms", "rotated", "norm_over"))
    assert "rotated=False" in repr(from_hf(CONFIG | {"model_type": "smollm3"}, {}))
    # As it was written when there was one kind of gate.
    assert "head_gate=True" in repr(from_hf(CONFIG | {"model_type": "laguna"}, {}))


def test_a_norm_over_all_heads_wants_each_as_often(tiny) -> None:
    with pytest.raises(UsageError, match="3 GPUs would have some of 2 key-value heads more often"):
        Engine.from_pretrained(tiny("olmo2")[0], device="cpu", gpus=3)


def test_frequencies_of_a_part_of_a_head_may_depend_on_the_length(tmp_path: Path) -> None:
    """The text runs past the trained positions, from where dynamic rope changes."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.5}
    model = make_model("glm4", tmp_path, max_position_embeddings=64, rope_parameters=rope)
    prompt = random_ids(50, 1)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[0, 50:]
    with Engine.from_pretrained(tmp_path, device="cpu", max_context=100) as engine:
        tokens = engine.generate(prompt, greedy(30)).token_ids
    assert_equal_but_for_ties(model, prompt, tokens, theirs.tolist())


def test_tensors_that_the_text_part_does_not_use_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_model("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(file).items()
    }
    name = "model.language_model.layers.0.self_attn.q_proj.bias"
    save_file(tensors | {name: torch.zeros(128)}, file)
    with pytest.raises(UnsupportedModelError, match=name):
        Engine.from_pretrained(tmp_path, device="cpu")


def test_longrope_has_the_frequencies_of_short_texts_in_engines_for_such(tmp_path: Path) -> None:
    model = make_model("phi3-longrope", tmp_path)
    prompt = random_ids(12, 1)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 12:]
    prints = []
    for context in (20, 21):
        with Engine.from_pretrained(tmp_path, device="cpu", max_context=context) as engine:
            prints.append(engine.config.rope.variant(context))
            tokens = engine.generate(prompt, greedy(8)).token_ids
        if context == 20:
            assert_equal_but_for_ties(model, prompt, tokens, theirs.tolist())
        else:
            assert tokens != theirs.tolist()
    assert prints[0] != prints[1], "a context that one saved must not go on in the other"


def test_every_family_is_in_the_table_of_tests_and_in_the_readme() -> None:
    root = Path(__file__).parents[3]
    tested = {kind for kind, _ in helpers.FAMILIES.values()}
    assert {family.hf_class for family in FAMILIES.values()} == tested
    page = (root / "docs" / "models.md").read_text()
    for family in FAMILIES.values():
        assert f"`{family.name}`" in page


def test_a_missing_norm_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_model("glm4", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.post_mlp_layernorm.weight"
    save_file({key: tensors[key] for key in tensors if key != name}, file)
    with pytest.raises(CheckpointError, match=name):
        Engine.from_pretrained(tmp_path, device="cpu")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == VOCAB


def test_granite_4_may_have_recurrent_layers_and_experts() -> None:
    """The published configs name kinds of layers "attention" and "mamba"."""
    count = CONFIG["num_hidden_layers"]
    dense = CONFIG | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["attention"] * count,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "position_embedding_type": "rope",
    }
    config = from_hf(dense, {})
    assert (config.layers[0].mlp.width, config.attention.rotated) == (48, True)
    assert not from_hf(dense | {"position_embedding_type": "nope"}, {}).attention.rotated
    hidden, kinds = dense["hidden_size"], ["attention", *["mamba"] * (count - 1)]
    mamba = {"layer_types": kinds, "mamba_n_heads": 4, "mamba_d_head": hidden // 2}
    mixed = from_hf(dense | mamba | {"num_local_experts": 4, "time_step_limit": [0.0, 1e999]}, {})
    assert mixed.recurrent_layers == tuple(range(1, count))
    assert (mixed.recurrent.values, mixed.layers[0].mlp.shared) == (2 * hidden, 48)
    for change, named in (
        ({"layer_types": ["linear_attention"] * count}, "a recurrence in every layer"),
        ({"layer_types": ["lstm"] * count}, "'lstm'"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
        (mamba | {"mamba_proj_bias": True}, "mamba_proj_bias"),
        (mamba | {"time_step_limit": [0.001, 1e999]}, "time_step_limit"),
        (mamba | {"time_step_limit": [0, 0.1]}, "time_step_limit"),
        ({"layer_types": [["attention"]] * count}, "attention"),
    ):
        with pytest.raises(UnsupportedModelError, match=named):
            from_hf(dense | change, {})
    with pytest.raises(CheckpointError, match="layer_types must be a list"):
        from_hf(dense | {"layer_types": None}, {})
    with pytest.raises(CheckpointError, match=r"4 heads of 3 \(mamba_d_head\) are not"):
        from_hf(dense | mamba | {"mamba_d_head": 3}, {})


def test_mixers_and_mlps_of_nemotron_h_are_layers() -> None:
    raw = CONFIG | {"architectures": ["NemotronHForCausalLM"], "num_hidden_layers": None}
    raw |= {"mamba_num_heads": 8, "moe_intermediate_size": 40, "sliding_window": None}
    config = from_hf(raw | {"hybrid_override_pattern": "ME*M-"}, {})
    assert [spec.mixer.keeps for spec in config.layers] == [Keeps.STATE, Keeps.KV, Keeps.STATE]
    widths = [spec.mlp.width for spec in config.layers]
    assert widths == [40, 0, CONFIG["intermediate_size"]]
    assert not config.attention.rotated
    listed = {"layers_block_type": ["linear_attention", "attention", "mlp"]}
    both = from_hf(raw | listed | {"hybrid_override_pattern": "M*M-"}, {})
    assert [spec.mlp.width for spec in both.layers] == [0, CONFIG["intermediate_size"]]
    latent = from_hf(raw | {"hybrid_override_pattern": "M*E", "moe_latent_size": 48}, {})
    shapes, count = latent.layers[1].shapes(config.hidden), latent.layers[1].mlp.count
    assert shapes["latent_down"] == shapes["latent_up"][::-1] == (48, config.hidden)
    assert shapes["experts_gate_up"] == (40 * count, 48)
    assert shapes["experts_down"] == (48 * count, 40)
    shapes = config.layers[1].shapes(config.hidden)
    assert "post_norm" not in shapes
    assert "down" not in shapes
    for change, named in (
        ({"hybrid_override_pattern": "E*M-"}, "an MLP that does not follow a mixer"),
        ({"hybrid_override_pattern": "*-E"}, "an MLP that does not follow a mixer"),
        ({"hybrid_override_pattern": "M*M"}, "a model without an MLP"),
        ({"hybrid_override_pattern": "M*E", "attention_bias": True}, "attention_bias"),
        ({"hybrid_override_pattern": "M*X"}, "'X'"),
        ({"hybrid_override_pattern": "M*E", "mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    ):
        with pytest.raises(UnsupportedModelError, match=named):
            from_hf(raw | change, {})
