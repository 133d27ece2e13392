"""Several requests at once: each text is what it would be alone, and weights cross once a pass."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from float_bounds import forward_bound
from helpers import BLOCK, PLACEMENTS, random_ids
from oracle import assert_equal_but_for_ties, assert_own_texts, greedy

from triforce_core import Completion, Engine, SamplingParams
from triforce_core.requests.request import Request
from triforce_offload.errors import DoesNotFitError, LinkError, UsageError
from triforce_offload.plan.placement import Placement

NEW = 30
LENGTHS = (1, 5, BLOCK, 17, 40, 63, 75, 90)
METHODS = {
    "autoregressive": {"method": "autoregressive"},
    "ngram": {"method": "speculative", "draft_tokens": 6},
    "auto": {"draft": "ngram"},
    "tree": {"method": "speculative", "draft": "{model}", "tree": 9},
    "retrieval": {"draft": "none", "budget": 32, "draft_tokens": 5},
    "small chunks": {"draft": "ngram", "budget": 24, "chunk_size": 4},
    "model": {"draft": "{model}", "budget": 48, "draft_tokens": 7, "inner_draft_tokens": 3},
}
PLACED = {
    "resident": PLACEMENTS["resident"],
    "kv": PLACEMENTS["kv-one-slot"],
    "in part": Placement((), True, 40, 0, 2, 1),
    "both": Placement((0, 1, 2), False, 0, 1, 1, 1, copied_layers=(0, 1, 2)),
}


def engine(path, method: str = "auto", placed: str = "kv", **options: object) -> Engine:
    chosen = {k: path if v == "{model}" else v for k, v in METHODS[method].items()}
    where = PLACED.get(placed)
    if where and "budget" not in chosen:
        # Nothing is copied where nothing drafts by it.
        where = replace(where, copied_layers=())
    return Engine.from_pretrained(
        path,
        **{
            "device": "cpu",
            "dtype": "float32",
            "max_context": 160,
            "block_tokens": BLOCK,
            "placement": where,
            "sequences": 3,
            **chosen,
            **options,
        },
    )


def prompts(count: int = len(LENGTHS)) -> list[list[int]]:
    return [random_ids(length, length) for length in LENGTHS[:count]]


@pytest.mark.one_in(32)
@pytest.mark.parametrize("placement", PLACED)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_texts_are_transformers_own(tiny, method: str, placement: str) -> None:
    """More prompts than sequences: they come and go between passes."""
    path, twin = tiny("llama")
    params = [greedy(NEW - i) for i in range(len(LENGTHS))]
    with engine(path, method, placement) as ours:
        results = ours.generate_all(prompts(), params)
        # Once more over contexts that know these texts, or others.
        again = ours.generate_all(prompts()[::-1], params[::-1])[::-1]
    assert_own_texts(twin, prompts(), params, results, again)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "family",
    ["qwen3", "dynamic-rope", "llama-bias", "qwen3_5", "lfm2-moe", "qwen3_moe", "granite4-h-moe"],
)
def test_other_families(tiny, family: str) -> None:
    path, twin = tiny(family)
    with engine(path, "ngram", sequences=8) as ours:
        results = ours.generate_all(prompts(), greedy(NEW))
        alone = [ours.generate(prompt, greedy(NEW), reuse=False) for prompt in prompts()]
    for prompt, result, own in zip(prompts(), results, alone, strict=True):
        assert_equal_but_for_ties(twin, prompt, result.token_ids, own.token_ids)


@pytest.mark.parametrize("sequences", [1, 2, 5, 8])
def test_weights_cross_once_a_pass_however_many_texts_it_is_over(tiny, sequences: int) -> None:
    path, _ = tiny("llama")
    streamed = {"placement": Placement((0, 2), True, 10**6, 1, 1, 1)}
    with engine(path, "autoregressive", "own", sequences=sequences, **streamed) as ours:
        link, runtime = ours.runtime.link, ours.runtime
        own = prompts(sequences)
        ours.generate_all(own, greedy(2))
        before = link.counters()
        results = ours.generate_all(own, greedy(NEW))
        carried = (link.counters() - before).bytes_to_device
        each = runtime.plan.weights_link_bytes
        # Prompts that are known but for their last token are a pass each, then one for all.
        assert carried == each * (sequences + NEW - 1)
        moved = [result.stats["link"]["bytes_of_passes"] for result in results]
        assert sum(moved) == each * (NEW - 1)


def test_seeds_give_what_they_give_alone(tiny) -> None:
    """With coupled draws a seed's text does not depend on what is drafted, nor on company."""
    path, _ = tiny("llama")
    params = [SamplingParams(NEW, temperature=0.8, seed=seed) for seed in range(len(LENGTHS))]
    with engine(path, "ngram", accept="coupled") as ours:
        together = ours.generate_all(prompts(), params)
        alone = [ours.generate(p, own) for p, own in zip(prompts(), params, strict=True)]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]


def test_each_has_its_own_parameters_stops_and_logprobs(speaking) -> None:
    from transformers import AutoModelForCausalLM

    twin = AutoModelForCausalLM.from_pretrained(speaking)
    near = 2 * forward_bound(twin, NEW + 20).logprobs
    params = [
        greedy(NEW),
        SamplingParams(NEW, temperature=0.9, top_k=5, seed=3, logprobs=2, repeat_penalty=1.3),
        replace(greedy(NEW), stop=("e",)),
        SamplingParams(1, temperature=1.0, seed=1),
    ]
    own = ["one text", "another, longer text", "a third", "the last"]
    with engine(speaking, "ngram", accept="coupled", sequences=4) as ours:
        together = ours.generate_all(own, params)
        alone = [ours.generate(p, mine) for p, mine in zip(own, params, strict=True)]
    for ours_together, ours_alone in zip(together, alone, strict=True):
        assert ours_together.text == ours_alone.text
        assert ours_together.finish_reason == ours_alone.finish_reason
    told, expected = (each[1].logprobs for each in (together, alone))
    assert [t.token for t in told] == together[1].token_ids
    for mine, theirs in zip(told, expected, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=near)
        assert [token for token, _ in mine.likeliest] == [token for token, _ in theirs.likeliest]


def test_requests_come_go_and_are_interrupted_while_others_go_on(tiny) -> None:
    path, twin = tiny("llama")
    choose = random.Random(5)
    with engine(path, "retrieval", sequences=4) as ours:
        before = ours.runtime.memory.available_bytes, ours.runtime.host_blocks.taken_bytes
        asked, results, under_way = {}, {}, {}
        for _ in range(25):
            while ours.has_room and choose.random() < 0.7:
                key = len(asked)
                asked[key] = random_ids(choose.randint(1, 80), key)
                count = choose.randint(1, 40)
                received = results[key] = []
                under_way[key] = ours.add_request(asked[key], greedy(count), received.append)
            if under_way and choose.random() < 0.15:
                under_way[choose.choice(list(under_way))].interrupt()
            ours.step()
            under_way = {k: member for k, member in under_way.items() if not ended(results[k])}
        while ours.step():
            pass
        reasons = set()
        for key, prompt in asked.items():
            *_, completion = results[key]
            reasons.add(completion.finish_reason)
            tokens = completion.token_ids
            theirs = twin.generate(
                torch.tensor([prompt]), max_new_tokens=max(1, len(tokens)), do_sample=False
            )[0, len(prompt) :].tolist()
            assert_equal_but_for_ties(twin, prompt, tokens, theirs[: len(tokens)])
        assert reasons == {"length", "interrupted"}
        ours.forget()
        assert (ours.runtime.memory.available_bytes, ours.runtime.host_blocks.taken_bytes) == before


@pytest.mark.parametrize("sequences", [1, 3])
def test_an_interrupt_in_the_middle_of_a_prefill_reaches_its_request(tiny, sequences: int) -> None:
    """From within it nothing else can begin."""
    path, _ = tiny("llama")
    with engine(path, "ngram", sequences=sequences) as ours:
        refused: list[str] = []

        def interrupt(what: str, done: int, count: int) -> None:
            with pytest.raises(UsageError) as caught:
                ours.generate([1, 2], greedy(2))
            refused.append(str(caught.value))
            ours.interrupt()

        ours.progress = interrupt
        told: list = []
        ours.add_request(prompts()[4], greedy(NEW), told.append)
        assert not ours.step()
        assert told[-1].finish_reason == "interrupted"
        assert len(refused) == 1
        assert "one is under way" in refused[0]


def ended(received: list) -> bool:
    return bool(received) and isinstance(received[-1], (Completion, BaseException))


def test_a_prompt_that_goes_on_from_a_text_reads_what_is_new(tiny) -> None:
    path, _ = tiny("llama")
    with engine(path, "retrieval") as ours:
        first = ours.generate_all(prompts(3), greedy(NEW))
        longer = [p + r.token_ids + [7, 8] for p, r in zip(prompts(3), first, strict=True)]
        second = ours.generate_all(longer, greedy(5))
        known = [result.stats["reused_tokens"] for result in second]
    assert known == [len(p) + NEW - 1 for p in prompts(3)]


def test_a_failed_pass_is_told_to_all_and_the_next_requests_are_right(tiny, monkeypatch) -> None:
    path, _ = tiny("llama")
    with engine(path, "ngram") as ours:
        expected = [r.token_ids for r in ours.generate_all(prompts(3), greedy(NEW))]
        ours.forget()
        received = [[], [], []]
        for prompt, told in zip(prompts(3), received, strict=True):
            ours.add_request(prompt, greedy(NEW), told.append)
        ours.step()
        conveyor = ours.runtime.conveyor

        def fails(key: object) -> None:
            raise LinkError("a copy failed")

        with monkeypatch.context() as patch:
            patch.setattr(conveyor, "acquire", fails)
            assert not ours.step()
        for told in received:
            assert isinstance(told[-1], LinkError)
        assert ours.has_room
        again = [r.token_ids for r in ours.generate_all(prompts(3), greedy(NEW))]
    assert again == expected


def test_a_prompt_that_fails_ends_alone(tiny, monkeypatch) -> None:
    path, _ = tiny("llama")
    with engine(path, "ngram") as ours:
        expected = ours.generate(prompts()[3], greedy(NEW)).token_ids
        ours.forget()
        good, bad = [], []
        ours.add_request(prompts()[3], greedy(NEW), good.append)
        ours.step()
        ours.add_request(prompts()[4], greedy(NEW), bad.append)
        (member,) = [m for m in ours._batch.members if m.receive == bad.append]

        def fails(*_: object, **__: object) -> None:
            raise LinkError("a copy failed")

        monkeypatch.setattr(member.context, "prefill_part", fails)
        while ours.step():
            pass
    assert isinstance(bad[-1], LinkError)
    assert len(bad) == 1
    assert good[-1].token_ids == expected


def test_what_cannot_be_taken_is_refused_in_one_sentence(tiny) -> None:
    path, _ = tiny("llama")
    with engine(path, "ngram", sequences=1) as ours:
        told = []
        ours.add_request([1, 2, 3], greedy(4), told.append)
        with pytest.raises(UsageError, match="as many requests under way as it has sequences"):
            ours.add_request([1], greedy(4), told.append)
        with pytest.raises(UsageError, match="one is under way"):
            ours.generate([1], greedy(4))
        while ours.step():
            pass
        assert len(told[-1].token_ids) == 4
        with pytest.raises(UsageError, match="one for each of the prompts; got a list of 1"):
            ours.generate_all([[1], [2]], [greedy(4)])
        with pytest.raises(UsageError, match=r"^the request for prompts\[1\]: token id 1000000 "):
            ours.generate_all([[1], [10**6]], greedy(4))
    for options, message in (
        ({"sequences": 17}, "sequences must be 1 to 16"),
        ({"placed": "own", "placement": PLACEMENTS["kv-reclaimed"]}, "of one text, not of several"),
    ):
        with pytest.raises(UsageError, match=message):
            engine(path, "ngram", **options)


@pytest.mark.first
@pytest.mark.parametrize("method", ["ngram", "retrieval", "model"])
def test_all_texts_fit_in_what_was_planned(tiny, method: str) -> None:
    """Without a placement: what several texts take is in the budget from the start."""
    path, _ = tiny("llama")
    with engine(path, method, "own", sequences=4, device_memory="5MiB") as ours:
        results = ours.generate_all([random_ids(120, i) for i in range(4)], greedy(NEW))
        memory = ours.runtime.memory
        assert all(len(result.token_ids) == NEW for result in results)
        assert memory.peak_bytes <= memory.limit_bytes


def test_what_a_receiver_raises_is_raised_and_ends_its_request_alone(tiny) -> None:
    path, _ = tiny("llama")
    with engine(path, "ngram") as ours:
        expected = ours.generate(prompts()[4], greedy(NEW)).token_ids
        ours.forget()

        def refuses(item: object) -> None:
            raise ZeroDivisionError(type(item).__name__)

        told: list = []
        ours.add_request(prompts()[3], greedy(NEW), refuses)
        ours.add_request(prompts()[4], greedy(NEW), told.append)
        raised = []
        while ours._batch.members:
            try:
                ours.step()
            except ZeroDivisionError as error:
                raised.append(str(error))
    # The model has no tokenizer, so there are no pieces.
    assert raised == ["Completion"]
    assert told[-1].token_ids == expected


def test_an_interrupt_from_the_keyboard_goes_through_and_leaves_the_engine_usable(
    tiny, monkeypatch
) -> None:
    path, _ = tiny("llama")
    with engine(path, "retrieval") as ours:
        expected = ours.generate(prompts()[4], greedy(NEW)).token_ids
        told: list = []
        for prompt in prompts(3):
            ours.add_request(prompt, greedy(NEW), told.append)
        ours.step()

        def pressed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(ours.runtime.conveyor, "acquire", pressed)
            with pytest.raises(KeyboardInterrupt):
                ours.step()
        assert [type(item) for item in told] == [KeyboardInterrupt] * 3
        assert ours.generate(prompts()[4], greedy(NEW)).token_ids == expected


@pytest.mark.parametrize("fails", ["adding", "receiving"])
def test_an_error_ends_all_requests_that_were_made_together(tiny, monkeypatch, fails: str) -> None:
    """The second context has no room, or somebody interrupts the second prefill."""
    path, _ = tiny("llama")
    made: list = []

    def second(error: BaseException) -> None:
        made.append(error)
        if len(made) == 2:
            raise error

    with engine(path, "retrieval") as ours:
        expected = ours.generate(prompts()[4], greedy(NEW)).token_ids
        ours.forget()
        with monkeypatch.context() as patch:
            if fails == "adding":
                known, error = ours._contexts._make, DoesNotFitError("memory", 2, 1, "it")
                patch.setattr(ours._contexts, "_make", lambda: (second(error), known())[1])
            else:
                known, error = Request.prefill, KeyboardInterrupt()
                patch.setattr(Request, "prefill", lambda *args: (second(error), known(*args))[1])
            with pytest.raises(type(error)):
                ours.generate_all(prompts(3), greedy(NEW))
        assert not ours._batch.members
        assert ours.generate(prompts()[4], greedy(NEW)).token_ids == expected
