"""Files of DFlash drafters: those that are read, and those that are refused, in a sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import gguf
import pytest
import torch
from dflash_files import KINDS, Made, RandomDrafter
from drafter_engines import DIRECT, assert_close, engine
from float_bounds import assert_within
from fp8_files import FP8_SIZES, quantise
from head_walks import walk
from helpers import make_model, random_ids
from integer_files import to_integers
from oracle import greedy
from safetensors.torch import load_file, save_file

from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.distributions import MOST_LOGIT
from triforce_offload.errors import CheckpointError, UnsupportedModelError, UsageError


@pytest.mark.parametrize("stored", [quantise, partial(to_integers, way="awq"), "gptq"])
def test_quantised_safetensors_are_read(tmp_path, stored) -> None:
    model = make_model("llama", tmp_path / "model", **FP8_SIZES)
    wide = replace(KINDS["second"], heads=2, head_dim=64, wide=256, rank=128, group=8)
    made = RandomDrafter(model, tmp_path / "drafter", wide)
    if stored == "gptq":
        to_integers(made.directory, made, "gptq")
        file = made.directory / "model.safetensors"
        held = load_file(file)
        rows = {name: each.shape[1] for name, each in held.items() if name.endswith(".qweight")}
        # Of zeros, as GPTQ writes beside every matrix.
        biases = {f"{name[:-8]}.bias": torch.zeros(count) for name, count in rows.items()}
        save_file(held | biases, file, metadata={"format": "pt"})
    else:
        stored(made.directory, made)
    with engine(tmp_path / "model", "kv", draft=made.directory, **DIRECT) as ours:
        for drafter, text in walk(ours):
            found = drafter.forward(drafter.catch_up(Text(text), 5))[0]
            exact = made.logits(text, [])
            known = (found > -MOST_LOGIT) & exact.isfinite()
            # The last of the candidates may be others.
            assert known.sum() >= made.made.best - 1
            bound = 0.02 * float(exact[known].abs().max())
            assert_within(found[known], exact[known], bound)


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0", "F16"])
@pytest.mark.parametrize("kind", ["first", "second"])
def test_files_of_llama_cpp_are_read(llama, tmp_path, kind: str, stored: str) -> None:
    """Their numbers are kept as they are stored."""
    path, model = llama
    made = RandomDrafter(model, tmp_path / "drafter", replace(KINDS[kind], rank=32, wide=96))
    file = made.write_gguf(tmp_path / "d.gguf", gguf.GGMLQuantizationType[stored])
    with engine(path, "kv", draft=file, **DIRECT) as ours:
        small = ours.models.small
        kinds = small.store.layouts[0].decoded()
        assert {part.block_type.name for part in kinds} == {stored}
        for drafter, text in walk(ours):
            found = drafter.forward(drafter.catch_up(Text(text), 5))[0]
            assert_close(found, made.logits(text, []), 2e-3)
        prompt = random_ids(30)
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)
        assert ours.generate(prompt, greedy(9)).token_ids == theirs[0, 30:].tolist()


def test_other_drafters_in_gguf_are_refused_in_a_sentence(llama, tmp_path) -> None:
    path, model = llama
    made = RandomDrafter(model, tmp_path / "drafter", Made())
    made.tensors["markov_w1.weight"] = torch.ones(97, 32)
    file = made.write_gguf(tmp_path / "d.gguf", gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(UnsupportedModelError, match=r"markov_w1\.weight, which is not known"):
        engine(path, draft=file, **DIRECT)


DAMAGED = {
    "target_layers must be a list of whole": ("target_layers", ["a", "b"]),
    "dflash.block_size is missing": ("block_size", None),
    "target_layers is missing": ("target_layers", None),
    "attention.value_scale 0.5 is not supported": ("attention.value_scale", 0.5),
    "sample_from_anchor True is not supported": ("sample_from_anchor", True),
    "hidden_act 'gelu'": ("hidden_activation", "gelu"),
    "head_count must be one number, got a list": ("attention.head_count", [4, 4]),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_fields_of_gguf_are_refused_by_name(llama, tmp_path, message: str) -> None:
    path, model = llama
    made = RandomDrafter(model, tmp_path / "drafter", Made())
    kind = gguf.GGMLQuantizationType.Q8_0
    file = made.write_gguf(tmp_path / "d.gguf", kind, dict([DAMAGED[message]]))
    with pytest.raises(CheckpointError, match=re.escape(message)) as refused:
        engine(path, draft=file, **DIRECT)
    assert str(file) in str(refused.value)


def test_rope_factors_in_gguf_are_refused(llama, tmp_path) -> None:
    path, model = llama
    made = RandomDrafter(model, tmp_path / "drafter", Made())
    made.tensors["rope_freqs.weight"] = torch.ones(8)
    file = made.write_gguf(tmp_path / "d.gguf", gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight, which is not known"):
        engine(path, draft=file, **DIRECT)


def of_config(**fields: object) -> Made:
    """A drafter whose `dflash_config` has these fields alone."""
    return Made(more={"dflash_config": fields})


PARTS = {"block_size": 6, "mask_token_id": 96, "target_layer_ids": [0, 2]}
REFUSED = {
    "trees": (
        Made(),
        {"tree": 20, "method": "triforce"},
        UsageError,
        "for a retrieval level without trees",
    ),
    "width": (Made(more={"hidden_size": 48}), {}, CheckpointError, "48 wide, and the model 64"),
    "model": (
        Made(more={"num_target_layers": 36}),
        {},
        CheckpointError,
        "num_target_layers is 36, and 3 for the model",
    ),
    "tokens": (
        Made(more={"vocab_size": 5000}),
        {},
        CheckpointError,
        "knows 5000 tokens, and the model 97",
    ),
    "candidates": (
        of_config(**PARTS | {"selector_rank": 4, "selector_top_k": 98}),
        {},
        CheckpointError,
        "selector_top_k 98 is more than the model's 97",
    ),
    "kinds": (
        Made(more={"layer_types": ["chunked_attention"] * 2}),
        {},
        UnsupportedModelError,
        "layer_types 'chunked_attention' is not supported",
    ),
    "taps": (
        of_config(**PARTS | {"target_layer_ids": [0, 3]}),
        {},
        CheckpointError,
        r"layers \[0, 3\] of a model with 3",
    ),
    "no layers": (
        of_config(**PARTS | {"target_layer_ids": [True]}),
        {},
        CheckpointError,
        r"layers \[True\]",
    ),
    "mask": (of_config(**PARTS | {"mask_token_id": 97}), {}, CheckpointError, "none of the model"),
    "no mask": (
        of_config(block_size=6, target_layer_ids=[0]),
        {},
        CheckpointError,
        "mask_token_id is missing",
    ),
    "block": (of_config(**PARTS | {"block_size": 1}), {}, CheckpointError, "block_size must be"),
    "vocabulary": (
        Made(more={"draft_vocab_size": 50}),
        {},
        UnsupportedModelError,
        "a vocabulary of its own",
    ),
    "sinks": (
        of_config(**PARTS | {"attention_sink_bias": True}),
        {},
        UnsupportedModelError,
        "attention_sink_bias True",
    ),
    "speculators": (
        Made(more={"speculators_model_type": "dflash"}),
        {},
        UnsupportedModelError,
        "that speculators wrote",
    ),
    "places": (
        Made(more={"sample_from_anchor": True}),
        {},
        UnsupportedModelError,
        "sample_from_anchor True",
    ),
    "kind": (Made(more={"model_type": "laguna"}), {}, UnsupportedModelError, "model_type 'laguna'"),
    "groups": (
        of_config(**PARTS | {"conv_kernel_size": 2, "conv_group_size": 7}),
        {},
        CheckpointError,
        "7 does not divide 64",
    ),
    "layer types": (
        Made(more={"layer_types": ["full_attention"]}),
        {},
        CheckpointError,
        "layer_types must be a list of 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_draft_is_refused_in_a_sentence(llama, tmp_path, case: str) -> None:
    path, model = llama
    made, options, error, message = REFUSED[case]
    drafter = RandomDrafter(model, tmp_path / "drafter", made)
    with pytest.raises(error, match=message):
        engine(path, draft=drafter.directory, **DIRECT | options)


@pytest.mark.parametrize("family", ["nemotron_h-moe", "qwen4_exp-moe"])
def test_models_whose_layers_it_cannot_take_have_none(tiny, tmp_path, family: str) -> None:
    path, model = tiny(family)
    made = RandomDrafter(model, tmp_path / "drafter", Made())
    with pytest.raises(UnsupportedModelError, match="DFlash drafters do not draft for"):
        engine(path, draft=made.directory, **DIRECT)


def test_damaged_files_are_refused_in_a_sentence(llama, tmp_path) -> None:
    path, model = llama
    made = RandomDrafter(model, tmp_path / "drafter", KINDS["second"])
    file = made.directory / "model.safetensors"
    held = load_file(file)
    kernel = "layers.0.attention_conv.base_kernel"
    changed = {
        "lm_head.weight, which is not known": held | {"lm_head.weight": torch.ones(97, 64)},
        "layers.2.norm.weight, which": held | {"layers.2.norm.weight": torch.ones(64)},
        "lacks fc.weight": {name: each for name, each in held.items() if name != "fc.weight"},
        "has shape": held | {kernel: held[kernel][:, :1].contiguous()},
    }
    for message, tensors in changed.items():
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
            engine(path, draft=made.directory)


def test_a_drafter_is_no_model_of_its_own(llama, tmp_path) -> None:
    made = RandomDrafter(llama[1], tmp_path / "drafter", Made())
    file = made.write_gguf(tmp_path / "d.gguf", gguf.GGMLQuantizationType.Q8_0)
    for path in (made.directory, file):
        with pytest.raises(UnsupportedModelError, match="a DFlash drafter is no model of its own"):
            engine(path)
