"""MTP heads that ranks share: they draft what the head of one rank does, and follow the text."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from fp8_files import FP8_RECURRENT, FP8_SIZES, quantise
from head_walks import ON_RANKS
from helpers import add_head, make_model, random_ids
from integer_files import to_integers
from oracle import assert_equal_but_for_ties, greedy
from safetensors.torch import load_file, save_file
from thread_ranks import engine

from triforce_core.cli.main import _parser
from triforce_core.cli.plan.command import _case
from triforce_core.decoding.contexts.calls import RunHead
from triforce_core.decoding.drafters.head import HeadDrafter
from triforce_core.loading import plan_inputs
from triforce_core.plan import resolve
from triforce_core.plan.fitting import Resolved
from triforce_core.plan.sizes import ModelSizes
from triforce_offload.errors import DoesNotFitError

PROMPT, NEW = 120, 40
# Rows of whole blocks.
WIDE = FP8_SIZES | FP8_RECURRENT
WIDE_EXPERTS = WIDE | dict.fromkeys(
    ("moe_intermediate_size", "shared_expert_intermediate_size"), 128
)
WIDE_EXPERTS |= {"ple_embed_dim": 384, "indexer_head_dim": 32}
# How a model with a head is stored: family, sizes, format, and whether the head is in FP8 too.
STORED = {
    "int4": ("qwen3_5", WIDE, partial(to_integers, way="w4a16"), False),
    "fp8": ("qwen3_5", WIDE, quantise, False),
    "fp8-head": ("qwen3_5", WIDE, quantise, True),
    "fp8-streams": ("qwen4_exp-moe", WIDE_EXPERTS, quantise, False),
}


def with_head(path: Path, family: str) -> tuple[Path, torch.nn.Module]:
    """Makes a model with a random head."""
    model = make_model(family, path)
    add_head(path, model)
    return path, model


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    return with_head(tmp_path_factory.mktemp("headed"), "qwen3_5")


def transformers_text(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of the first rank's head, in order."""
    logits, run = [], HeadDrafter._run_on_all

    def recorded(drafter: HeadDrafter, call: RunHead) -> torch.Tensor:
        logits.append(run(drafter, call).clone())
        return logits[-1]

    monkeypatch.setattr(HeadDrafter, "_run_on_all", recorded)
    return logits


@pytest.mark.first
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", ON_RANKS)
def test_the_head_of_ranks_drafts_what_that_of_one_does(
    headed, leaders, drafted, method: str, ranks: int
) -> None:
    path, model = headed
    prompt, texts, counts = random_ids(PROMPT), [], []
    for count in (1, ranks):
        with engine(path, count, "kv", draft="mtp", **ON_RANKS[method]) as ours:
            text = ours.generate(prompt, greedy(NEW)).token_ids
            # A text that goes on, and one that turns back.
            longer = prompt + text + random_ids(5, 3)
            found = [ours.generate(other, greedy(12)).token_ids for other in (longer, longer[:90])]
            texts.append([text, *found])
            counts.append(len(drafted))
    assert_equal_but_for_ties(model, prompt, texts[0][0], transformers_text(model, prompt))
    assert texts[0] == texts[1]
    assert leaders[-1].calls.count(RunHead) == counts[1] - counts[0]
    if method != "learned":
        # As many drafts: their lengths do not follow from time.
        alone, shared = drafted[: counts[0]], drafted[counts[0] :]
        assert len(alone) == len(shared) > 20
        for one, other in zip(alone, shared, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)


def test_ranks_share_the_head_of_a_model_with_latent_attention(tmp_path, leaders) -> None:
    path, model = with_head(tmp_path, "glm4_lite-moe")
    prompt, texts = random_ids(PROMPT), []
    for count in (1, 2):
        with engine(path, count, "kv", draft="mtp", **ON_RANKS["retrieval"]) as ours:
            texts.append(ours.generate(prompt, greedy(NEW)).token_ids)
    assert_equal_but_for_ties(model, prompt, texts[0], transformers_text(model, prompt))
    assert texts[0] == texts[1]


@pytest.mark.first
@pytest.mark.parametrize("method", ["speculative", "retrieval"])
def test_drafts_that_are_accepted_in_part_leave_all_ranks_alike(
    headed, leaders, monkeypatch, method: str
) -> None:
    """The first rank's logits are changed, so that four of five drafted tokens are right."""
    path, model = headed
    prompt = random_ids(PROMPT)
    text = prompt + transformers_text(model, prompt)
    run, drafters, places = HeadDrafter.run, {}, {}

    def mostly_right(
        drafter: HeadDrafter,
        tokens: torch.Tensor,
        start: tuple[int, ...] | None,
        parents: tuple[int, ...] | None,
    ) -> torch.Tensor:
        logits, drafters[threading.get_ident()] = run(drafter, tokens, start, parents), drafter
        if logits.shape[1]:
            places[drafter] = place = (
                places[drafter] + 1 if start is None else start[2] + len(tokens) - start[1]
            )
            if place < len(text) and place % 5:
                logits[0, text[place]] += 100
        return logits

    monkeypatch.setattr(HeadDrafter, "run", mostly_right)
    accepted = []
    for count in (1, 3):
        drafters.clear()
        with engine(path, count, "kv", draft="mtp", **ON_RANKS[method]) as ours:
            result = ours.generate(prompt, greedy(NEW - 4))
            assert result.token_ids == text[PROMPT : PROMPT + NEW - 4]
            # A text that turns back and goes on.
            again = ours.generate(text[: PROMPT + 9], greedy(20))
            assert again.token_ids == text[PROMPT + 9 : PROMPT + 29]
            accepted.append(result.stats["acceptance"]["accepted_lengths"])
            states = [(d._begin, d._firsts, d._recent) for d in drafters.values()]
        assert len(states) == count
        for begin, firsts, recent in states[1:]:
            assert begin == states[0][0]
            assert torch.equal(firsts, states[0][1])
            assert torch.equal(recent, states[0][2])
    assert accepted[0] == accepted[1]
    assert sum(length * times for length, times in enumerate(accepted[0])) > NEW // 3


def test_where_one_rank_has_no_room_for_its_part_n_grams_draft_on_all(
    headed, leaders, monkeypatch
) -> None:
    path, model = headed
    fit_machine = resolve.fit_machine

    def refused(sizes, *args: object, **options: object) -> object:
        if sizes.drafter and threading.current_thread() is not threading.main_thread():
            raise DoesNotFitError("the head", 2, 1, "planted")
        return fit_machine(sizes, *args, **options)

    monkeypatch.setattr(resolve, "fit_machine", refused)
    prompt = random_ids(PROMPT)
    with (
        pytest.warns(RuntimeWarning, match="does not fit together with its MTP head"),
        engine(path, 2, "kv", **ON_RANKS["learned"]) as ours,
    ):
        result = ours.generate(prompt, greedy(NEW))
    assert "ngram" in result.stats["levels"]
    assert_equal_but_for_ties(model, prompt, result.token_ids, transformers_text(model, prompt))


def quantised_with_head(path: Path, stored: str) -> None:
    """Makes a quantised model with a head in 16 bits, or in FP8 as its layers are."""
    family, sizes, quantised, head_too = STORED[stored]
    model, file = make_model(family, path, **sizes), path / "model.safetensors"
    layers = load_file(file)
    add_head(path, model)
    head = {name: each.bfloat16() for name, each in load_file(file).items() if name not in layers}
    save_file(layers, file, {"format": "pt"})
    quantised(path, model)
    layers = load_file(file)
    if head_too:
        full = f"model.layers.{model.config.layer_types.index('full_attention')}."
        of_layer = {name: each for name, each in layers.items() if name.startswith(full)}
        head |= {name.replace(full, "mtp.layers.0."): each for name, each in of_layer.items()}
    save_file({name: each.clone() for name, each in (layers | head).items()}, file)


def drafting_bytes(sizes: ModelSizes) -> tuple[int, int]:
    """Of the head, and of everything that drafts with it."""
    return sizes.drafter_layouts.nbytes, sizes.requirements(0).drafting_bytes


@pytest.mark.parametrize(
    ("stored", "ranks"),
    # Layers whose tokens choose their keys do not spread over GPUs.
    [(each, ranks) for each in STORED for ranks in (1, 2) if ranks == 1 or "streams" not in each],
)
def test_a_folder_is_planned_with_the_bytes_of_its_own_head(
    tmp_path, leaders, monkeypatch, stored: str, ranks: int
) -> None:
    quantised_with_head(tmp_path, stored)
    resolved, of_engine = plan_inputs.resolve, []

    def recorded(sizes: ModelSizes, *args: object, **options: object) -> Resolved:
        if threading.current_thread() is threading.main_thread():
            of_engine.append((sizes.method, sizes.device, *drafting_bytes(sizes)))
        return resolved(sizes, *args, **options)

    monkeypatch.setattr(plan_inputs, "resolve", recorded)
    options = {"weights": "stored", "dtype": "bfloat16", "draft": "mtp"}
    with engine(tmp_path, ranks, max_context=200, **options):
        ((method, device, *expected),) = of_engine
    words = ["plan", tmp_path, "--gpu", "rtx4090", "--gpus", ranks, "--context", 200]
    case = _case(
        _parser()[0].parse_args([*map(str, words), "--new-tokens", "20", "--dtype", "bfloat16"])
    )
    assert [*drafting_bytes(replace(case, device=device).sizes(method))] == expected
