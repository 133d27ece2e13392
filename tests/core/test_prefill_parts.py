"""Prompts that are prefilled in parts, between passes of other requests."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest
import torch
from helpers import BLOCK, PLACEMENTS, random_ids
from oracle import assert_equal_but_for_ties, assert_own_texts, greedy

from triforce_core import Completion, Engine
from triforce_core.decoding.contexts import context as contexts
from triforce_core.decoding.contexts import prefill_parts
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.contexts.prefill_parts import PrefillParts
from triforce_core.requests.request import Request
from triforce_offload.errors import LinkError
from triforce_offload.kv.recent import marks
from triforce_offload.link.link import LinkCounters

PART = 16
LONG, SHORT = random_ids(150, 1), random_ids(20, 2)
FAMILIES = ["llama", "gemma3", "qwen3_5", "lfm2", "granite4-h-moe"]
METHODS = {
    "autoregressive": {"method": "autoregressive"},
    "ngram": {"method": "speculative", "draft_tokens": 6},
    "retrieval": {"draft": "none", "budget": 32, "draft_tokens": 5},
    "model": {"draft": "{model}", "budget": 48, "draft_tokens": 7, "inner_draft_tokens": 3},
}


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch) -> None:
    monkeypatch.setattr(prefill_parts, "LEAST", PART)
    monkeypatch.setattr(contexts, "PREFILL_CHUNK", PART)


def engine(path: Path, method: str = "ngram", placement: str = "kv", **options: object) -> Engine:
    chosen = {k: path if v == "{model}" else v for k, v in METHODS[method].items()}
    return Engine.from_pretrained(
        path,
        **{
            "device": "cpu",
            "dtype": "float32",
            "max_context": 260,
            "block_tokens": BLOCK,
            "placement": PLACEMENTS[placement],
            "sequences": 3,
            **chosen,
            **options,
        },
    )


def results(received: list) -> list[list[int]]:
    return [item.token_ids for item in received if isinstance(item, Completion)]


def serve(ours: Engine) -> None:
    while ours.step(in_parts=True):
        pass


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_marks_are_those_of_a_prompt_at_once(tiny, monkeypatch, family: str) -> None:
    """Bit for bit, as the chunks are the same."""
    monkeypatch.setattr(marks, "MARK_TOKENS", 40)
    path, _ = tiny(family)
    known, last = LONG[:30], random_ids(3)
    with engine(path) as ours, closing(Context(ours.models)) as own:

        def logits(ends: tuple[int, ...]) -> tuple[torch.Tensor, list[list[int]]]:
            """Prefill what is known, then the rest in parts that end there, then cut it."""
            own.roll_back(0)
            own.prefill(known, 9, lambda _: None)
            begin = len(known)
            for end in ends:
                done = own.prefill_part(
                    LONG, range(begin, end), 9, lambda _: None, reused=len(known)
                )
                assert (done is None) == (end < len(LONG))
                begin = end
            assert (done.reused, own.length) == (len(known), len(LONG))
            found = [done.logits, own.prefill([*LONG, *last], 9, lambda _: None).logits]
            reached = [own.sequence.reachable(length) for length in range(len(LONG))]
            return torch.cat(found), reached

        whole, reached = logits((len(LONG),))
        for ends in ((62, 110, 150), (46, 62, 78, 94, 110, 126, 150)):
            parts, also = logits(ends)
            assert torch.equal(parts, whole)
            assert also == reached
    assert reached[len(known)] == len(known), "a shared beginning can be reused"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("placement", ["resident", "kv", "both", "kv-in-part"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_texts_are_what_they_are_alone(tiny, family: str, method: str, placement: str) -> None:
    if family == "qwen3_5" and method == "model":
        pytest.skip("a model with recurrent layers is no draft model")
    if placement == "both" and "budget" in METHODS[method]:
        pytest.skip("a retrieval level needs all weights on the device")
    path, twin = tiny(family)
    prompts = [SHORT, LONG, random_ids(90, 3), LONG[:100] + SHORT]
    with engine(path, method, placement) as ours:
        alone = [ours.generate(prompt, greedy(30), reuse=False).token_ids for prompt in prompts]
        ours.forget()
        received: list[list] = [[] for _ in prompts]
        for prompt, into in zip(prompts[:3], received, strict=False):
            ours.add_request(prompt, greedy(30), into.append)
        while not ours.has_room:
            ours.step(in_parts=True)
        ours.add_request(prompts[3], greedy(30), received[3].append)
        serve(ours)
    for prompt, into, own in zip(prompts, received, alone, strict=True):
        (text,) = results(into)
        assert_equal_but_for_ties(twin, prompt, text, own)


def test_a_prompt_whose_rotation_depends_on_its_length_is_prefilled_at_once(tiny) -> None:
    path, twin = tiny("dynamic-rope")
    with engine(path, "autoregressive", max_context=250) as ours:
        received: list = []
        ours.add_request(LONG, greedy(20), received.append)
        ours.add_request(SHORT, greedy(20), received.append)
        serve(ours)
    params = [greedy(20)] * 2
    ended = [item for item in received if isinstance(item, Completion)]
    by_prompt = sorted(ended, key=lambda each: -each.stats["prompt_tokens"])
    assert_own_texts(twin, [LONG, SHORT], params, by_prompt)


def test_an_interrupted_prompt_ends_before_its_turn(tiny) -> None:
    path, _ = tiny("llama")
    with engine(path) as ours:
        first, second = [], []
        ours.add_request(LONG, greedy(9), first.append)
        waiting = ours.add_request(LONG[::-1], greedy(9), second.append)
        ours.step(in_parts=True)
        waiting.interrupt()
        ours.step(in_parts=True)
        (cut,) = second
        assert (cut.finish_reason, cut.token_ids) == ("interrupted", [])
        assert waiting.ended
        assert not first
        serve(ours)
        assert len(results(first)) == 1


def test_requests_of_other_threads_wait_for_the_end_of_a_part(tiny, monkeypatch) -> None:
    path, _ = tiny("llama")
    known, order = Request.prefill, []
    with engine(path) as ours:

        def add() -> None:
            ours.add_request(SHORT, greedy(2), lambda _: None)
            order.append("added")

        def prefill(self: Request, *args: object) -> None:
            if not order:
                order.append("begins")
                other.start()
                other.join(0.2)
                known(self, *args)
                order.append("ends")
            else:
                known(self, *args)

        other = Thread(target=add)
        monkeypatch.setattr(Request, "prefill", prefill)
        ours.add_request(LONG, greedy(2), lambda _: None)
        ours.step(in_parts=True)
        other.join(30)
        serve(ours)
    assert order == ["begins", "ends", "added"]


def test_the_device_is_waited_for_before_a_part_is_timed(tiny, monkeypatch) -> None:
    """Or the pass after it would be charged for the part."""
    path, _ = tiny("llama")
    order: list[str] = []
    with engine(path) as ours:
        link, took = ours.link, PrefillParts.took
        wait = link.wait_on_host

        def waited(event: object) -> None:
            order.append("waits")
            wait(event)

        def noted(self: PrefillParts, *about: object) -> None:
            order.append("took")
            took(self, *about)

        monkeypatch.setattr(link, "wait_on_host", waited)
        monkeypatch.setattr(PrefillParts, "took", noted)
        ours.add_request(LONG, greedy(2), lambda _: None)
        ours.step(in_parts=True)
        assert order[-2:] == ["waits", "took"]
        serve(ours)


def test_a_running_request_goes_on_between_the_parts(tiny) -> None:
    path, _ = tiny("llama")
    with engine(path, "autoregressive") as ours:
        running = ours.add_request(SHORT, greedy(60), lambda _: None)
        ours.step(in_parts=True)
        long = ours.add_request(LONG, greedy(5), lambda _: None)
        made = [running.made]
        while not long.made:
            ours.step(in_parts=True)
            made.append(running.made)
        assert made == [made[0] + step for step in range(len(LONG) // PART + 1)]


def test_a_short_prompt_does_not_wait_for_a_long_one(tiny) -> None:
    """Nor does the long one wait for ever if short ones keep coming."""
    path, _ = tiny("llama")
    order: list[str] = []
    with engine(path, sequences=8) as ours:
        ours.add_request(LONG, greedy(1), lambda item: order.append("long"))
        ours.step(in_parts=True)
        for step in range(30):
            if ours.has_room:
                ours.add_request(
                    random_ids(PART, step), greedy(1), lambda item: order.append("short")
                )
            ours.step(in_parts=True)
        assert order.index("short") < order.index("long")
        ours.interrupt()
        serve(ours)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_an_interrupted_prompt_keeps_the_parts_that_are_done(tiny, family: str) -> None:
    path, _ = tiny(family)
    with engine(path) as ours:
        expected = ours.generate(LONG, greedy(20)).token_ids
        ours.forget()
        received: list = []
        member = ours.add_request(LONG, greedy(20), received.append)
        for _ in range(3):
            ours.step(in_parts=True)
        member.interrupt()
        ours.step(in_parts=True)
        (cut,) = received
        assert (cut.finish_reason, cut.token_ids) == ("interrupted", [])
        again = ours.generate(LONG, greedy(20))
    assert again.token_ids == expected
    assert again.stats["reused_tokens"] == 3 * PART


def test_a_part_that_fails_ends_its_request_alone(tiny, monkeypatch) -> None:
    path, _ = tiny("llama")
    known, calls = Request.prefill, []

    def fails(self: Request, *args: object) -> None:
        calls.append(self)
        if calls.count(self) == 3:
            raise LinkError("a copy failed")
        known(self, *args)

    with engine(path) as ours:
        expected = ours.generate(SHORT, greedy(20)).token_ids
        ours.forget()
        good, bad = [], []
        monkeypatch.setattr(Request, "prefill", fails)
        ours.add_request(SHORT, greedy(20), good.append)
        ours.add_request(LONG, greedy(20), bad.append)
        serve(ours)
        assert ours.has_room
        monkeypatch.undo()
    assert [type(item) for item in bad] == [LinkError]
    assert results(good) == [expected]


def test_parts_are_long_enough_to_hide_what_crosses() -> None:
    """Each part's layers need 2 seconds to cross; 16 tokens are computed in .1 seconds."""
    parts = PrefillParts()
    taken = []
    for _ in range(12):
        taken.append(rows := parts.rows(10_000))
        assert rows % PART == 0
        parts.took(rows, max(2.0, 0.1 * rows / PART), LinkCounters(busy_seconds=2.0))
    assert taken[:3] == [PART, 2 * PART, 4 * PART]
    assert taken[-1] == 40 * PART, "half of the time"
    for _ in range(12):
        rows = parts.rows(10_000)
        parts.took(rows, 0.1 * rows / PART, LinkCounters())
    assert parts.rows(10_000) == PART, "nothing crosses any more"


def test_no_part_is_short() -> None:
    """The last tokens of a prompt are no part of their own."""
    parts = PrefillParts()
    for tokens in range(1, 200):
        left, rows = tokens, []
        while left:
            rows.append(parts.rows(left))
            left -= rows[-1]
        assert set(rows[:-1]) <= {PART}
        assert len(rows) == 1 or rows[-1] >= PART / 2
