"""EAGLE-3 heads: they compute what their authors publish, follow whatever is accepted and rejected,
and cost no token, however useless.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from drafter_engines import (
    DIRECT,
    FAMILIES,
    NEW,
    RUNS,
    assert_close,
    assert_each_has_its_own,
    assert_saved_goes_on,
    engine,
)
from eagle3_heads import KINDS, Made, RandomHead
from float_bounds import assert_within
from head_walks import grown, walk
from helpers import PLACEMENTS, make_model, random_ids, turns
from oracle import assert_equal_but_for_ties, greedy
from safetensors.torch import load_file, save_file

from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.text import Text
from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_core.model.checkpoints.drafters.eagle3 import open_eagle3
from triforce_core.plan.levels import SINKS, WINDOW
from triforce_offload.errors import CheckpointError, UnsupportedModelError, UsageError


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_computes_what_its_authors_publish(llama, tmp_path, kind: str) -> None:
    """After prefills of any length, passes that keep some of their rows, cuts, and behind tokens of
    its own.
    """
    path, model = llama
    head = RandomHead(model, tmp_path / "head", KINDS[kind])
    with engine(path, "kv", draft=head.directory, **DIRECT) as ours:
        for drafter, text in walk(ours):
            found = [drafter.forward(drafter.catch_up(Text(text), 5))[0]]
            found += [drafter.forward(torch.tensor([token]))[0] for token in (7, 8)]
            for drafted, logits in enumerate(found):
                assert_close(logits, head.logits([*text, 7, 8][: len(text) + drafted], drafted))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_tree_see_their_path_alone(llama, tmp_path, kind: str) -> None:
    """Each row computes what it does behind a chain of its path's tokens."""
    path, model = llama
    head, choose = RandomHead(model, tmp_path / "head", KINDS[kind]), random.Random(1)
    with engine(path, "kv", draft=head.directory, method="speculative", tree=30) as ours:
        own = Context(ours.models)
        own.prefill(random_ids(50, 2), 60, lambda _: None)
        drafter, text = own.levels.drafter, [*own.text.tokens, 5]
        for _ in range(3):
            drafter.forward(drafter.catch_up(Text(text), 20))
            for logits, tokens in grown(drafter, 4, choose):
                exact = head.logits([*text, *tokens], len(tokens))
                known = exact.isfinite()
                bound = 1e-4 * float(exact[known].abs().max())
                assert_within(logits[known], exact[known], bound)
        own.close()


def test_of_a_long_text_it_sees_the_first_and_the_recent_pairs(llama, tmp_path) -> None:
    """The first ones as if they came directly before the others."""
    path, model = llama
    head = RandomHead(model, tmp_path / "head", Made())
    with engine(path, "kv", draft=head.directory, **DIRECT) as ours:
        own = Context(ours.models)
        prompt = random_ids(480, 3)
        own.prefill(prompt, 10, lambda _: None)
        drafter = own.levels.drafter
        found = drafter.forward(drafter.catch_up(Text([*prompt, 5]), 5))
        assert drafter._places == [*range(1, SINKS + 1), *range(481 - WINDOW, 481)]
        # An answer that differs from that of the recent pairs alone, and is a distribution.
        assert found.softmax(-1).sum().item() == pytest.approx(1)
        own.close()


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("family", "run", "placement"),
    [
        (family, run, placement)
        for index, family in enumerate(FAMILIES)
        for run in RUNS
        for placement in turns(PLACEMENTS, index + len(run), 2)
    ],
)
def test_text_is_that_of_transformers(tmp_path, family: str, run: str, placement: str) -> None:
    model = make_model(family, tmp_path / "model")
    head = RandomHead(model, tmp_path / "head", Made())
    with engine(tmp_path / "model", placement, draft=head.directory, **RUNS[run]) as ours:
        for tokens in (1, 70):
            prompt = random_ids(tokens, tokens)
            result = ours.generate(prompt, greedy(NEW))
            assert result.stats["levels"][0] == "eagle3"
            theirs = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
            assert_equal_but_for_ties(model, prompt, result.token_ids, theirs[0, tokens:].tolist())


def test_several_sequences_each_have_their_own_states(llama, tmp_path) -> None:
    path, model = llama
    head = RandomHead(model, tmp_path / "head", Made())
    assert_each_has_its_own(path, head.directory, lambda _: None)


def test_a_saved_context_goes_on(llama, tmp_path) -> None:
    path, model = llama
    head = RandomHead(model, tmp_path / "head", Made())
    with assert_saved_goes_on(path, head.directory, tmp_path / "saved"):
        pass


REFUSED = {
    "trees": (
        Made(),
        {"tree": 20, "method": "triforce"},
        UsageError,
        "for a retrieval level without trees",
    ),
    "width": (Made(hidden=48), {}, CheckpointError, "48 wide and the model 64"),
    "taps": (
        Made(more={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}),
        {},
        CheckpointError,
        r"layers \[1, 2, 4\] of a model with 3",
    ),
    "no layers": (
        Made(more={"eagle_aux_hidden_state_layer_ids": [True, 2]}),
        {},
        CheckpointError,
        r"layers \[True, 2\]",
    ),
    "further norms": (
        Made(more={"eagle_config": {"fc_norm": True, "norm_before_fc": True}}),
        {},
        UnsupportedModelError,
        "norm_before_fc and fc_norm together",
    ),
    "last state": (
        Made(more={"eagle_config": {"use_aux_hidden_state": False}}),
        {},
        UnsupportedModelError,
        "take the last hidden state alone",
    ),
    "vocabulary": (Made(more={"draft_vocab_size": 98}), {}, CheckpointError, "98 tokens, more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_draft_is_refused_in_a_sentence(llama, tmp_path, case: str) -> None:
    path, model = llama
    made, options, error, message = REFUSED[case]
    head = RandomHead(model, tmp_path / "head", made)
    with pytest.raises(error, match=message):
        engine(path, draft=head.directory, **DIRECT | options)


def test_models_whose_layers_heads_number_otherwise_have_none(tiny, tmp_path) -> None:
    path, model = tiny("nemotron_h-moe")
    head = RandomHead(model, tmp_path / "head", Made())
    with pytest.raises(UnsupportedModelError, match="do not draft for nemotron_h models"):
        engine(path, draft=head.directory, **DIRECT)


def test_damaged_files_are_refused_in_a_sentence(llama, tmp_path) -> None:
    path, model = llama
    head = RandomHead(model, tmp_path / "head", Made())
    file = head.directory / "model.safetensors"
    held = load_file(file)
    changed = {
        "fc_norm.weight, which is not known": held | {"fc_norm.weight": torch.ones(64)},
        "layers.1.norm.weight, which": held | {"layers.1.norm.weight": torch.ones(64)},
        r"embed_tokens.weight has shape \[\]": held | {"embed_tokens.weight": torch.tensor(1.0)},
        "d2t has 30 numbers": held | {"d2t": held["d2t"][1:]},
        "d2t is no list of whole numbers": held | {"d2t": held["d2t"].float()},
        "lacks fc.weight": {name: each for name, each in held.items() if name != "fc.weight"},
        "has shape": held | {"norm.weight": torch.ones(63)},
        "names tokens that the model's 97": held | {"d2t": held["d2t"] + 90},
        "no d2t says which": {name: each for name, each in held.items() if name != "d2t"},
    }
    for message, tensors in changed.items():
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
            engine(path, draft=head.directory)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"neither safetensors nor pytorch_model\.bin"):
        engine(path, draft=head.directory)
    for data in (b"", b"nonsense", json.dumps({"a": 1}).encode()):
        (head.directory / "pytorch_model.bin").write_bytes(data)
        with pytest.raises(CheckpointError, match=r"cannot read .*pytorch_model\.bin"):
            engine(path, draft=head.directory)


def test_a_damaged_pickle_is_refused_in_a_sentence(llama, tmp_path) -> None:
    """Each of some damaged bytes, and tensors that are none of a file's."""
    path, model = llama
    head = RandomHead(model, tmp_path / "head", KINDS["eagle"])
    config = open_checkpoint(path).config
    file = head.directory / "pytorch_model.bin"
    whole, held = file.read_bytes(), torch.load(file, weights_only=True)
    choose = random.Random(0)
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[choose.randrange(3000)] = choose.randrange(256)
        file.write_bytes(bytes(damaged))
        with suppress(CheckpointError, UnsupportedModelError):
            open_eagle3(head.directory, config).close()
    for d2t in (held["d2t"][1:], held["d2t"][:, None], held["d2t"].to_sparse(), torch.tensor(3)):
        torch.save(held | {"d2t": d2t}, file)
        with pytest.raises(CheckpointError, match=r"d2t|tensors by name"):
            open_eagle3(head.directory, config)


def test_a_number_of_layers_that_is_the_models_is_ignored(llama, tmp_path) -> None:
    """As in files of EAGLE's authors, which build one layer whatever their config says."""
    path, model = llama
    made = Made(style="eagle", more={"num_hidden_layers": 40, "architectures": ["Llama"]})
    head = RandomHead(model, tmp_path / "head", made)
    with engine(path, draft=head.directory, **DIRECT) as ours:
        assert ours.generate(random_ids(30), greedy(4)).stats["levels"][0] == "eagle3"


def test_tokens_that_its_embedding_lacks_do_not_fail_a_request(llama, tmp_path) -> None:
    path, model = llama
    head = RandomHead(model, tmp_path / "head", Made(embeds=True))
    file = head.directory / "model.safetensors"
    held = load_file(file)
    cut = held["embed_tokens.weight"][:40].contiguous()
    save_file(held | {"embed_tokens.weight": cut}, file, metadata={"format": "pt"})
    prompt = random_ids(40, 6)
    with engine(path, draft=head.directory, **DIRECT) as ours:
        found = ours.generate(prompt, greedy(NEW)).token_ids
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    assert_equal_but_for_ties(model, prompt, found, theirs[0, 40:].tolist())


def test_a_head_is_no_model_of_its_own(llama, tmp_path) -> None:
    head = RandomHead(llama[1], tmp_path / "head", Made())
    with pytest.raises(UnsupportedModelError, match="is no model of its own: it drafts for one"):
        engine(head.directory)


class _Runs:
    """What a pickle that runs code would hold."""

    def __reduce__(self) -> tuple:
        return (print, ("a file of weights ran code",))


def test_a_file_that_would_run_code_is_refused(llama, tmp_path, capsys) -> None:
    path, model = llama
    head = RandomHead(model, tmp_path / "head", replace(Made(), style="eagle"))
    torch.save({"fc.weight": _Runs()}, head.directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"cannot read .*pytorch_model\.bin"):
        engine(path, draft=head.directory)
    assert "ran code" not in capsys.readouterr().out
