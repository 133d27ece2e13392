"""Mixtures of experts out of every kind of file: stacked or one by one, GGUF, FP8."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from fp8_files import quantise as to_fp8
from gguf_files import write_gguf
from helpers import BLOCK, PLACEMENTS, make_model, placed, random_ids
from oracle import assert_equal_but_for_ties
from safetensors.torch import load_file, save_file
from tiny_families import WITH_EXPERTS

from triforce_core import Engine, SamplingParams
from triforce_core.model.checkpoints.naming.names import gguf_names, hf_names
from triforce_core.model.families.hf import from_hf
from triforce_core.model.feed_forward import Experts, Router, Scores
from triforce_offload.errors import CheckpointError, UnsupportedModelError

PROMPT, NEW = random_ids(60), 24
GREEDY = SamplingParams(NEW, temperature=0)
# Families that are read from safetensors only.
NOT_IN_GGUF = ("solar_open-moe", "dots1-moe", "mellum-moe", "exaone_moe-moe", "hy_v3-moe")
NOT_IN_GGUF += ("flex_olmo-moe",)


def engine(path: Path, **options: object) -> Engine:
    common = {"device": "cpu", "max_context": 120, "block_tokens": BLOCK}
    return Engine.from_pretrained(path, **common | options)


def stacked(directory: Path) -> None:
    """Rewrites a model whose experts are published one by one: all of a layer in two tensors."""
    file, made = directory / "model.safetensors", {}
    experts: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    for name, tensor in load_file(file).items():
        found = re.match(
            r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight", name
        )
        if found:
            part = {"w1": "gate", "w2": "down", "w3": "up"}.get(found[3], found[3][:-5])
            experts.setdefault(found[1], {})[part, int(found[2])] = tensor
        else:
            made[name] = tensor
    for prefix, tensors in experts.items():
        count = len(tensors) // 3
        both = [torch.cat((tensors["gate", i], tensors["up", i])) for i in range(count)]
        made[f"{prefix}.gate_up_proj"] = torch.stack(both)
        made[f"{prefix}.down_proj"] = torch.stack([tensors["down", i] for i in range(count)])
    save_file(made, file, {"format": "pt"})


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", "lfm2-moe"])
def test_experts_in_stacked_tensors_are_the_same(tiny, tmp_path, family: str) -> None:
    make_model(family, tmp_path)
    texts = []
    for again in (False, True):
        if again:
            stacked(tmp_path)
            held = load_file(tmp_path / "model.safetensors")
            assert not any(".experts.0." in name for name in held)
        with engine(tmp_path, placement=PLACEMENTS["weights"], method="autoregressive") as running:
            texts.append(running.generate(PROMPT, GREEDY).token_ids)
    assert texts[0] == texts[1]


def test_lfm2_without_a_bias_and_with_another_scale(tmp_path) -> None:
    """As its config allows and no published model has it."""
    switches = {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5}
    model = make_model("lfm2-moe", tmp_path, num_dense_layers=0, **switches)
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    with engine(tmp_path) as running:
        ours = running.generate(PROMPT, GREEDY).token_ids
    assert_equal_but_for_ties(model, PROMPT, ours, theirs[0, len(PROMPT) :].tolist())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("weights", ["dense", "stored"])
@pytest.mark.parametrize("family", [name for name in WITH_EXPERTS if name not in NOT_IN_GGUF])
def test_a_gguf_file_is_the_model(tmp_path, family: str, weights: str) -> None:
    """llama.cpp knows no dense layers between those with experts, except the first."""
    own = family in ("qwen3_moe", "qwen3_next-moe")
    overrides = {"mlp_only_layers": []} if own else {}
    model = make_model(family, tmp_path, **overrides)
    kind = gguf.GGMLQuantizationType.F32
    if weights == "stored":
        kind = gguf.GGMLQuantizationType.Q8_0
    if family == "gpt-oss-moe":
        # The model has numbers that MXFP4 holds.
        kind = gguf.GGMLQuantizationType.MXFP4
    write_gguf(model, tmp_path / "m.gguf", kind)
    with engine(tmp_path / "m.gguf", weights="dense", method="autoregressive") as plain:
        expected = plain.generate(PROMPT, GREEDY).token_ids
    if weights == "dense":
        theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
        assert_equal_but_for_ties(model, PROMPT, expected, theirs[0, len(PROMPT) :].tolist())
        return
    options = {"weights": "stored", "budget": 32, "draft_tokens": 4, "draft": "none"}
    for placement in ("weights-one-slot", "both", "int4"):
        if family == "gpt-oss-moe" and placement == "int4":
            # Copies would be no smaller.
            continue
        with engine(tmp_path / "m.gguf", **placed(placement, options)) as running:
            assert running.generate(PROMPT, GREEDY).token_ids == expected


def test_types_of_gate_and_up_projections_may_differ(tmp_path) -> None:
    """Then an expert's rows are in two formats."""
    model = make_model("mixtral", tmp_path)
    file = tmp_path / "m.gguf"
    write_gguf(model, file, gguf.GGMLQuantizationType.Q4_0, larger=gguf.GGMLQuantizationType.Q8_0)
    with engine(file, weights="dense", method="autoregressive") as plain:
        expected = plain.generate(PROMPT, GREEDY).token_ids
    options = {"weights": "stored", "method": "autoregressive"}
    with engine(file, placement=PLACEMENTS["weights"], **options) as running:
        assert running.generate(PROMPT, GREEDY).token_ids == expected


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "qwen3_next-moe"])
def test_experts_in_fp8_are_those_of_the_dequantised_model(tmp_path, family: str) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "moe_intermediate_size": 128}
    if family == "qwen3_next-moe":
        # All that a key head has in the joint projection are whole scales.
        sizes |= {"linear_key_head_dim": 128, "linear_num_value_heads": 4}
        sizes |= {"linear_value_head_dim": 64, "shared_expert_intermediate_size": 128}
    model = make_model(family, tmp_path, head_dim=64, num_key_value_heads=1, **sizes)
    to_fp8(tmp_path, model)
    texts = []
    for weights in ("dense", "stored"):
        with engine(tmp_path, weights=weights, placement=PLACEMENTS["weights"], budget=None) as e:
            texts.append(e.generate(PROMPT, GREEDY).token_ids)
    assert texts[0] == texts[1]
    with engine(tmp_path, weights="stored", placement=PLACEMENTS["int4"], budget=32) as drafting:
        result = drafting.generate(PROMPT, GREEDY)
    assert result.token_ids == texts[0]
    assert "retrieval" in result.stats["levels"]


def test_the_first_gguf_files_of_qwen3_next_are_read(tmp_path) -> None:
    """Of a key head they have queries, keys, values and gates side by side, as safetensors do."""
    make_model("qwen3_next-moe", tmp_path)
    config = from_hf(json.loads((tmp_path / "config.json").read_text()), {})
    ours = hf_names(config, {"model.layers.0.mlp.experts.0.up_proj.weight"})("layers.0.qkv")
    first = gguf_names(config, {"blk.0.ssm_in.weight"})("layers.0.qkv")
    stored = {"linear_attn.in_proj_qkvz": "ssm_in", "linear_attn.in_proj_ba": "ssm_ba"}
    for our, their in zip(ours, first, strict=True):
        name = our.name.removeprefix("model.layers.0.").removesuffix(".weight")
        assert their == replace(our, name=f"blk.0.{stored[name]}.weight")


def test_minimax_is_rotated_in_part_as_its_first_configs_say() -> None:
    named = {"model_type": "minimax_m2", "head_dim": 32, "num_experts_per_tok": 2}
    config = from_hf(CONFIG | named | {"rotary_dim": 8, "num_local_experts": 8}, {})
    assert config.rope.rotated(32) == 8
    assert config.layers[0].mlp.router == Router(Scores.SIGMOID, biased=True)


@pytest.mark.parametrize("placement", ["resident", "kv", "weights-one-slot", "both"])
def test_experts_in_mxfp4_are_kept_as_published(tmp_path, placement: str) -> None:
    model = make_model("gpt-oss-moe", tmp_path)
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False)
    options = {"weights": "stored", "budget": 32, "draft_tokens": 4, "draft": "ngram"}
    with engine(tmp_path, **placed(placement, options)) as running:
        result = running.generate(PROMPT, GREEDY)
        layer = running.runtime.weights.layouts[0]
    assert_equal_but_for_ties(model, PROMPT, result.token_ids, theirs[0, len(PROMPT) :].tolist())
    assert layer.formats["experts_down"].nbytes == 8 * 64 * 96 * 17 // 32


CONFIG = {
    "model_type": "glm4_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "n_routed_experts": 8,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"n_group": 3}, "1 of 3 groups of 8 experts"),
        ({"n_group": 4, "topk_group": 2, "num_experts_per_tok": 5}, "5 experts cannot be chosen"),
        ({"n_routed_experts": "eight"}, "n_routed_experts"),
        ({"routed_scaling_factor": None}, None),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv"),
        ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, "swiglu_limit"),
        ({"model_type": "minimax_m2", "attn_type_list": [0, 1, 1, 1]}, "attn_type_list"),
        ({"model_type": "minimax_m2", "shared_intermediate_size": 64}, "shared_intermediate_size"),
        ({"model_type": "laguna", "gating": "per-element"}, "gating 'per-element'"),
        ({"model_type": "laguna", "moe_router_logit_softcapping": 2.0}, "softcapping 2.0"),
        ({"model_type": "laguna", "num_attention_heads_per_layer": [4]}, "must be a list of 4"),
        ({"model_type": "laguna", "num_attention_heads_per_layer": [4, 3, 4, 4]}, "3 attention"),
        ({"model_type": "afmoe", "score_func": "softmax"}, "score_func 'softmax'"),
        ({"model_type": "afmoe", "route_norm": False}, "route_norm False"),
        ({"model_type": "solar_open", "use_qk_norm": True}, "use_qk_norm True"),
        ({"model_type": "laguna", "mlp_layer_types": ["mixed"] * 4}, "names 'mixed'"),
    ],
)
def test_impossible_experts_are_named(change: dict, named: str | None) -> None:
    if named is None:
        from_hf(CONFIG | change, {})
        return
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        from_hf(CONFIG | change, {})


def test_what_reads_experts_knows_their_layers() -> None:
    config = from_hf(CONFIG, {})
    dense, *sparse = (spec.mlp for spec in config.layers)
    assert dense.active == 0
    assert all(mlp.active == 8 and mlp.shared == mlp.width for mlp in sparse)
    qwen = {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = from_hf(CONFIG | qwen, {})
    assert [spec.mlp.active > 0 for spec in config.layers] == [False, True, False, False]


def test_layers_that_only_draft_are_left_out(tmp_path) -> None:
    """GLM-4.5 is published with one behind the others."""
    make_model("glm4_moe", tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors, file, {"format": "pt"})
    raw = json.loads(config.read_text())
    config.write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UnsupportedModelError, match=r"layers\.3\.eh_proj"):
        engine(tmp_path)
    config.write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    with engine(tmp_path) as running:
        assert len(running.generate(PROMPT, GREEDY).token_ids) == NEW


def test_how_many_experts_rows_choose() -> None:
    """Independent choices, counted."""
    mlp = Experts(16, 3, 8, Router())
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(4000, 5, 16, generator=generator).topk(3).indices.flatten(1)
    counted = sum(len(set(each)) for each in rows.tolist()) / len(rows)
    assert mlp.distinct(5) == pytest.approx(counted, rel=0.01)
    assert mlp.distinct(1) == pytest.approx(3)


def test_a_missing_expert_is_named(tmp_path) -> None:
    make_model("qwen3_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    save_file({key: tensor for key, tensor in load_file(file).items() if key != name}, file)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        engine(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe"
