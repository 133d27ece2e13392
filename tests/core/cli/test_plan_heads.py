"""`triforce plan` with heads: a model's own MTP head, EAGLE-3 heads and DFlash drafters."""

from __future__ import annotations

import json
from dataclasses import replace

import gguf
import pytest
from assistant_files import KINDS as OF_MODEL
from assistant_files import RandomAssistant
from command import run
from dflash_files import KINDS, RandomDrafter
from helpers import make_model
from test_plan_command import command_of, figures


def test_auto_takes_an_mtp_head_where_it_fits(capsys) -> None:
    base = ("qwen3.5-9b:q4_k_m", "--gpu", "rtx4090", "--context", 32768)
    memory = ("--device-memory", "2.45GB")
    for given, drafter in ((("--device-memory", "3GB"), "mtp"), (memory, "ngram")):
        assert figures(capsys, *base, *given)["plan"]["draft"] == drafter
    code, _, err = run(capsys, "plan", *base, *memory, "--draft", "mtp")
    assert (code, "more device memory" in err) == (3, True), err
    assert figures(capsys, "qwen3.8-27b", *base[1:], "--gpus", 2)["plan"]["draft"] == "mtp"


@pytest.mark.parametrize("context", [32768, 131072])
def test_auto_takes_n_grams_where_the_memory_of_a_head_is_worth_more(capsys, context: int) -> None:
    """Experts in 16 bits: a head of 1.7 GB takes the place of the copies that would draft."""
    base = ("qwen3.5-35b-a3b", "--gpu", "rtx4090", "--context", context)
    chosen, *others = (
        figures(capsys, *base, *draft)["seconds_per_token"]
        for draft in ((), ("--draft", "mtp"), ("--draft", "ngram"))
    )
    assert chosen == min(others)


def test_an_eagle3_head_of_the_usual_shape_or_of_a_config(capsys, tmp_path) -> None:
    """An engine takes the head's directory, which the printed command leaves to the reader."""
    base = ("llama3.1-8b", "--gpu", "rtx4090", "--context", 32768)
    usual = figures(capsys, *base, "--draft", "eagle3")
    assert usual["seconds_per_token"] < figures(capsys, *base)["seconds_per_token"]
    code, out, _ = run(capsys, "plan", *base, "--draft", "eagle3")
    assert (code, "--draft HEAD" in command_of(out)) == (0, True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 2048,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = figures(capsys, *base, "--draft", tmp_path)
    assert given["seconds_per_token"] == usual["seconds_per_token"]
    # The first of two GPUs holds an embedding for it.
    two = figures(capsys, *base, "--gpus", 2, "--draft", "eagle3")["memory"]["drafting_bytes"]
    assert two > 128256 * 4096 * 2
    saved = ("--draft", "eagle3", "--save", tmp_path / "p.json")
    code, _, err = run(capsys, "plan", *base, *saved)
    assert (code, "--save needs the head" in err) == (2, True), err
    code, _, err = run(capsys, "plan", "qwen3-30b-a3b", *base[1:], "--draft", "eagle3")
    assert (code, "no typical shape" in err) == (4, True), err


def test_a_dflash_drafter_of_the_usual_shape(capsys, tmp_path) -> None:
    base = ("qwen3.8-27b:q4_k_m", "--gpu", "rtx4090", "--context", 8192)
    usual = figures(capsys, *base, "--draft", "dflash")
    # It drafts at once what takes the MTP head seven forwards.
    assert usual["seconds_per_token"] < 0.8 * figures(capsys, *base)["seconds_per_token"]
    # 1.9 billion numbers in 16 bits (published: 3.85 GB).
    assert 3.6e9 < usual["memory"]["drafting_bytes"] < 4.8e9
    code, out, _ = run(capsys, "plan", *base, "--draft", "dflash")
    assert (code, "--draft HEAD" in command_of(out)) == (0, True)
    saved = ("--draft", "dflash", "--save", tmp_path / "p.json")
    code, _, err = run(capsys, "plan", *base, *saved)
    assert (code, "--save needs the head" in err) == (2, True), err
    # Two GPUs share its layers, in a quantised file too.
    for draft in ("dflash", "dflash:Q4_K_M"):
        one, two = (
            figures(capsys, *base, "--gpus", gpus, "--draft", draft)["memory"]["drafting_bytes"]
            for gpus in (1, 2)
        )
        assert 0.5 * one < two < 0.8 * one
    assert one < 0.5 * usual["memory"]["drafting_bytes"]
    code, _, err = run(capsys, "plan", "nemotron-3-nano-30b-a3b", *base[1:], "--draft", "dflash")
    assert (code, "do not draft for nemotron_h models" in err) == (4, True), err


def test_an_assistant_of_the_usual_shape_or_of_files(capsys, tiny, tmp_path) -> None:
    base = ("gemma4-31b:q4_k_m", "--gpu", "rtx4090", "--context", 8192)
    usual = figures(capsys, *base, "--draft", "assistant")
    assert usual["seconds_per_token"] < 0.5 * figures(capsys, *base)["seconds_per_token"]
    # .47 billion numbers in 16 bits (published: .94 GB).
    assert 0.9e9 < usual["memory"]["drafting_bytes"] < 1.4e9
    stored = figures(capsys, *base, "--draft", "assistant:Q4_K_M")["memory"]["drafting_bytes"]
    assert stored < 0.6 * usual["memory"]["drafting_bytes"]
    two = figures(capsys, *base, "--gpus", 2, "--draft", "assistant")["memory"]["drafting_bytes"]
    assert two < 0.65 * usual["memory"]["drafting_bytes"]
    code, _, err = run(capsys, "plan", "llama3.1-8b", *base[1:], "--draft", "assistant")
    assert (code, "assistants for Gemma 4, not for llama" in err) == (4, True), err
    path, model = tiny("gemma4")
    made = RandomAssistant(model, tmp_path / "a", OF_MODEL["usual"])
    base = (path, "--gpu", "rtx4090", "--context", 200, "--new-tokens", 10, "--dtype", "bfloat16")
    held = figures(capsys, *base, "--draft", made.directory)
    (made.directory / "model.safetensors").unlink()
    assert figures(capsys, *base, "--draft", made.directory) == held


def test_a_drafter_is_planned_as_its_files_store_it(capsys, tmp_path) -> None:
    """Without weights, as its config.json says."""
    model = make_model("llama", tmp_path / "model")
    made = RandomDrafter(model, tmp_path / "drafter", replace(KINDS["second"], rank=32, wide=4096))
    base = (tmp_path / "model", "--gpu", "rtx4090", "--context", 200, "--new-tokens", 10)
    base += ("--dtype", "bfloat16")

    def drafting(path: object) -> int:
        return figures(capsys, *base, "--draft", path)["memory"]["drafting_bytes"]

    dense = drafting(made.directory)
    stored = drafting(made.write_gguf(tmp_path / "d.gguf", gguf.GGMLQuantizationType.Q8_0))
    matrices = sum(each.numel() for each in made.tensors.values() if each.ndim == 2)
    assert 0.9 * 0.9375 * matrices < dense - stored < 0.9375 * matrices
    (made.directory / "model.safetensors").unlink()
    assert drafting(made.directory) == dense
