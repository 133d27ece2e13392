"""Assistants of Gemma 4: they compute what transformers' class does, follow whatever is accepted
and rejected, and cost no token, however useless.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from assistant_files import FULL, KINDS, Made, RandomAssistant
from drafter_engines import (
    DIRECT,
    RUNS,
    assert_close,
    assert_each_has_its_own,
    assert_saved_goes_on,
    assert_text_of_transformers,
    engine,
    of_latest,
)
from head_walks import grown, walk
from helpers import PLACEMENTS, make_model, random_ids, turns
from oracle import greedy
from safetensors.torch import load_file, save_file

from triforce_core import Engine
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.text import Text
from triforce_core.decoding.drafters.assistant import AssistantDrafter
from triforce_core.model.heads import joins
from triforce_offload.errors import CheckpointError, UnsupportedModelError

FAMILIES = ("gemma4", "gemma4-unified", "gemma4-moe", "gemma4-small")


@pytest.fixture
def gemma(tiny) -> tuple[Path, torch.nn.Module]:
    return tiny("gemma4")


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An assistant has the keys of the last 32 tokens, beside the first."""
    monkeypatch.setattr(joins, "ASSISTANT_CONTEXT", 32)


def seen(drafter: AssistantDrafter) -> list[list[int]]:
    """Positions that full layers and layers with a window see."""
    return [[*first, *last] for first, last in (each.positions for each in drafter._kv.kinds)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_assistant_computes_what_transformers_does(tiny, tmp_path, family: str, kind) -> None:
    """After prefills of any length, passes that keep some of their rows, and cuts."""
    path, model = tiny(family)
    made = RandomAssistant(model, tmp_path / "assistant", KINDS[kind])
    with engine(path, "kv", draft=made.directory, **DIRECT) as ours:
        for drafter, text in walk(ours):
            drafted = random_ids(3, len(text))
            batch = drafter.catch_up(Text(text), 5)
            full, *windows = seen(drafter)
            assert full == list(range(len(text) - 1))
            assert all(each[-1] == len(text) - 2 for each in windows)
            for place, token in enumerate(drafted):
                exact = made.logits(text, drafted[:place], seen=seen(drafter))
                assert_close(drafter.forward(batch)[0], exact)
                batch = torch.tensor([token])


def test_rows_of_a_tree_follow_their_path(gemma, tmp_path) -> None:
    path, model = gemma
    made, choose = RandomAssistant(model, tmp_path / "a", KINDS["usual"]), random.Random(1)
    with engine(path, "kv", draft=made.directory, method="speculative", tree=30) as ours:
        own = Context(ours.models)
        own.prefill(random_ids(50, 2), 60, lambda _: None)
        drafter, text = own.levels.drafter, [*own.text.tokens, 5]
        drafter.forward(drafter.catch_up(Text(text), 20))
        for logits, tokens in grown(drafter, 4, choose):
            assert_close(logits, made.logits(text, tokens, seen=seen(drafter)))
        own.close()


@pytest.mark.usefixtures("short_memory")
@pytest.mark.parametrize("window", [16, 512])
def test_of_a_long_text_it_sees_the_first_and_the_last_tokens(gemma, tmp_path, window) -> None:
    """An eighth of the last ones is forgotten at a time."""
    path, model = gemma
    made = RandomAssistant(model, tmp_path / "assistant", Made(window=window))
    counts = []
    with engine(path, "kv", draft=made.directory, **DIRECT) as ours:
        for drafter, text in walk(ours):
            found = drafter.forward(drafter.catch_up(Text(text), 5))[0]
            last = len(text) - 1
            full, windowed = seen(drafter)
            assert full[:16] == list(range(min(16, last)))
            assert full[-1] == windowed[-1] == last - 1
            counts.append((len(full), len(windowed)))
            assert_close(found, made.logits(text, [], seen=(full, windowed)))
    assert tuple(map(max, zip(*counts, strict=True))) == (16 + 32, min(window, 32))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("family", "run", "placement", "kind"),
    [
        (family, run, placement, tuple(KINDS)[(index + number) % len(KINDS)])
        for index, family in enumerate(FAMILIES)
        for number, run in enumerate(RUNS)
        for placement in turns(PLACEMENTS, index + number, 2)
    ],
)
def test_text_is_that_of_transformers(
    tmp_path, family: str, run: str, placement: str, kind: str
) -> None:
    model = make_model(family, tmp_path / "model")
    made = RandomAssistant(model, tmp_path / "assistant", KINDS[kind])
    with engine(tmp_path / "model", placement, draft=made.directory, **RUNS[run]) as ours:
        assert_text_of_transformers(ours, model, "assistant")


def assert_follows(ours: Engine, made: RandomAssistant, kept: int | None = None) -> None:
    """That the assistant has the keys of the latest text, and predicts what follows it.

    kept: number of the tokens that it has; None for all
    """
    drafter, text, found = of_latest(ours)
    assert len(seen(drafter)[0]) == (len(text) - 1 if kept is None else kept)
    assert_close(found, made.logits(text, [], seen=seen(drafter)))


def test_several_sequences_each_have_their_own_keys(gemma, tmp_path) -> None:
    path, model = gemma
    made = RandomAssistant(model, tmp_path / "assistant", KINDS["usual"])
    assert_each_has_its_own(path, made.directory, lambda ours: assert_follows(ours, made))


def test_a_saved_context_goes_on(gemma, tmp_path) -> None:
    path, model = gemma
    made = RandomAssistant(model, tmp_path / "assistant", KINDS["usual"])
    with assert_saved_goes_on(path, made.directory, tmp_path / "saved") as ours:
        # Copies are not saved: it has those of what was computed since.
        assert_follows(ours, made, ours._contexts.latest.length - 80)


def test_layers_that_the_cpu_computes_show_their_keys(gemma, tmp_path) -> None:
    path, model = gemma
    made = RandomAssistant(model, tmp_path / "assistant", KINDS["usual"])
    options = {"draft": made.directory, "host_compute": 1.0, **DIRECT}
    with engine(path, "both", **options) as ours:
        prompt = random_ids(60)
        ours.generate(prompt, greedy(20))
        assert_follows(ours, made)


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0", "F16"])
@pytest.mark.parametrize("target", ["safetensors", "gguf"])
def test_files_of_llama_cpp_are_read(gemma, tmp_path, stored: str, target: str) -> None:
    """Their numbers are kept as they are stored, whatever the model's files are."""
    from gguf_files import write_gguf

    path, model = gemma
    if target == "gguf":
        path = tmp_path / "model.gguf"
        write_gguf(model, path, gguf.GGMLQuantizationType.F32)
    made = RandomAssistant(model, tmp_path / "a", replace(KINDS["usual"], hidden=64, wide=96))
    file = made.write_gguf(tmp_path / "a.gguf", gguf.GGMLQuantizationType[stored])
    with engine(path, "kv", draft=file, **DIRECT) as ours:
        kinds = ours.models.small.store.layouts[0].decoded()
        assert {part.block_type.name for part in kinds} == {stored}
        for drafter, text in walk(ours):
            found = drafter.forward(drafter.catch_up(Text(text), 5))[0]
            assert_close(found, made.logits(text, [], seen=seen(drafter)), 2e-3)
        prompt = random_ids(30)
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)
        assert ours.generate(prompt, greedy(9)).token_ids == theirs[0, 30:].tolist()


def changed(directory: Path, **fields: object) -> None:
    """Change fields of a config: `text_*` those of its layers."""
    file = directory / "config.json"
    held = json.loads(file.read_text())
    for name, value in fields.items():
        part = held["text_config"] if name.startswith("text_") else held
        part[name.removeprefix("text_")] = value
    file.write_text(json.dumps(held))


REFUSED = {
    "backbone_hidden_size is 48, and 64 for the model": {"backbone_hidden_size": 48},
    "backbone_hidden_size must be": {"backbone_hidden_size": "wide"},
    "vocab_size is 50, and 97": {"text_vocab_size": 50},
    "heads of full attention is 1 of 16, and 1 of 32": {
        "text_per_layer_config": {"2": {"head_dim": 16, "num_key_value_heads": 1}}
    },
    "heads of windows is 1 of 16, and 2 of 16": {"text_num_key_value_heads": 1},
    "1 of 3 layers share": {"text_num_kv_shared_layers": 1},
    "text_config must be an object": {"text_config": [1]},
    "hidden_size_per_layer_input (8) is not supported in an assistant": {
        "text_hidden_size_per_layer_input": 8
    },
    "(tie_word_embeddings false) is not supported": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_draft_is_refused_in_a_sentence(gemma, tmp_path, message: str) -> None:
    path, model = gemma
    made = RandomAssistant(model, tmp_path / "assistant", KINDS["usual"])
    fields = REFUSED[message]
    if "text_config" in fields:
        file = made.directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    else:
        changed(made.directory, **fields)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=re.escape(message)) as found:
        engine(path, draft=made.directory, **DIRECT)
    assert str(made.directory) in str(found.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 5e5}, "rope_theta is 500000, and 10000 for the model"),
        (
            {"partial_rotary_factor": 0.5},
            "rope is proportional {'partial_rotary_factor': 0.5}, and",
        ),
        ({"rope_type": "linear", "factor": 8.0}, "rope is linear "),
    ],
)
def test_other_frequencies_are_refused_in_a_sentence(gemma, tmp_path, change, message) -> None:
    path, model = gemma
    made = RandomAssistant(model, tmp_path / "assistant", KINDS["usual"])
    text = json.loads((made.directory / "config.json").read_text())["text_config"]
    text["rope_parameters"][FULL] |= change
    changed(made.directory, text_rope_parameters=text["rope_parameters"])
    with pytest.raises(CheckpointError, match=re.escape(message)):
        engine(path, draft=made.directory, **DIRECT)


def test_it_is_known_by_its_type_too_and_not_by_a_field(gemma, tmp_path) -> None:
    path, model = gemma
    made = RandomAssistant(model, tmp_path / "assistant", KINDS["usual"])
    changed(made.directory, architectures=None)
    engine(path, draft=made.directory, **DIRECT).close()
    changed(made.directory, architectures=["LlamaForCausalLM"], model_type="llama")
    with pytest.raises(CheckpointError, match="hidden_size"):
        engine(path, draft=made.directory, **DIRECT)


def test_a_cut_that_leaves_nothing_of_a_window_drafts_nothing(gemma, tmp_path) -> None:
    path, model = gemma
    made = RandomAssistant(model, tmp_path / "assistant", Made(window=16))
    with engine(path, "kv", draft=made.directory, **DIRECT) as ours:
        own = Context(ours.models)
        own.prefill(random_ids(60), 60, lambda _: None)
        drafter, text = own.levels.drafter, own.text.tokens
        assert drafter.catch_up(Text([*text[:50], 5]), 5) is not None
        assert drafter.catch_up(Text([*text[:40], 5]), 5) is None
        own.close()


def test_it_drafts_for_gemma_4_alone(llama, gemma, tmp_path) -> None:
    made = RandomAssistant(gemma[1], tmp_path / "assistant", KINDS["usual"])
    with pytest.raises(UnsupportedModelError, match="draft for Gemma 4, not for a llama model"):
        engine(llama[0], draft=made.directory, **DIRECT)


def test_damaged_files_are_refused_in_a_sentence(gemma, tmp_path) -> None:
    path, model = gemma
    made = RandomAssistant(model, tmp_path / "assistant", KINDS["usual"])
    file = made.directory / "model.safetensors"
    held = load_file(file)
    keys, join = "model.layers.0.self_attn.k_proj.weight", "pre_projection.weight"
    changes = {
        "k_proj.weight, which a gemma4_text model does not use": held | {keys: torch.ones(32, 32)},
        "projection_2.weight, which is not known of assistants": held
        | {"projection_2.weight": torch.ones(4, 4)},
        f"lacks {join}": {name: each for name, each in held.items() if name != join},
        "has shape": held | {join: held[join][:, :1].contiguous()},
    }
    for message, tensors in changes.items():
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
            engine(path, draft=made.directory)


def test_a_list_of_tokens_to_choose_from_is_not_used(gemma, tmp_path) -> None:
    path, model = gemma
    made = RandomAssistant(model, tmp_path / "assistant", Made(masked=True))
    file = made.write_gguf(tmp_path / "a.gguf", gguf.GGMLQuantizationType.F32)
    for draft in (made.directory, file):
        with engine(path, "kv", draft=draft, **DIRECT) as ours:
            ours.generate(random_ids(20), greedy(5))
            assert_follows(ours, made)


def test_an_assistant_is_no_model_of_its_own(gemma, tmp_path) -> None:
    made = RandomAssistant(gemma[1], tmp_path / "assistant", KINDS["usual"])
    file = made.write_gguf(tmp_path / "a.gguf", gguf.GGMLQuantizationType.Q8_0)
    for path in (made.directory, file):
        with pytest.raises(UnsupportedModelError, match="an assistant of Gemma 4 is no model of"):
            engine(path)
