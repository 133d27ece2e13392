"""What Gemma 3 describes beside the usual: where it rounds, two rotary embeddings, and configs that
leave out most fields. That its texts are transformers' own is held by the table of families.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import make_model, random_ids
from oracle import greedy
from transformers.models.gemma3 import modeling_gemma3

from triforce_core import Engine
from triforce_core.model.config import ModelConfig, RopeConfig
from triforce_core.model.families.hf import from_hf
from triforce_core.model.feed_forward import Activation
from triforce_core.model.layers import NormKind, Norms
from triforce_core.model.rope import Rope
from triforce_core.model.transformer import Model
from triforce_core.plan.temporaries.workspace import prompt_bytes
from triforce_kernels.layer import geglu, rms_norm, rotate
from triforce_offload.errors import CheckpointError, UnsupportedModelError

# The text part of Gemma 3 4B, as it was published.
PUBLISHED = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF)
def test_norms_round_where_transformers_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs = modeling_gemma3.Gemma3RMSNorm(64, 1e-6).to(dtype)
    torch.nn.init.normal_(theirs.weight, 3.0, 2.0)
    hidden, delta = (torch.randn(50, 64).to(dtype) for _ in range(2))
    expected = theirs(hidden + delta)
    assert torch.equal(rms_norm(hidden, theirs.weight, 1e-6, delta, offset=1.0), expected)


@pytest.mark.parametrize("dtype", HALF)
def test_gates_round_where_transformers_does(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, 50, 64).to(dtype).unbind()
    act = modeling_gemma3.ACT2FN["gelu_pytorch_tanh"]
    assert torch.equal(geglu(torch.cat((gate, up), 1)), act(gate) * up)


def test_the_scale_of_embeddings_is_rounded_as_in_transformers(tmp_path: Path, monkeypatch) -> None:
    """The root of 96, about 9.798, is 9.8125 in bfloat16."""
    model, seen = make_model("gemma3", tmp_path, hidden_size=96).bfloat16(), []
    original = Model.embed

    def embed(ours: Model, tokens: torch.Tensor) -> torch.Tensor:
        hidden = original(ours, tokens)
        seen.append(hidden.clone())
        return hidden

    monkeypatch.setattr(Model, "embed", embed)
    prompt = random_ids(20)
    with Engine.from_pretrained(tmp_path, device="cpu", dtype="bfloat16", max_context=40) as engine:
        engine.generate(prompt, greedy(1))
    expected = model.model.embed_tokens(torch.tensor(prompt))
    assert torch.equal(seen[0], expected)
    assert not torch.equal(expected, model.model.embed_tokens.weight[prompt] * 96**0.5)


def test_a_published_config() -> None:
    text = from_hf(PUBLISHED, {})
    assert (len(text.layers), text.vocab, text.positions) == (34, 262208, 131072)
    assert (text.rope.type, text.rope.theta) == ("linear", 1e6)
    assert text.window_rope == RopeConfig()
    assert (text.norm_kind, text.embedding_scale) == (NormKind.RMS_PLUS_ONE, 2560**0.5)
    assert text.tied
    first, full = text.layers[0], text.layers[5]
    assert (first.norms, first.mlp.activation) == (Norms.AROUND, Activation.GELU_TANH)
    assert (first.mixer.heads, first.mixer.kv_heads, first.mixer.head_dim) == (8, 4, 256)
    assert (first.mixer.window, full.mixer.window, first.mixer.scale) == (1024, None, None)
    windows = [spec.mixer.window for spec in text.layers]
    assert [i for i, window in enumerate(windows) if window is None] == [5, 11, 17, 23, 29]
    name = "Gemma3ForConditionalGeneration"
    around = {"architectures": [name], "text_config": PUBLISHED, "eos_token_id": [1, 106]}
    assert from_hf(around, {}).layers == text.layers
    assert from_hf(around, {}).eos_token_ids == (1, 106)


def test_configs_of_both_versions_say_the_same() -> None:
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    }
    newer = {name: value for name, value in PUBLISHED.items() if name != "rope_scaling"}
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(34)]
    newer |= {"rope_parameters": nested, "layer_types": kinds}
    assert from_hf(newer, {}) == from_hf(PUBLISHED, {})
    alone = from_hf(newer | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, {})
    assert (alone.rope.theta, alone.window_rope) == (1e6, RopeConfig())


def test_scores_of_the_largest_model_are_not_scaled_by_the_size_of_heads() -> None:
    mixer = from_hf(PUBLISHED | {"head_dim": 128, "query_pre_attn_scalar": 168}, {}).attention
    assert mixer.scale == 168**-0.5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"hidden_activation": ["silu"]}, "hidden_activation"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar"),
        ({"sliding_window": "x"}, "sliding_window"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"rope_local_base_freq": [1]}, "rope_theta"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 34"),
        ({"layer_types": [["full_attention"]] * 34}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 34}, "chunked_attention"),
        ({"rope_parameters": {"full_attention": 3}}, "rope scaling must be an object"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "x"}}}, "rope type 'x'"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": []}}}, "rope_theta"),
    ],
)
def test_what_is_not_computed_is_named(change: dict, named: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        from_hf(PUBLISHED | change, {})


def _tiny(tiny) -> ModelConfig:
    with Engine.from_pretrained(tiny("gemma3")[0], device="cpu", max_context=64) as engine:
        return engine.config


def test_keys_of_each_layer_are_turned_back_by_its_own_rope(tiny) -> None:
    config = _tiny(tiny).as_drafter
    rope = Rope(config, torch.device("cpu"), None, 64)
    raw = torch.randn(3, 2, 10, 16, generator=torch.Generator().manual_seed(0))
    before, after = (rope.rotations(torch.arange(10) + first, raw) for first in (7, 0))
    layers = [config.rotation_of(spec.mixer) for spec in config.layers]
    assert [each for each, _ in layers] == [config.window_rope, config.window_rope, config.rope]
    keys = torch.stack([rotate(raw[i], *before[each]) for i, each in enumerate(layers)])
    expected = torch.stack([rotate(raw[i], *after[each]) for i, each in enumerate(layers)])
    torch.testing.assert_close(rope.turned_back(keys, 7), expected, rtol=0, atol=2e-5)


def test_plans_count_both_pairs_of_tables(tiny) -> None:
    from dataclasses import replace

    config = _tiny(tiny)
    one = replace(config, window_rope=config.rope)
    assert (len(config.rotations), len(one.rotations)) == (2, 1)
    more = prompt_bytes(config, 100, 100, 4) - prompt_bytes(one, 100, 100, 4)
    assert more == 100 * 2 * config.attention.head_dim * 4
