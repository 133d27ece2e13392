"""What Gemma 4 describes beside Gemma 3: full layers with other heads, values made of keys, and
configs of both kinds. That its texts are transformers' own is held by the table of families.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from gguf_files import write_gguf
from helpers import PLACEMENTS, make_model, random_ids
from oracle import assert_equal_but_for_ties, greedy
from tokenizers import Tokenizer, models
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.olmo2 import modeling_olmo2

from triforce_core import Engine
from triforce_core.model.families.hf import from_hf
from triforce_core.model.known.recent import RECENT
from triforce_core.model.layers import NormKind
from triforce_core.model.norms import Norm
from triforce_core.model.tokenizing.sentence_piece import SentencePieceTokenizer, is_known
from triforce_offload.errors import CheckpointError, UnsupportedModelError

PUBLISHED = {**RECENT["gemma4-31b"], "use_bidirectional_attention": "vision"}
FULL = [index for index in range(60) if index % 6 == 5]


def test_a_published_config() -> None:
    config = from_hf(PUBLISHED, {})
    assert list(config.kv_layers) == FULL
    full, windowed = config.attention, config.windowed
    assert (full.heads, full.kv_heads, full.head_dim, full.window) == (32, 4, 512, None)
    assert (windowed.heads, windowed.kv_heads, windowed.head_dim) == (32, 16, 256)
    assert (full.projects_values, windowed.projects_values, windowed.window) == (False, True, 1024)
    assert (full.scale, windowed.scale, full.value_norm, full.qk_norm) == (1, 1, True, True)
    assert (config.rope.type, config.rope.theta) == ("proportional", 1e6)
    assert (config.window_rope.type, config.window_rope.theta) == ("default", 1e4)
    assert (config.logit_cap, config.positions, config.tied) == (30.0, 262144, True)
    assert all(spec.output_scale for spec in config.layers)
    around = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": PUBLISHED}
    assert from_hf(around, {}) == config
    text = PUBLISHED | {"model_type": "gemma4_unified_text"}
    del text["hidden_size_per_layer_input"]
    around = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": text}
    assert from_hf(around, {}).layers == config.layers


def test_published_configs_of_the_small_models() -> None:
    config = from_hf(RECENT["gemma4-e2b"], {})
    assert config.kv_reusing_layers == tuple(range(15, 35))
    sharing = [i for i, spec in enumerate(config.layers) if spec.mixer.shares_kv]
    assert sharing == [13, 14]
    assert [config.layers[i].mixer.window for i in sharing] == [512, None]
    assert [config.layers[i].mlp.width for i in (14, 15)] == [6144, 12288]
    assert (config.kv_layers, config.per_layer_columns) == (tuple(range(4, 35, 5)), 35 * 256)
    assert config.layers[34].mixer.shapes(1536)["qkv"] == (8 * 512, 1536)
    larger = from_hf(RECENT["gemma4-e4b"], {})
    assert larger.kv_reusing_layers == tuple(range(24, 42))
    assert {spec.mlp.width for spec in larger.layers} == {10240}


def test_configs_of_both_versions_say_the_same() -> None:
    layer = {"head_dim": 512, "num_key_value_heads": 4}
    newer = PUBLISHED | {"per_layer_config": {str(index): layer for index in FULL}}
    del newer["num_global_key_value_heads"]
    assert from_hf(newer, {}) == from_hf(PUBLISHED, {})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input"),
        (
            {"hidden_size_per_layer_input": 256, "hidden_activation": "silu"},
            "hidden_size_per_layer_input .* 'gelu_pytorch_tanh' alone",
        ),
        ({"num_kv_shared_layers": 55}, "leaves no layer of each kind"),
        ({"num_kv_shared_layers": 61}, "leaves no layer of each kind"),
        ({"num_kv_shared_layers": 5, "use_double_wide_mlp": 1}, "use_double_wide_mlp"),
        ({"enable_moe_block": True}, "num_experts"),
        ({"num_experts": 128}, "num_experts"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"layer_types": ["sliding_attention"] * 60}, "a window in the last layer"),
        ({"global_head_dim": "x"}, "global_head_dim"),
        ({"num_global_key_value_heads": 5}, "32 attention heads cannot share 5"),
        ({"final_logit_softcapping": [30]}, "final_logit_softcapping"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v"),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config"),
        ({"per_layer_config": {str(i): {"window": 1} for i in FULL}}, "per_layer_config"),
        ({"per_layer_config": {str(i): {"head_dim": i} for i in FULL}}, "per_layer_config"),
        ({"per_layer_config": [1]}, "per_layer_config"),
    ],
)
def test_what_is_not_computed_is_named(change: dict, named: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        from_hf(PUBLISHED | change, {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theirs", [modeling_gemma4.Gemma4RMSNorm, modeling_olmo2.Olmo2RMSNorm])
def test_norms_round_where_transformers_does(theirs: type, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = theirs(64, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight, 3.0, 2.0)
    hidden = torch.randn(50, 64).to(dtype)
    ours = Norm(NormKind.RMS_FLOAT32, 1e-6)
    assert torch.equal(ours(hidden, norm.weight), norm(hidden))
    assert not torch.equal(Norm(NormKind.RMS, 1e-6)(hidden, norm.weight), norm(hidden))


def test_caps_of_logits_are_applied(tmp_path: Path) -> None:
    """Probabilities, which an arg-max does not show."""
    model, prompt = make_model("gemma4", tmp_path), random_ids(40)
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    with Engine.from_pretrained(tmp_path, device="cpu", max_context=64) as engine:
        result = engine.generate(prompt, greedy(1, logprobs=5))
    for token, logprob in result.logprobs[0].likeliest:
        assert abs(logprob - theirs[token]) < 1e-4


def test_a_drafter_whose_layers_differ_is_refused(tiny) -> None:
    path, _ = tiny("gemma4")
    with pytest.raises(UnsupportedModelError, match="cannot draft as a model of its own"):
        Engine.from_pretrained(path, device="cpu", draft=path)


@pytest.mark.parametrize("family", ["gemma4", "gemma4-unified", "gemma4-small"])
def test_a_gguf_file_is_the_model(tmp_path: Path, family: str) -> None:
    model, prompt = make_model(family, tmp_path), random_ids(60)
    write_gguf(model, tmp_path / "m.gguf")
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)
    ours = _of_file(tmp_path, prompt)
    assert_equal_but_for_ties(model, prompt, ours, theirs[0, 60:].tolist())
    write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    assert _of_file(tmp_path, prompt, weights="stored") == _of_file(tmp_path, prompt)


def _of_file(directory: Path, prompt: list[int], **options: object) -> list[int]:
    kept = {"max_context": 100, "block_tokens": 16, "placement": PLACEMENTS["kv"]}
    with Engine.from_pretrained(directory / "m.gguf", device="cpu", **kept, **options) as engine:
        return engine.generate(prompt, greedy(30)).token_ids


def test_a_gguf_file_without_frequencies_or_patterns_is_refused(tmp_path: Path) -> None:
    model, path = make_model("gemma4", tmp_path), tmp_path / "m.gguf"
    write_gguf(model, path)
    reader = gguf.GGUFReader(path)
    for dropped in (
        *("rope_freqs.weight", "gemma4.attention.sliding_window_pattern"),
        "gemma4.attention.head_count_kv",
    ):
        copied = tmp_path / "copy.gguf"
        writer = gguf.GGUFWriter(copied, "gemma4")
        for name, field in reader.fields.items():
            if name != dropped and not name.startswith(("GGUF.", "general.architecture")):
                kinds = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(name, field.contents(), field.types[0], kinds)
        for tensor in reader.tensors:
            if tensor.name != dropped:
                writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(CheckpointError, match=dropped.removeprefix("gemma4.")):
            Engine.from_pretrained(copied, device="cpu")


@pytest.mark.parametrize("more", [0, 32])
def test_widths_of_layers_may_be_given_one_by_one(tmp_path: Path, monkeypatch, more: int) -> None:
    model, write = make_model("gemma4", tmp_path), gguf.GGUFWriter.add_feed_forward_length
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_feed_forward_length",
        lambda self, width: write(self, [width, width, width + more]),
    )
    write_gguf(model, tmp_path / "m.gguf")
    if not more:
        assert _of_file(tmp_path, random_ids(60))
        return
    with pytest.raises(UnsupportedModelError, match="feed_forward_length of 96 to 128 by layer"):
        _of_file(tmp_path, random_ids(60))


def _metadata(merges: list[str]) -> dict:
    letters = ["<unk>", "<bos>", *"▁helo wrd", "he", "ll", "hell", "hello", "▁w", "<0x21>"]
    tokens = [token for token in letters if token != " "]
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": SimpleNamespace(values=tokens),
        "tokenizer.ggml.merges": SimpleNamespace(values=merges),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
    }


def test_listed_merges_are_those_of_the_tokenizer() -> None:
    """In the order of the list: "ll" before "he", and no "▁w"."""
    metadata = _metadata(["l l", "h e", "he ll", "hell o"])
    assert is_known(metadata)
    ours = SentencePieceTokenizer(metadata)
    tokens = metadata["tokenizer.ggml.tokens"].values
    named = [tokens[token] for token in ours.encode("hello world!")]
    assert named == ["<bos>", "hello", "▁", "w", "o", "r", "l", "d", "<0x21>"]
    assert ours.decode(ours.encode("hello world!")) == "hello world!"
    assert isinstance(ours.tokenizer, Tokenizer)
    assert isinstance(ours.tokenizer.model, models.BPE)


def test_a_merge_of_three_is_refused() -> None:
    with pytest.raises(ValueError, match="a merge of 3 tokens"):
        SentencePieceTokenizer(_metadata(["h e l"]))


def test_saved_configs_are_read_again(tiny) -> None:
    """transformers writes the layers' own fields by layer."""
    path, model = tiny("gemma4")
    raw = json.loads((path / "config.json").read_text())
    assert "per_layer_config" in raw
    assert "global_head_dim" not in raw
    full = model.config.per_layer_config["full_attention"]
    assert from_hf(raw, {}).attention.head_dim == full.head_dim == 32
