"""C1: a context that is appended to and rolled back computes what a fresh one does."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from float_bounds import assert_within, forward_bound
from helpers import BLOCK, PLACEMENTS, VOCAB, random_ids
from oracle import assert_equal_but_for_ties, greedy
from recorder import ReplayRecorder

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.context import Context, Interrupted
from triforce_core.decoding.decoder import advance
from triforce_core.decoding.levels import Tallies, Tally
from triforce_offload.errors import LinkError, OutOfDeviceMemoryError
from triforce_offload.kv.store import KVStore
from triforce_offload.link.emulated import EmulatedLink

CONTEXT = 160
METHODS = {
    "autoregressive": {"method": "autoregressive"},
    "ngram": {"method": "speculative", "draft_tokens": 6},
    "retrieval": {"draft": "none", "budget": 32, "draft_tokens": 5},
    "small chunks": {"draft": "ngram", "budget": 24, "chunk_size": 4},
    "model": {"draft": "{model}", "budget": 48, "draft_tokens": 7, "inner_draft_tokens": 3},
}


def engine(path, method: str, placement: str = "kv", **options: object) -> Engine:
    chosen = METHODS[method]
    chosen = {k: path if v == "{model}" else v for k, v in chosen.items()}
    return Engine.from_pretrained(
        path,
        device="cpu",
        max_context=CONTEXT,
        block_tokens=BLOCK,
        placement=PLACEMENTS[placement],
        **chosen | options,
    )


def another(choose: random.Random, known: Sequence[int]) -> list[int]:
    """A prompt that shares some of what is known, a little or nothing, and goes on as it likes."""
    kept = choose.choice((0, choose.randint(0, len(known)), len(known)))
    new = choose.choice((1, choose.randint(1, 6), choose.randint(1, 60)))
    kept = min(kept, CONTEXT - 30 - new)
    return [*known[:kept], *(choose.randrange(VOCAB) for _ in range(new))]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "placement", ["resident", "kv", "kv-in-part", "kv-reclaimed", "both-one-slot"]
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3-windows", "mistral-windows"])
def test_logits_equal_those_of_a_fresh_model_whatever_the_context_held(
    tiny, family: str, placement: str
) -> None:
    """Prompts that share any beginning, passes between them, and readings that are interrupted."""
    path, twin = tiny(family)
    exact, bound = copy.deepcopy(twin).double(), forward_bound(twin, CONTEXT).logits
    choose = random.Random(placement)
    with engine(path, "ngram", placement) as ours:
        runtime = ours.runtime
        before = runtime.memory.available_bytes, runtime.host_blocks.taken_bytes
        context, known, reused = Context(ours.models), [], 0
        for _ in range(40):
            prompt = another(choose, known)
            if choose.random() < 0.2:
                stop = choose.randrange(3)

                def interrupt(layer: int, stop: int = stop) -> None:
                    if layer == stop:
                        raise Interrupted

                with pytest.raises(Interrupted):
                    context.prefill(prompt, 20, interrupt)
            read = context.prefill(prompt, 20, lambda _: None)
            reused += read.reused
            with torch.no_grad():
                expected = exact(torch.tensor([prompt])).logits[0, -1:]
            assert_within(read.logits, expected, bound)
            decoder = ours.drafting.decoder(
                context, SamplingParams(20), _rule(choose), (), Tallies(Tally(), Tally())
            )
            for i in range(choose.randint(0, 4)):
                if i:
                    advance(decoder, context.run, 16)
                else:
                    decoder.first(read)
                context.refresh(1)
            known = context.text.tokens
            context.end()
        assert reused > 300
        context.close()
        assert (runtime.memory.available_bytes, runtime.host_blocks.taken_bytes) == before


def _rule(choose: random.Random):
    from triforce_core.decoding.acceptance import make_rule

    return make_rule("optimal", choose.randrange(1 << 30), torch.device("cpu"))


@pytest.mark.first
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("placement", ["kv", "kv-reclaimed"])
def test_greedy_text_is_that_of_a_fresh_context(tiny, method: str, placement: str) -> None:
    """Whatever drafts, and whatever the context held before."""
    path, twin = tiny("llama")
    choose, known = random.Random(method), []
    with engine(path, method, placement) as ours:
        for _ in range(8):
            prompt = another(choose, known)
            theirs = twin.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
            result = ours.generate(prompt, greedy(20))
            expected = theirs[0, len(prompt) :].tolist()
            assert_equal_but_for_ties(twin, prompt, result.token_ids, expected)
            afresh = ours.generate(prompt, greedy(20), reuse=False)
            assert_equal_but_for_ties(twin, prompt, afresh.token_ids, expected)
            assert afresh.stats["reused_tokens"] == 0
            known = prompt + result.token_ids


def test_of_a_prompt_all_is_reused_that_the_text_begins_with(tiny) -> None:
    path, _ = tiny("llama")
    prompt = random_ids(60)
    with engine(path, "retrieval") as ours:
        first = ours.generate(prompt, greedy(10))
        text = prompt + first.token_ids

        def reused(tokens: list[int], **options: bool) -> int:
            return ours.generate(tokens, greedy(2), **options).stats["reused_tokens"]

        assert first.stats["reused_tokens"] == 0
        # A text's last token was not fed; a prompt's last token is read anew.
        assert reused([*text, 5, 6]) == 69
        assert reused(text) == 69
        assert reused(prompt) == 59
        assert reused([*prompt[:33], VOCAB - 1 - prompt[33]]) == 33
        assert reused(random_ids(20, 3)) == 0
        assert reused(random_ids(20, 3)) == 19
        assert reused(random_ids(20, 3), reuse=False) == 0
        ours.forget()
        assert reused(random_ids(20, 3)) == 0


def test_without_reuse_a_request_is_bitwise_that_of_a_new_engine(tiny, monkeypatch) -> None:
    from oracle import LogitsRecorder

    path, _ = tiny("llama")
    recorder = LogitsRecorder(monkeypatch)
    params = SamplingParams(30, temperature=1.0, seed=5)
    with engine(path, "model", draft_tokens=4) as ours:
        ours.generate(random_ids(80), params)
        recorder.take()
        again = ours.generate(random_ids(70, 2), params, reuse=False)
        rows = recorder.take()
    with engine(path, "model", draft_tokens=4) as fresh:
        expected = fresh.generate(random_ids(70, 2), params)
    assert again.token_ids == expected.token_ids
    assert torch.equal(rows, recorder.take())


def test_dynamic_rope_keeps_only_what_it_would_rotate_alike(tiny) -> None:
    """64 trained positions: a longer prompt has frequencies of its own."""
    path, twin = tiny("dynamic-rope")
    text = random_ids(130)
    with Engine.from_pretrained(
        path, device="cpu", max_context=200, block_tokens=BLOCK, method="autoregressive"
    ) as ours:
        for tokens, kept in ((40, 0), (60, 40), (100, 0), (110, 0), (50, 0), (63, 50)):
            prompt = text[:tokens]
            # A copy: transformers remembers the longest text it has seen.
            theirs = copy.deepcopy(twin).generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False
            )
            result = ours.generate(prompt, greedy(12))
            assert result.stats["reused_tokens"] == kept
            assert_equal_but_for_ties(twin, prompt, result.token_ids, theirs[0, tokens:].tolist())


@pytest.mark.first
@pytest.mark.usefixtures("recordable")
@pytest.mark.parametrize("method", ["retrieval", "model"])
def test_graphs_that_one_request_recorded_serve_the_next(tiny, method: str) -> None:
    """At other temperatures too: what is recorded ends at the logits."""
    path, _ = tiny("llama")
    recorder = ReplayRecorder()
    texts, recorded = [], []
    for how in (None, recorder):
        with engine(path, method, accept="coupled") as ours:
            ours.models = replace(ours.models, recorder=how)
            for temperature in (0.0, 0.8, 0.8, 1.2, 0.8, 1.2):
                params = SamplingParams(25, temperature=temperature, top_p=0.9, seed=3)
                texts.append(ours.generate(random_ids(40), params).token_ids)
                recorded.append(recorder.recorded)
    assert texts[:6] == texts[6:]
    assert recorded[10] == recorded[11] > 0, "nothing is recorded again"
    assert recorder.replayed > 10 * recorder.recorded


def test_a_request_that_fails_costs_the_context_and_nothing_else(tiny, monkeypatch) -> None:
    path, _ = tiny("llama")
    original, failing = EmulatedLink.to_device, [False]

    def to_device(link, device, host, after, what=None):
        event = original(link, device, host, after, what)
        if failing[0]:
            link.wait(event)
            event.error = OSError("planted")
        return event

    monkeypatch.setattr(EmulatedLink, "to_device", to_device)
    prompt = random_ids(70)
    with engine(path, "retrieval") as ours:
        before = ours.runtime.memory.available_bytes
        expected = ours.generate(prompt, greedy(20)).token_ids
        failing[0] = True
        with pytest.raises(LinkError, match="planted"):
            ours.generate(prompt + expected, greedy(20))
        assert ours.runtime.memory.available_bytes == before
        assert ours.runtime.host_blocks.taken_bytes == 0
        failing[0] = False
        result = ours.generate(prompt, greedy(20))
    assert result.token_ids == expected
    assert result.stats["reused_tokens"] == 0


def test_a_stream_that_is_dropped_leaves_a_context_that_serves(tiny) -> None:
    path, _ = tiny("llama")
    prompt = random_ids(70)
    with engine(path, "retrieval") as ours:
        expected = ours.generate(prompt, greedy(30)).token_ids
        stream = ours.stream(prompt[:60], SamplingParams(40, temperature=1.0, seed=1))
        pieces = stream.pieces()
        # Tokens of a model without a tokenizer have no text, so it is the request that is run.
        next(iter(stream._pieces), None)
        pieces.close()
        stream.close()
        result = ours.generate(prompt, greedy(30))
    assert result.token_ids == expected
    assert result.stats["reused_tokens"] >= 59


def test_hidden_states_are_gone_when_their_memory_is_lent(tiny, monkeypatch) -> None:
    path, _ = tiny("llama")
    with engine(path, "ngram", "kv-reclaimed") as ours:
        prompt = [token % VOCAB for token in range(77)]
        alive: list[int] = []
        use = KVStore.use_reclaimed

        def look(store: KVStore, counts: Sequence[int]) -> None:
            shape = (len(prompt), ours.config.hidden)
            tensors = (o for o in gc.get_objects() if type(o) is torch.Tensor)
            alive.append(sum(tensor.shape == shape for tensor in tensors))
            use(store, counts)

        monkeypatch.setattr(KVStore, "use_reclaimed", look)
        ours.generate(prompt, SamplingParams(4, temperature=0))
        assert alive == [0]


@pytest.mark.parametrize("refused", [False, True])
def test_lent_memory_comes_back_after_a_reading_that_is_interrupted(
    tiny, monkeypatch, refused: bool
) -> None:
    """And where it is refused, blocks stream and one warning says so."""
    path, _ = tiny("llama")
    prompt = [token % VOCAB for token in range(100)]
    with engine(path, "ngram", "kv-reclaimed") as ours:
        context = Context(ours.models)
        sequence, placement = context.sequence, ours.runtime.plan.placement
        if refused:

            def refuse(*_: object) -> None:
                raise OutOfDeviceMemoryError("planted")

            monkeypatch.setattr(KVStore, "use_reclaimed", refuse)

        def stop(layer: int) -> None:
            raise Interrupted

        def on_device() -> int:
            return sum(map(sequence.kv.on_device, range(3)))

        context.prefill(prompt, 20, lambda _: None)
        with pytest.raises(Interrupted):
            context.prefill([*prompt, *range(60)], 20, stop)
        assert on_device() == placement.resident_kv_blocks
        with pytest.warns(RuntimeWarning, match="planted") if refused else nullcontext():
            # So few tokens are a pass.
            context.prefill([*prompt, 1], 20, lambda _: None)
        lent = 0 if refused else placement.reclaimed_kv_blocks
        assert on_device() == placement.resident_kv_blocks + lent
        context.close()


def test_buffers_that_gather_chunks_are_given_back_before_text_is_read(tiny) -> None:
    path, _ = tiny("llama")
    held: list[int] = []

    def look(what: str, done: int, total: int) -> None:
        held.append(ours.runtime.memory.by_purpose().get("retrieval gather", 0))

    with engine(path, "retrieval", "kv") as ours:
        ours.progress = look
        for seed in range(3):
            prompt = [(seed + token) % VOCAB for token in range(70)]
            ours.generate(prompt, SamplingParams(4, temperature=0))
            assert ours.runtime.memory.by_purpose()["retrieval gather"] > 0
    assert held
    assert not any(held)
