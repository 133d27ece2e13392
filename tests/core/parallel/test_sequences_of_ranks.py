"""Several requests at once over several ranks: each text is what it is alone on one rank."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import product

import pytest
from helpers import PLACEMENTS, add_head, make_model, random_ids
from oracle import assert_own_texts, greedy
from thread_ranks import engine

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts import prefill_parts
from triforce_core.decoding.contexts.calls import Begin, Close, Open, RunHead, RunPass
from triforce_core.requests import loss
from triforce_core.requests.stream import Completion
from triforce_offload.copies import PassCopies
from triforce_offload.errors import DoesNotFitError
from triforce_offload.runtime import Runtime

NEW = 20
PLACED = {name: PLACEMENTS[name] for name in ("resident", "kv", "int4")}
PLACED["processor"] = replace(PLACEMENTS["processor"], reclaimed_kv_blocks=0)
LENGTHS = (1, 17, 40, 63, 90)
METHODS = {
    "autoregressive": {"method": "autoregressive"},
    "speculative": {"method": "speculative", "draft_tokens": 6},
    "tree": {"method": "speculative", "draft": "{model}", "tree": 9},
    "retrieval": {"budget": 32, "draft_tokens": 5},
    "trees of the level": {"budget": 16, "tree": 11, "draft": "none"},
}


def running(path, ranks: int, placed: str, method: str, **options: object) -> Engine:
    chosen = {k: path if v == "{model}" else v for k, v in METHODS[method].items()}
    return engine(path, ranks, PLACED[placed], **{"sequences": 3, **chosen, **options})


def prompts() -> list[list[int]]:
    return [random_ids(length, length) for length in LENGTHS]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("method", "placed"),
    [
        (method, placed)
        for method, placed in product(METHODS, PLACED)
        if "budget" not in METHODS[method] or PLACED[placed].can_draft
    ],
)
def test_greedy_texts_are_transformers_own(tiny, leaders, method: str, placed: str) -> None:
    """More prompts than sequences: they come and go between passes."""
    path, model = tiny("llama")
    params = [greedy(NEW - i) for i in range(len(LENGTHS))]
    with running(path, 2, placed, method) as ours:
        results = ours.generate_all(prompts(), params)
        # Once more over contexts that know these texts, or others.
        again = ours.generate_all(prompts()[::-1], params[::-1])[::-1]
    assert_own_texts(model, prompts(), params, results, again)
    passes = leaders[0].calls.count(RunPass)
    made = sum(own.max_new_tokens for own in params)
    assert passes < 2 * made, "each is over several sequences, or keeps several tokens"


@pytest.mark.parametrize("method", ["speculative", "retrieval"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompts_in_parts(tiny, leaders, monkeypatch, family: str, method: str) -> None:
    """Ranks prefill the same parts, with passes of other requests in between."""
    monkeypatch.setattr(prefill_parts, "LEAST", 16)
    path, model = tiny(family)
    params = [greedy(NEW - i) for i in range(len(LENGTHS))]
    received: list[list] = [[] for _ in LENGTHS]
    with running(path, 2, "kv", method, sequences=len(LENGTHS)) as ours:
        for prompt, own, into in zip(prompts(), params, received, strict=True):
            ours.add_request(prompt, own, into.append)
        while ours.step(in_parts=True):
            pass
    results = [next(item for item in into if isinstance(item, Completion)) for into in received]
    assert_own_texts(model, prompts(), params, results)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["qwen3_5", "gpt-oss-moe", "glm4_lite-moe", "gemma3"])
def test_other_families(tiny, leaders, family: str) -> None:
    path, model = tiny(family)
    with running(path, 2, "kv", "speculative") as ours:
        results = ours.generate_all(prompts(), greedy(NEW))
    assert_own_texts(model, prompts(), [greedy(NEW)] * len(LENGTHS), results)


def test_seeds_give_what_they_give_alone_on_one_rank(tiny, leaders) -> None:
    path, _ = tiny("llama")
    params = [SamplingParams(NEW, temperature=0.9, seed=i) for i in range(len(LENGTHS))]
    with running(path, 1, "kv", "retrieval", accept="coupled", sequences=1) as ours:
        alone = [ours.generate(p, own) for p, own in zip(prompts(), params, strict=True)]
    with running(path, 2, "kv", "retrieval", accept="coupled") as ours:
        together = ours.generate_all(prompts(), params)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    sums = [[rank["checksum"] for rank in result.stats["ranks"]] for result in together]
    assert all(first == second for first, second in sums), "of each sequence's tokens"


def test_a_request_that_is_interrupted_leaves_the_others_whole(tiny, leaders) -> None:
    path, _ = tiny("llama")
    with running(path, 1, "kv", "retrieval", sequences=1) as ours:
        expected = [ours.generate(prompt, greedy(NEW)).token_ids for prompt in prompts()[:3]]
    with running(path, 2, "kv", "retrieval") as ours:
        found: dict[int, Completion] = {}

        def receiver(index: int):
            def receive(item: object) -> None:
                if isinstance(item, Completion):
                    found[index] = item

            return receive

        members = [
            ours.add_request(prompt, greedy(NEW), receiver(i))
            for i, prompt in enumerate(prompts()[:3])
        ]
        ours.step()
        members[1].interrupt()
        while ours.step():
            pass
        # The context that it had is used again.
        again = ours.generate(prompts()[1], greedy(NEW))
    assert [found[i].token_ids for i in (0, 2)] == [expected[0], expected[2]]
    assert found[1].finish_reason == "interrupted"
    assert found[1].token_ids == expected[1][: len(found[1].token_ids)]
    assert again.token_ids == expected[1]


def test_copies_of_a_pass_are_begun_over_all_its_sequences(tiny, leaders, monkeypatch) -> None:
    """By each rank, in the same order."""
    path, _ = tiny("llama")
    begun: dict[int, list[int]] = {}
    begin = PassCopies.begin

    def noted(self: PassCopies, sequences: list) -> None:
        begun.setdefault(threading.get_ident(), []).append(len(sequences))
        begin(self, sequences)

    monkeypatch.setattr(PassCopies, "begin", noted)
    with running(path, 2, "kv", "autoregressive") as ours:
        ours.generate_all(prompts()[:3], greedy(NEW))
    first, second = begun.values()
    assert first == second
    assert first.count(3) > NEW // 2
    assert leaders[0].calls.count(Begin) > 0


def test_a_head_drafts_for_each_of_several_sequences(tmp_path, leaders) -> None:
    model = make_model("qwen3_5", tmp_path)
    add_head(tmp_path, model)
    with running(tmp_path, 2, "kv", "retrieval", draft="mtp", inner_draft_tokens=3) as ours:
        results = ours.generate_all(prompts(), greedy(NEW))
    assert leaders[0].calls.count(RunHead) > 0
    assert_own_texts(model, prompts(), [greedy(NEW)] * len(LENGTHS), results)


def test_a_context_that_the_first_rank_has_no_room_for_is_closed_on_all(
    tiny, leaders, monkeypatch
) -> None:
    path, _ = tiny("llama")
    sequence = Runtime.sequence
    refused: list[int] = []

    def limited(self: Runtime) -> object:
        if threading.current_thread() is threading.main_thread() and not refused:
            refused.append(1)
            raise DoesNotFitError("a context", 2, 1, "planted")
        return sequence(self)

    with running(path, 2, "kv", "speculative") as ours:
        monkeypatch.setattr(Runtime, "sequence", limited)
        with pytest.raises(DoesNotFitError):
            ours.generate(prompts()[1], greedy(NEW))
        assert ours.generate(prompts()[1], greedy(NEW)).token_ids
        calls = leaders[0].calls
        assert calls.count(Open) - calls.count(Close) == 1, "the second one is kept"


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_prompt_that_shares_its_beginning_gets_a_copy_on_all_ranks(
    tiny, leaders, monkeypatch, family: str
) -> None:
    monkeypatch.setattr(loss, "WORTH_COPYING", 16)
    path, _ = tiny(family)
    shared = random_ids(60, 1)
    asked = [shared + random_ids(30, seed) for seed in (2, 3)]
    with running(path, 2, "kv", "retrieval") as ours:
        expected = [ours.generate(prompt, greedy(NEW), reuse=False).token_ids for prompt in asked]
        ours.forget()
        found = [ours.generate(prompt, greedy(NEW)) for prompt in asked]
        assert [each.token_ids for each in found] == expected
        again = ours.generate(asked[0] + expected[0], greedy(2))
        assert again.stats["reused_tokens"] >= len(asked[0])
    if family == "llama":
        assert found[1].stats["reused_tokens"] == len(shared)
