"""F2 to F4 on the whole engine: links that fail, crawl or stall, and host memory that runs out."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext

import pytest
from helpers import BLOCK, PLACEMENTS, random_ids

from triforce_core import Engine, SamplingParams
from triforce_core.cli.terminal.report import print_run
from triforce_core.decoding.contexts.context import Context
from triforce_core.requests.request import Request
from triforce_offload.errors import DoesNotFitError, LinkError
from triforce_offload.link.emulated import EmulatedLink, _Event
from triforce_offload.memory import host
from triforce_offload.memory.host import HostMemory

PROMPT = random_ids(60)
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
METHODS = {
    "autoregressive": {"method": "autoregressive"},
    "speculative": {"method": "speculative", "draft_tokens": 3},
    "triforce": {"draft": "none", "draft_tokens": 3, "budget": 16},
}


class FaultyLink(EmulatedLink):
    """Its copy number `at`, counted in both directions from `count_from_here` on, goes wrong."""

    def __init__(self, fault: str, timeout_seconds: float = 60.0) -> None:
        super().__init__(timeout_seconds=timeout_seconds)
        self.copies, self.at = 0, 0
        self._fault = fault
        self._never = _Event()

    def count_from_here(self, at: int = 0) -> None:
        self.copies, self.at = 0, at

    def to_device(self, device, host, after, what=None):
        return self._copy(super().to_device, device, host, after)

    def to_host(self, host, device, after, what=None):
        return self._copy(super().to_host, host, device, after)

    def _copy(self, copy, target, source, after):
        self.copies += 1
        if self.copies != self.at:
            return copy(target, source, after)
        if self._fault == "refuse":
            raise LinkError("planted")
        if self._fault == "stall":
            return copy(target, source, (*after, self._never))
        event = copy(target, source, after)
        self.wait(event)
        event.error = OSError("planted")
        return event

    def close(self) -> None:
        self._never.done.set()
        super().close()


@pytest.fixture
def faulty(tiny, monkeypatch):
    """An engine over a link that goes wrong, by fault, placement and method."""
    path, _ = tiny("llama")
    engines = []

    def make(fault: str, placement: str, method: str, timeout_seconds: float = 60.0):
        link = FaultyLink(fault, timeout_seconds)
        monkeypatch.setattr("triforce_core.loading.load.open_link", lambda *_: (link, HostMemory()))
        engine = Engine.from_pretrained(
            path,
            device="cpu",
            max_context=100,
            block_tokens=BLOCK,
            placement=PLACEMENTS[placement],
            **METHODS[method],
        )
        engines.append(engine)
        return engine, link

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("fault", "placement", "method", "every"),
    [
        ("fail", "both", "autoregressive", 1),
        # A pass's token is kept by then, and nobody has it.
        ("refuse", "both", "autoregressive", 1),
        ("fail", "both-one-slot", "speculative", 3),
        ("fail", "kv", "triforce", 2),
        ("fail", "processor", "autoregressive", 2),
    ],
)
def test_whichever_copy_fails_the_request_ends_and_the_next_is_right(
    faulty, fault: str, placement: str, method: str, every: int
) -> None:
    """F2: the k-th copy, for every k of the prefill and of the first passes."""
    engine, link = faulty(fault, placement, method)
    memory = engine.runtime.memory
    before = memory.available_bytes
    link.count_from_here()
    expected = engine.generate(PROMPT, GREEDY).token_ids
    copies = link.copies
    assert copies > 30
    most_kept = 0
    for at in range(1, min(copies, 60), every):
        link.count_from_here(at)
        stream = engine.stream(PROMPT, GREEDY)
        with pytest.raises(LinkError, match="planted"):
            list(stream)
        assert memory.available_bytes == before, at
        if stream.ended:
            # Once the prompt is read, what there is is given.
            kept, stats = stream.result.token_ids, stream.result.stats
            assert kept == expected[: len(kept)] == stats["token_ids"]
            assert (stream.result.finish_reason, stats["finish_reason"]) == ("error", "error")
            assert "planted" in stats["error"]
            assert stats["seconds"]["decode"] >= 0
            print_run(stats)
            most_kept = max(most_kept, len(kept))
        if at % 12 == 1:
            link.count_from_here()
            assert engine.generate(PROMPT, GREEDY).token_ids == expected, at
    assert most_kept > 1
    link.count_from_here()
    assert engine.generate(PROMPT, GREEDY).token_ids == expected


@pytest.mark.parametrize(("owner", "name", "left"), [(Context, "end", 0), (Request, "refresh", 2)])
def test_what_fails_between_passes_and_at_the_end_leaves_what_was_generated(
    tiny, monkeypatch, owner: type, name: str, left: int
) -> None:
    """left: calls that still go well."""
    path, _ = tiny("llama")
    calls, run = iter(range(left)), getattr(owner, name)

    def fail(*arguments: object) -> None:
        if next(calls, None) is None:
            raise LinkError("planted")
        run(*arguments)

    with Engine.from_pretrained(
        path, device="cpu", max_context=100, block_tokens=BLOCK, **METHODS["triforce"]
    ) as engine:
        expected = engine.generate(PROMPT, GREEDY).token_ids
        stream = engine.stream(PROMPT, GREEDY)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fail)
            with pytest.raises(LinkError, match="planted"):
                list(stream)
        kept, stats = stream.result.token_ids, stream.result.stats
        assert 1 < len(kept) <= len(expected)
        assert kept == expected[: len(kept)]
        assert (len(kept) == len(expected)) == (owner is Context)
        assert stream.result.finish_reason == "error"
        assert stats["seconds"]["decode"] > 0
        assert engine.generate(PROMPT, GREEDY).token_ids == expected


@pytest.mark.one_in(6)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [2, 14, 25])
def test_a_link_that_stalls_is_an_error_at_the_limit(faulty, method: str, at: int) -> None:
    """F3."""
    engine, link = faulty("stall", "kv", method, timeout_seconds=0.3)
    before = engine.runtime.memory.available_bytes
    link.count_from_here(at)
    began = time.perf_counter()
    with pytest.raises(LinkError, match=r"did not finish within 0\.3 seconds"):
        engine.generate(PROMPT, GREEDY)
    # Once broken it fails at once: the limit passes one time, not once for each copy.
    assert time.perf_counter() - began < 10
    assert engine.runtime.memory.available_bytes == before


@pytest.mark.first
@pytest.mark.parametrize("method", METHODS)
def test_a_slow_link_gives_the_same_tokens(tiny, method: str) -> None:
    """F3: ten times slower."""
    path, _ = tiny("llama")
    texts = set()
    for bandwidth in (None, "20MB/s", "2MB/s"):
        with Engine.from_pretrained(
            path,
            device="cpu",
            max_context=100,
            block_tokens=BLOCK,
            placement=PLACEMENTS["both" if method != "triforce" else "kv"],
            link_bandwidth=bandwidth,
            **METHODS[method],
        ) as engine:
            texts.add(tuple(engine.generate(PROMPT, GREEDY).token_ids))
    assert len(texts) == 1


@pytest.mark.parametrize("allowed", [0, 1, 2, 5])
def test_host_memory_that_runs_out_ends_the_request_only(tiny, monkeypatch, allowed: int) -> None:
    """F4: the n-th allocation, of blocks made as the context grows."""
    path, _ = tiny("llama")
    threads = threading.active_count()
    monkeypatch.setattr(host, "PIECE_BYTES", 2 * BLOCK * 2 * 2 * 16 * 4)
    with Engine.from_pretrained(
        path,
        device="cpu",
        max_context=100,
        block_tokens=BLOCK,
        placement=PLACEMENTS["kv"],
        method="autoregressive",
    ) as engine:
        before = engine.runtime.memory.available_bytes
        original, made = HostMemory.arena, [0]

        def arena(memory, size, **options):
            if made[0] == allowed:
                raise DoesNotFitError("host memory for the test", size, 0, "wait")
            made[0] += 1
            return original(memory, size, **options)

        monkeypatch.setattr(HostMemory, "arena", arena)
        with pytest.raises(DoesNotFitError, match="host memory for the test"):
            engine.generate(PROMPT, GREEDY)
        assert engine.runtime.memory.available_bytes == before
        monkeypatch.setattr(HostMemory, "arena", original)
        result = engine.generate(PROMPT, GREEDY)
        assert len(result.token_ids) == 12
    assert threading.active_count() <= threads


def test_a_copy_of_a_pass_that_was_dropped_may_fail(tiny, monkeypatch) -> None:
    """Nobody waits for it, and it is no fault of the next request."""
    path, _ = tiny("llama")

    def fail(*_: object) -> None:
        raise OSError("planted")

    with Engine.from_pretrained(
        path,
        device="cpu",
        max_context=100,
        block_tokens=BLOCK,
        placement=PLACEMENTS["both"],
        method="autoregressive",
    ) as engine:
        expected = engine.generate(PROMPT, GREEDY, reuse=False).token_ids
        sequence, passes = engine.runtime.sequence(), engine.runtime.passes
        with monkeypatch.context() as patched:
            patched.setattr("triforce_offload.link.emulated.np.copyto", fail)
            passes.begin([sequence])
            passes.end()
        sequence.close()
        assert engine.generate(PROMPT, GREEDY, reuse=False).token_ids == expected


@pytest.mark.parametrize("family", ["llama", "exaone4-windows", "qwen4_exp-moe"])
def test_a_context_is_copied_only_if_the_host_has_memory_for_it(
    tiny, tmp_path, monkeypatch, family: str
) -> None:
    """A file takes a layer's KV, and what windows, states and an index hold at the end of the text;
    a copy takes all layers, and what they hold at all marks.
    """
    path, _ = tiny(family)
    saved = tmp_path / "context"
    with Engine.from_pretrained(path, device="cpu", max_context=200) as engine:
        engine.generate(random_ids(90), SamplingParams(60, temperature=0))
        tokens = len(engine.context_tokens)
        shape, kept = engine.models.whole_kv, engine._contexts.latest.sequence.recent
        layer = tokens * shape.token_bytes
        to_save, to_copy = layer, shape.layers * layer
        for each, store in zip(engine.models.whole_recent, kept, strict=True):
            to_save += each.mark_bytes_at(tokens)
            to_copy += sum(map(each.mark_bytes_at, store.saved_lengths))
        for limit in (to_save - 1, to_save, to_copy - 1, to_copy):
            monkeypatch.setattr(host, "available_host_bytes", lambda limit=limit: limit)
            with refused(limit < to_save):
                assert engine.save_context(saved) == tokens
            assert saved.exists() == (limit >= to_save)
            with refused(limit < to_copy):
                assert len(engine.copy_context().tokens) == tokens
            saved.unlink(missing_ok=True)


def refused(is_refused: bool) -> AbstractContextManager[object]:
    if not is_refused:
        return nullcontext()
    return pytest.raises(DoesNotFitError, match="a copy of the context in host memory needs")
