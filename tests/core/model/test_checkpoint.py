"""Loading: every container gives the same model; what is missing or wrong is named."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from helpers import BLOCK, make_model, random_ids
from safetensors.torch import load_file, save_file

from triforce_core import Engine, SamplingParams
from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_core.model.known.shapes import read_model
from triforce_offload.errors import CheckpointError, UnsupportedModelError, UsageError

PROMPT, NEW = random_ids(40), 30
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0)


def generate(path: Path, **options: object) -> list[int]:
    with Engine.from_pretrained(
        path, device="cpu", max_context=80, block_tokens=BLOCK, **options
    ) as engine:
        return engine.generate(PROMPT, GREEDY).token_ids


def reference(model: torch.nn.Module) -> list[int]:
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


def test_shards_with_an_index(tmp_path) -> None:
    model = make_model("llama", tmp_path)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 2
    assert generate(tmp_path / "sharded") == reference(model)


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "llama-bias", "llama-tied", "qwen2", "qwen3", "seed-oss", "olmo2", "exaone4"),
        *("granite", "glm4", "phi3", "phi3-partial", "ernie4_5", "qwen3_5", "lfm2", "lfm2-bias"),
        *("granite4-h", "granite4-h-moe", "nemotron_h-moe", "nemotron_h-latent-moe", "lfm2-moe"),
        *("deepseek_v2-moe", "deepseek_v3-moe", "glm4_lite-moe", "mistral4-moe", "ministral3"),
        "afmoe-moe",
    ],
)
def test_gguf_of_every_architecture(tiny, tmp_path, family: str) -> None:
    _, model = tiny(family)
    write_gguf(model, tmp_path / "m.gguf")
    assert generate(tmp_path / "m.gguf") == reference(model)


def test_gguf_of_mistral_small_3_in_newer_files(tiny, tmp_path, monkeypatch) -> None:
    """Since Ministral 3, llama.cpp's converter writes both as one architecture."""
    monkeypatch.setitem(gguf_files._RENAMED, "llama", "mistral3")
    _, model = tiny("llama")
    write_gguf(model, tmp_path / "m.gguf")
    assert generate(tmp_path / "m.gguf") == reference(model)


def test_gguf_of_lfm2_as_ollama_names_its_last_norm(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(gguf.TENSOR_NAMES, gguf.MODEL_TENSOR.TOKEN_EMBD_NORM, "output_norm")
    _, model = tiny("lfm2-moe")
    write_gguf(model, tmp_path / "m.gguf")
    assert generate(tmp_path / "m.gguf") == reference(model)


def test_gguf_of_nemotron_with_a_head_that_only_drafts(tiny, tmp_path) -> None:
    """As converters write Nemotron 3.5: the head is one more block, with attention and experts."""
    _, model = tiny("nemotron_h-moe")

    def describe(writer: gguf.GGUFWriter) -> None:
        held, name = writer.kv_data[0], "nemotron_h_moe."
        held[f"{name}block_count"].value += 1
        held[f"{name}attention.head_count_kv"].value += [2]
        held[f"{name}feed_forward_length"].value += [40]
        writer.add_nextn_predict_layers(1)

    extra = {"blk.5.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}
    write_gguf(model, tmp_path / "m.gguf", describe=describe, extra=extra)
    assert generate(tmp_path / "m.gguf") == reference(model)


@pytest.mark.parametrize(
    ("family", "field", "value", "named"),
    [
        ("granite4-h", "attention.scale", None, "attention.scale is missing"),
        ("granite4-h", "ssm.time_step_rank", 0, "ssm.time_step_rank"),
        ("nemotron_h-moe", "feed_forward_length", [0, 40], "feed_forward_length must give"),
        ("nemotron_h-moe", "feed_forward_length", [[0]], "feed_forward_length must"),
        ("nemotron_h-moe", "nextn_predict_layers", "x", "nextn_predict_layers"),
        ("nemotron_h-moe", "attention.head_count_kv", [0, 0], "attention.head_count_kv"),
        ("nemotron_h-latent-moe", "moe_latent_size", "x", "moe_latent_size"),
        ("nemotron_h-latent-moe", "moe_latent_size", 8, "ffn_latent_down"),
        ("lfm2-moe", "expert_gating_func", 1, "expert_gating_func 1 is not supported"),
        ("lfm2-moe", "shortconv.l_cache", 1, "conv_L_cache must be a number from 2 on"),
    ],
)
def test_fields_of_recurrent_files_that_cannot_be_are_named(
    tiny, tmp_path, family: str, field: str, value: object, named: str
) -> None:
    architectures = {"granite4-h": "granitehybrid", "lfm2-moe": "lfm2moe"}
    architecture = architectures.get(family, "nemotron_h_moe")

    def describe(writer: gguf.GGUFWriter) -> None:
        finish = writer.write_header_to_file

        def changed() -> None:
            held, name = writer.kv_data[0], f"{architecture}.{field}"
            held.pop(name, None)
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            elif value is not None:
                writer.add_uint32(name, value)
            finish()

        writer.write_header_to_file = changed

    write_gguf(tiny(family)[1], tmp_path / "m.gguf", describe=describe)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        open_checkpoint(tmp_path / "m.gguf").close()


def test_files_of_nemotron_hold_no_block_behind_the_others(tiny, tmp_path) -> None:
    """Blocks are numbered otherwise than layers: the third of three is block 3 and 4."""
    path, _ = tiny("nemotron_h-moe")
    shutil.copytree(path, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    held, bias = load_file(file), "backbone.layers.3.mixer.in_proj.bias"
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    save_file(held | {"backbone.layers.5.norm.weight": torch.ones(64)}, file)
    open_checkpoint(tmp_path / "m").close()
    save_file(held | {bias: torch.ones(6)}, file)
    with pytest.raises(UnsupportedModelError, match=bias):
        open_checkpoint(tmp_path / "m").close()


@pytest.mark.parametrize(
    ("family", "more", "named"),
    [
        ("glm4", {"glm4.rope.dimension_sections": [2, 3, 3, 0]}, "rope.dimension_sections"),
        ("phi3", {}, "rope factors of longrope"),
    ],
)
def test_gguf_files_that_would_be_computed_wrongly_are_refused(
    tiny, tmp_path, family: str, more: dict, named: str
) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        for name, value in more.items():
            writer.add_array(name, value)

    extra = {} if more else {"rope_factors_long.weight": np.ones(8, np.float32)}
    write_gguf(tiny(family)[1], tmp_path / "m.gguf", describe=describe, extra=extra)
    with pytest.raises(UnsupportedModelError, match=named):
        open_checkpoint(tmp_path / "m.gguf")


def test_gguf_with_capped_logits_is_refused_in_families_without_a_cap(tiny, tmp_path) -> None:
    named = {"llama__final_logit_softcapping": 30}
    write_gguf(tiny("llama")[1], tmp_path / "m.gguf", **named)
    with pytest.raises(UnsupportedModelError, match=r"final_logit_softcapping \(30\) is not"):
        open_checkpoint(tmp_path / "m.gguf")


def test_gguf_of_layers_that_do_not_rotate(tmp_path) -> None:
    """Such files do not say which layers: in llama.cpp it is every fourth."""
    layers = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}
    model = make_model("smollm3", tmp_path, **layers)
    write_gguf(model, tmp_path / "m.gguf")
    assert generate(tmp_path / "m.gguf") == reference(model)


@pytest.mark.parametrize(
    ("layers", "more"),
    [
        (7, {"query_pre_attn_scalar": 16}),
        # As in Gemma 3 27B, which llama.cpp knows by its number of layers.
        (62, {"query_pre_attn_scalar": 64 // 4, "head_dim": 24}),
    ],
)
def test_gguf_of_layers_with_windows(tmp_path, layers: int, more: dict) -> None:
    """Such files do not say which layers: in llama.cpp it is all but every sixth."""
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)]
    named = {"num_hidden_layers": layers, "layer_types": kinds, "tie_word_embeddings": True}
    model = make_model("gemma3", tmp_path, **named, **more)
    write_gguf(model, tmp_path / "m.gguf")
    assert generate(tmp_path / "m.gguf") == reference(model)


@pytest.mark.parametrize(
    ("layers", "more"),
    [
        (5, {"query_pre_attn_scalar": 16}),
        # As in Gemma 2 27B, which llama.cpp knows by its number of layers.
        (46, {"query_pre_attn_scalar": 64 // 4, "head_dim": 24}),
    ],
)
def test_gguf_of_layers_that_cap_scores(tmp_path, layers: int, more: dict) -> None:
    """These files do not say which layers have windows: in llama.cpp the first, the third, ..."""
    named = {"num_hidden_layers": layers, "tie_word_embeddings": True}
    model = make_model("gemma2", tmp_path, **named, **more)
    write_gguf(model, tmp_path / "m.gguf")
    assert generate(tmp_path / "m.gguf") == reference(model)


def test_the_first_files_of_gemma_2_say_neither_caps_nor_windows(tmp_path, monkeypatch) -> None:
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"):
        monkeypatch.setattr(gguf.GGUFWriter, f"add_{name}", lambda self, value: None)
    model = make_model("gemma2", tmp_path, tie_word_embeddings=True)
    write_gguf(model, tmp_path / "m.gguf")
    with closing(open_checkpoint(tmp_path / "m.gguf")) as checkpoint:
        config = checkpoint.config
    assert [layer.mixer.window for layer in config.layers] == [4096, None, 4096]
    assert {layer.mixer.score_cap for layer in config.layers} == {50.0}
    assert config.logit_cap == 30.0


def test_gguf_of_layers_side_by_side(tmp_path) -> None:
    """Layer norms, a scale of logits, and windows in all but every fourth layer."""
    kinds = [*["sliding_attention"] * 3, "full_attention"]
    named = {"num_hidden_layers": 4, "layer_types": kinds, "tie_word_embeddings": True}
    model = make_model("cohere2", tmp_path, **named)
    write_gguf(model, tmp_path / "m.gguf")
    assert generate(tmp_path / "m.gguf") == reference(model)


@pytest.mark.parametrize("pattern", [3, [True, True, False]])
def test_gguf_may_say_which_layers_have_windows(tiny, tmp_path, monkeypatch, pattern) -> None:
    _, model = tiny("gemma3")
    write = gguf.GGUFWriter.add_sliding_window_pattern
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_sliding_window_pattern", lambda self, _: write(self, pattern)
    )
    write_gguf(model, tmp_path / "m.gguf")
    found = open_checkpoint(tmp_path / "m.gguf")
    found.close()
    assert [spec.mixer.window for spec in found.config.layers] == [24, 24, None]


def test_weights_of_norms_are_stored_with_one_more(tiny, tmp_path) -> None:
    _, model = tiny("gemma3")
    write_gguf(model, tmp_path / "m.gguf")
    theirs = model.model.norm.weight
    for dtype in (torch.float32, torch.bfloat16):
        read = torch.empty(theirs.shape, dtype=dtype)
        checkpoint = open_checkpoint(tmp_path / "m.gguf")
        checkpoint.read("norm", read)
        checkpoint.close()
        assert torch.equal(read, ((theirs + 1) - 1).to(dtype))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_gguf_equals_the_dequantised_model(tiny, tmp_path, kind: str) -> None:
    _, model = tiny("llama")
    kind = gguf.GGMLQuantizationType[kind]
    write_gguf(model, tmp_path / "m.gguf", kind)
    rounded = make_model("llama", tmp_path / "twin")
    block = gguf.GGML_QUANT_SIZES[kind][0]
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.dim() > 1 and parameter.shape[-1] % block == 0:
                # Blocks run along rows, so that permuting rows before or after is the same.
                packed = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind).copy()))
    assert generate(tmp_path / "m.gguf") == reference(rounded)


def test_gguf_frequency_factors_are_llama3_scaling(tiny, tmp_path) -> None:
    _, model = tiny("llama3-rope")
    scaled = model.model.rotary_emb.inv_freq
    dim = scaled.numel() * 2
    plain = 1.0 / (5e5 ** (torch.arange(0, dim, 2).float() / dim))
    factors = {"rope_freqs.weight": (plain / scaled).numpy()}
    write_gguf(model, tmp_path / "m.gguf", extra=factors)
    assert generate(tmp_path / "m.gguf") == reference(model)


def edit_config(directory: Path, **change: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))


@pytest.fixture
def copied(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny("llama")[0], tmp_path / "model"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 4}, "last of the 4 layers"),
        ({"num_hidden_layers": 9999}, "last of the 9999 layers"),
        ({"num_hidden_layers": 2}, r"model\.layers\.2\."),
        ({"vocab_size": 98}, r"shape \[97, 64\], its config says \[98, 64\]"),
        ({"num_key_value_heads": 4}, "k_proj"),
        ({"attention_bias": True}, r"lacks model\.layers\.0\.self_attn\.\w_proj\.bias"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"vocab_size": 1 << 39}, "embed_tokens"),
        ({"head_dim": 1 << 30}, "head_dim"),
    ],
)
def test_a_config_that_does_not_match_is_named_before_loading(copied, change, named) -> None:
    edit_config(copied, **change)
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(copied)


def test_a_tensor_that_is_missing_or_unknown_is_named(copied) -> None:
    file = copied / "model.safetensors"
    tensors = load_file(file)
    gone = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.up_proj"):
        open_checkpoint(copied)
    tensors["model.layers.1.mlp.up_proj.weight"] = gone
    tensors["model.layers.0.mlp.experts.0.weight"] = gone.clone()
    save_file(tensors, file)
    with pytest.raises(UnsupportedModelError, match=r"experts\.0\.weight"):
        open_checkpoint(copied)


def test_a_tensor_type_that_is_not_supported_is_named(copied) -> None:
    file = copied / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, file)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is I8"):
        open_checkpoint(copied)


def test_what_is_not_there(tmp_path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        Engine.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no model: it has no config\.json"):
        Engine.from_pretrained(tmp_path)
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(b"x")
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"x")
    for read in (open_checkpoint, lambda path: read_model(str(path))):
        with pytest.raises(CheckpointError, match=r"m-00001-of-00002\.gguf is a model"):
            read(tmp_path)
    config = tmp_path / "config.json"
    for text, said in (("{}", "a config that names no architecture"), ('{"model_type": "x"}', "x")):
        config.write_text(text)
        for read in (open_checkpoint, lambda path: read_model(str(path))):
            with pytest.raises(UnsupportedModelError, match=rf"{config}: .*{said}"):
                read(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"neither a directory nor a \.gguf file"):
        Engine.from_pretrained(tmp_path / "model.bin")


def test_weights_are_never_twice_in_memory(tiny, tmp_path, monkeypatch) -> None:
    """Each piece is dequantised in small chunks, straight into the buffer where it will live."""
    _, model = tiny("llama")
    write_gguf(model, tmp_path / "m.gguf", gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setattr("triforce_offload.checkpoint.gguf._CHUNK_ELEMENTS", 256)
    sizes = []
    original = gguf.quants.dequantize

    def spy(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        values = original(raw, kind)
        sizes.append(values.size)
        return values

    monkeypatch.setattr("triforce_offload.checkpoint.gguf.dequantize", spy)
    tokens = generate(tmp_path / "m.gguf")
    assert len(tokens) == NEW
    # A head's rows are one step where q and k are permuted: 16 rows of 64.
    assert max(sizes) <= 16 * 64


def test_weights_of_another_format_are_named(tmp_path) -> None:
    make_model("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not read"):
        Engine.from_pretrained(tmp_path)
