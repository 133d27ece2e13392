"""Drafters made of first layers: they are these layers, and what is said of them holds."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from float_bounds import assert_within, forward_bound
from gguf_files import write_gguf
from helpers import VOCAB, add_tokenizer, random_ids

import bench.make_shallow_draft as script
from bench.make_shallow_draft import make_shallow_draft
from bench.shallow_depths import Depth, best, candidates, measure
from triforce_core import Engine, SamplingParams
from triforce_core.decoding.draft_length import LEAST_GAIN
from triforce_offload.errors import UsageError


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3", "llama3-rope"])
def test_a_shallow_draft_is_the_models_first_layers(tiny, tmp_path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    path, twin = tiny(family)
    make_shallow_draft(path, tmp_path / "all", 3, torch.float32)
    make_shallow_draft(path, tmp_path / "two", 2, torch.float32)
    prompt = torch.tensor([random_ids(30)])
    with torch.no_grad():
        expected = twin(prompt).logits
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "all")(prompt).logits
        # Whatever addresses the weights have: libraries may add in another order.
        assert_within(whole, expected, 2 * forward_bound(twin, 30).logits)
        twin = copy.deepcopy(twin)
        del twin.model.layers[2:]
        expected = twin(prompt).logits
        shallow = AutoModelForCausalLM.from_pretrained(tmp_path / "two")(prompt).logits
    assert_within(shallow, expected, 2 * forward_bound(twin, 30).logits)
    with Engine.from_pretrained(path, device="cpu", draft=tmp_path / "two") as engine:
        stats = engine.generate(random_ids(30), SamplingParams(30, temperature=0)).stats
    assert stats["levels"] == ["model", "target"]


def test_a_shallow_draft_of_a_gguf_file_and_what_is_refused(tiny, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    _, twin = tiny("llama")
    write_gguf(twin, tmp_path / "model.gguf")
    make_shallow_draft(tmp_path / "model.gguf", tmp_path / "all", 3, torch.float32)
    prompt = torch.tensor([random_ids(30)])
    with torch.no_grad():
        made = AutoModelForCausalLM.from_pretrained(tmp_path / "all")(prompt).logits
        assert_within(made, twin(prompt).logits, 2 * forward_bound(twin, 30).logits)
    for layers, directory, said in (
        (4, "new", "4 layers of a model that has 3"),
        (2, "all", "all"),
    ):
        with pytest.raises(UsageError, match=said):
            make_shallow_draft(tmp_path / "model.gguf", tmp_path / directory, layers)
        assert not (tmp_path / "new").exists()


def test_the_acceptance_that_is_said_is_met(tiny, tmp_path) -> None:
    """On a text of the model's own, within what so many drafts tell."""
    path, _ = tiny("llama")
    make_shallow_draft(path, tmp_path / "two", 2, torch.float32)
    options = {"method": "speculative", "draft": tmp_path / "two", "draft_tokens": 1}
    with Engine.from_pretrained(path, device="cpu", max_context=512, **options) as engine:
        result = engine.generate(random_ids(10), SamplingParams(240, temperature=1.0, seed=3))
    met = result.stats["acceptance"]["target"]
    [said] = measure(path, result.token_ids, [2])
    drafts = sum(result.stats["acceptance"]["accepted_lengths"])
    assert abs(said.acceptance - met) < 4 * (0.25 / drafts) ** 0.5
    assert said.acceptance > 0.05, "the test would see nothing"
    assert measure(path, result.token_ids, [3])[0].acceptance > 0.999


def test_what_a_depth_gains() -> None:
    free = Depth(1, acceptance=0.5, agreement=0.5, cost=0.0)
    assert free.draft_tokens == 16
    assert free.gain == pytest.approx(2, rel=1e-4)
    useless = Depth(1, acceptance=0.0, agreement=0.0, cost=0.1)
    assert (useless.draft_tokens, useless.gain) == (0, 1)
    # 1 + .8 + .64 + .512 tokens for 1 + .9 forwards: one more would bring .41 for .3 times 1.55.
    some = Depth(6, acceptance=0.8, agreement=0.9, cost=0.3)
    assert some.draft_tokens == 3
    assert some.gain == pytest.approx(2.952 / 1.9)
    assert best([useless, some]) is some
    assert best([useless, Depth(2, LEAST_GAIN / 20, 0, 0.01)]) is None
    assert best([]) is None
    assert candidates(32) == [1, 2, 4, 8, 12, 16, 20, 24, 28]
    assert candidates(1) == []


@pytest.mark.parametrize("pays", [True, False])
def test_the_depth_that_gains_most_is_made_or_none(
    tiny, tmp_path, monkeypatch, capsys, pays: bool
) -> None:
    path = with_tokenizer(tiny, tmp_path)
    shares = {1: 0.0, 2: 0.9 if pays else 0.1}
    found = [Depth(layers, share, share, 0.3) for layers, share in shares.items()]
    monkeypatch.setattr(script, "measure", lambda path, tokens, depths: found)
    monkeypatch.setattr(sys, "argv", ["make_shallow_draft", str(path), str(tmp_path / "made")])
    assert script.main() == (0 if pays else 1)
    said = capsys.readouterr().out
    assert (tmp_path / "made").exists() == pays
    assert ("first 2 layers" in said) == pays
    assert ("nothing was written" in said) != pays


def test_a_depth_that_is_asked_for_is_made_untried(tiny, tmp_path, monkeypatch, capsys) -> None:
    path = with_tokenizer(tiny, tmp_path)
    text = tmp_path / "text"
    monkeypatch.setattr(sys, "argv", f"make {path} {tmp_path / 'made'} --layers 1".split())
    assert script.main() == 0
    assert "the first 1 layers" in capsys.readouterr().out
    with Engine.from_pretrained(path, device="cpu", draft=tmp_path / "made") as engine:
        engine.generate("hello", SamplingParams(5))
    text.write_text("")
    for argv, said in (
        (f"make {path} {tmp_path / 'made'}", "exists already"),
        (f"make {path} {tmp_path / 'new'} --layers 9", "9 layers of a model that has 3"),
        (f"make {path} {tmp_path / 'new'} --layers 0", "0 layers of a model that has 3"),
        (f"make {path} {tmp_path / 'new'} --text {text}", "is empty"),
        (f"make {path} {tmp_path / 'new'} --text {text}.no", "cannot read"),
    ):
        monkeypatch.setattr(sys, "argv", argv.split())
        assert script.main() == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "new").exists()


def with_tokenizer(tiny, tmp_path: Path) -> Path:
    _, twin = tiny("llama")
    path = tmp_path / "model"
    twin.save_pretrained(path)
    add_tokenizer(path)
    assert twin.config.vocab_size == VOCAB
    return path


def test_other_families_are_refused_by_name(tiny, tmp_path) -> None:
    with pytest.raises(UsageError, match="a draft of a glm4 model cannot be made"):
        make_shallow_draft(tiny("glm4")[0], tmp_path / "new", 2)
    assert not (tmp_path / "new").exists()
