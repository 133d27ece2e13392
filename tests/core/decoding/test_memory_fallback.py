"""A device whose memory another program takes in the middle of a request: less is kept there, and
the text is the same.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import ref

import pytest
import torch
from fault_points import Faults, temporaries
from helpers import BLOCK, PLACEMENTS, random_ids
from recorder import ReplayRecorder

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.drafters.retrieval import RetrievalCache
from triforce_core.model.transformer import Model
from triforce_kernels.host.library import library
from triforce_offload.errors import DoesNotFitError, OutOfDeviceMemoryError
from triforce_offload.kv.store import KVStore

PROMPT = random_ids(3 * BLOCK - 4)
GREEDY = SamplingParams(12, temperature=0)
# Of one seed the text is the same whatever is drafted, and what was said so far changes its law.
SAMPLED = SamplingParams(12, temperature=0.8, seed=3, repeat_penalty=1.3, presence_penalty=0.5)
LENT = {"placement": PLACEMENTS["kv-reclaimed"], "draft": "none", "draft_tokens": 3, "budget": 16}


def engine(path: Path, **options: object) -> Engine:
    given = {"device": "cpu", "max_context": 100, "block_tokens": BLOCK, "accept": "coupled"}
    return Engine.from_pretrained(path, **given | LENT | options)


def generate(
    ours: Engine, params: SamplingParams, faults: Faults
) -> tuple[list[int], list[warnings.WarningMessage]]:
    """Tokens, and what was warned of."""
    with temporaries(faults), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tokens = ours.generate(PROMPT, params, reuse=False).token_ids
    return tokens, [it for it in told if "ran out of memory" in str(it.message)]


# Where rows have the same bits, so have passes of other drafts, and those without drafts.
IN_HALF = pytest.param(
    "bfloat16",
    marks=pytest.mark.skipif(library() is None, reason="needs the compiled kernels"),
)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
@pytest.mark.parametrize("dtype", ["float32", IN_HALF])
def test_a_pass_that_finds_no_memory_is_made_again(tiny, dtype: str, drafter: str, params) -> None:
    """At any operation of a request: text that is read, drafts, passes, chunks that are chosen."""
    path = tiny("llama")[0]
    draft = tiny("llama-mqa")[0] if drafter == "model" else drafter
    faults, options = Faults(), {"draft": draft, "dtype": dtype}
    with engine(path, **options) as ours:
        assert ours.models.same_bits or dtype == "float32"
        expected, told = generate(ours, params, faults)
        count = faults.counts["temporary"]
        assert told == []
    assert count > 1000
    for at in random.Random(len(drafter)).sample(range(1, count), 5):
        with engine(path, **options) as ours:
            # Memory is lent from the first pass on, and chunks are of a text that is there.
            ours.generate(PROMPT, SamplingParams(2, temperature=0))
            faults.arm("temporary", at)
            tokens, told = generate(ours, params, faults)
            assert faults.fired
            faults.disarm()
            assert tokens == expected, at
            assert len(told) <= 1
            again, told = generate(ours, params, faults)
            assert (again, told) == (expected, []), at


def _fails_once(monkeypatch, owner: type, name: str, at: int, *, after: bool) -> None:
    """The call number `at` of a method finds no memory, before it does anything or after."""
    original, calls = getattr(owner, name), 0

    def method(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        given = None if calls == at and not after else original(*args, **options)
        if calls == at:
            raise torch.OutOfMemoryError("CUDA out of memory. planted")
        return given

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize(
    ("method", "owner", "name", "at", "after"),
    [
        # The token is kept already, and its logits are not there.
        ("autoregressive", Model, "logits", 4, False),
        # The second layer's block has left the tail, and the third's has not.
        ("autoregressive", KVStore, "_add_block", 8, True),
        ("triforce", KVStore, "_add_block", 8, True),
        # What was accepted is the text's, and the next pass's chunks are not chosen.
        ("triforce", RetrievalCache, "refresh", 2, False),
        ("triforce", RetrievalCache, "refresh", 2, True),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", IN_HALF])
def test_what_was_kept_of_a_pass_that_failed_is_taken_back(
    tiny, monkeypatch, dtype: str, method: str, owner: type, name: str, at: int, after: bool
) -> None:
    options = {"method": method, "dtype": dtype}
    options |= {} if method == "triforce" else {"budget": None}
    with engine(tiny("llama")[0], **options) as ours:
        expected = ours.generate(PROMPT, SAMPLED).token_ids
    with engine(tiny("llama")[0], **options) as ours:
        ours.generate(PROMPT[:2], SamplingParams(1))
        _fails_once(monkeypatch, owner, name, at, after=after)
        tokens, told = generate(ours, SAMPLED, Faults())
        assert tokens == expected
        # Chunks are chosen a moment later: that was all.
        assert len(told) == (0 if name == "refresh" else 1)


class _Shortage(Faults):
    """From a place on nothing is to be had until enough was given back."""

    def __init__(self, enough: Callable[[], bool]) -> None:
        super().__init__()
        self._enough = enough

    def pass_by(self, kind: str) -> None:
        self.counts[kind] += 1
        if self._at and self.counts[kind] >= self._at and not self._enough():
            self.fail(kind)


ALL = (0, 1, 2)
POOLED = LENT | {
    "draft": "ngram",
    "method": "autoregressive",
    "placement": replace(
        PLACEMENTS["weights"], expert_layers=ALL, processor_layers=ALL, expert_slots=3
    ),
}


def test_nothing_keeps_the_memory_of_pools_that_were_given_up(tiny) -> None:
    with engine(tiny("qwen3_moe")[0], **POOLED) as ours:
        expected = ours.generate(PROMPT, GREEDY, reuse=False).token_ids
        pools = ours.runtime.expert_pools._allocation.bytes
        first, end = pools.data_ptr(), pools.data_ptr() + pools.numel()
        del pools

        def kept() -> int:
            gc.collect()
            tensors = (each for each in gc.get_objects() if type(each) is torch.Tensor)
            return sum(first <= each.data_ptr() < end for each in tensors)

        assert kept() > 0
        assert ours.runtime.give_up_pools()
        assert kept() == 0
        assert not ours.runtime.give_up_pools()
        assert ours.generate(PROMPT, GREEDY, reuse=False).token_ids == expected


def test_pools_of_experts_are_given_up(tiny, monkeypatch) -> None:
    """The CPU computes all experts from then on."""
    with engine(tiny("qwen3_moe")[0], **POOLED) as ours:
        expected, _ = generate(ours, GREEDY, Faults())
        free, pools = ours.runtime.memory.available_bytes, ours.memory_plan.layers
        _fails_once(monkeypatch, Model, "logits", 4, after=False)
        tokens, warned = generate(ours, GREEDY, Faults())
        assert tokens == expected
        (warning,) = warned
        effect = str(warning.message).rpartition("; ")[2]
        assert effect == "the CPU computes every expert, and the GPU keeps none"
        freed = sum(layer.pool_bytes for layer in pools)
        assert ours.runtime.memory.available_bytes - free >= freed > 0
        monkeypatch.undo()
        result = ours.generate(PROMPT, GREEDY, reuse=False)
        assert result.token_ids == expected
        assert result.stats["experts"] is None


@pytest.mark.skipif(library() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize("seed", range(3))
def test_a_seed_says_the_text_in_bfloat16_without_a_retrieval_level_too(tiny, seed: int) -> None:
    """It is dropped in the middle of a text; plain decoding from the start gives the same one."""
    path, dtype = tiny("llama")[0], {"dtype": "bfloat16"}
    # So long, and with distributions so flat, that other bits would show.
    params = SamplingParams(50, temperature=2.0, top_p=1.0, seed=seed)
    with engine(path, method="autoregressive", budget=None, **dtype) as plain:
        expected = plain.generate(PROMPT, params).token_ids
    with engine(path, **dtype, placement=replace(PLACEMENTS["kv"], kv_slots=2)) as ours:
        assert ours.models.same_bits
        ours.generate(PROMPT, SamplingParams(2, temperature=0))
        faults = _Shortage(lambda: not ours.models.budget)
        faults.arm("temporary", 2_000)
        tokens, told = generate(ours, params, faults)
        assert len(told) == 1
        assert ours.models.levels == ["target"]
    assert tokens == expected


@pytest.mark.slow
def test_as_much_is_given_back_as_it_takes(tiny) -> None:
    """Reclaimed memory first, then KV that stays on the device, then the levels that draft."""
    path = tiny("llama")[0]
    placement = replace(PLACEMENTS["kv-reclaimed"], kv_slots=4)
    seen: list[tuple[int, list[str]]] = []
    for enough in (
        lambda runtime, models, kv: kv._mirror is None,
        lambda runtime, models, kv: not any(kv._resident.counts),
        lambda runtime, models, kv: models.levels == ["target"],
    ):
        with engine(path, draft=tiny("llama-mqa")[0], placement=placement) as ours:
            expected = ours.generate(PROMPT, GREEDY).token_ids
            kv = ours._contexts.latest.sequence.kv
            faults = _Shortage(partial(enough, ours.runtime, ours.models, kv))
            with temporaries(faults):
                ours.generate(PROMPT, GREEDY, reuse=False)
            middle = 2 * faults.counts["temporary"] // 3
            before = ours.runtime.memory.available_bytes
            faults.arm("temporary", middle)
            tokens, told = generate(ours, GREEDY, faults)
            assert tokens == expected
            # Released memory is another program's: nothing takes it again.
            assert ours.runtime.memory.available_bytes > before
            seen.append((len(told), ours.models.levels))
            again = ours.generate(PROMPT, GREEDY, reuse=False)
            assert again.token_ids == expected
            resident = again.stats["placement"]["resident_kv_blocks"]
            assert (resident > 0) == (len(told) < 2)
            assert (ours.runtime.plan.placement.resident_kv_blocks > 0) == (len(told) < 2)
    assert seen == [
        (1, ["model", "retrieval", "target"]),
        (2, ["model", "retrieval", "target"]),
        (3, ["target"]),
    ]


@pytest.mark.parametrize("kv", ["dense", "split"])
def test_kv_that_stays_on_the_device_goes_to_the_host_as_it_is(tiny, monkeypatch, kv: str) -> None:
    """And if the host has no memory for it, it stays."""
    options = {"method": "autoregressive", "budget": None, "kv": kv, "dtype": "bfloat16"}
    placement = replace(PLACEMENTS["kv-in-part"], resident_kv_blocks=3)
    with engine(tiny("llama")[0], placement=placement, **options) as ours:
        ours.generate(PROMPT, SamplingParams(1))
        # Of a prompt that was read before.
        expected = ours.generate(PROMPT, GREEDY).token_ids
        sequence, blocks = ours._contexts.latest.sequence, ours.runtime.host_blocks
        store, before = sequence.kv, ours.runtime.memory.available_bytes
        was = [store.on_host(layer) for layer in range(store.shape.layers)]

        def refuse(blocks: int) -> None:
            raise DoesNotFitError("host memory for the test", blocks, 0, "wait")

        with monkeypatch.context() as patched:
            patched.setattr(blocks, "make_room", refuse)
            assert not sequence.give_up_resident()
        assert ours.runtime.memory.available_bytes == before
        assert sequence.give_up_resident()
        assert not sequence.give_up_resident()
        size = store.shape.block_bytes
        assert ours.runtime.memory.available_bytes == before + 3 * size
        assert all(not store.on_device(layer) for layer in range(store.shape.layers))
        for layer, whole in enumerate(was):
            assert torch.equal(store.on_host(layer), whole)
        assert ours.generate(PROMPT, GREEDY).token_ids == expected


@pytest.mark.usefixtures("recordable")
def test_recorded_forwards_go_with_the_level_that_they_belong_to(tiny) -> None:
    """And nothing is recorded of levels that are gone."""
    recorder, placement = ReplayRecorder(), replace(PLACEMENTS["kv"], kv_slots=2)
    with engine(tiny("llama")[0], placement=placement) as ours:
        expected = ours.generate(PROMPT, GREEDY).token_ids
        ours.models = replace(ours.models, recorder=recorder)
    with engine(tiny("llama")[0], placement=placement) as ours:
        ours.models.recorder = recorder
        assert ours.generate(PROMPT, GREEDY).token_ids == expected
        level = ref(ours._contexts.latest.levels.model)
        count = recorder.recorded
        assert count > 0
        faults = _Shortage(lambda: not ours.models.budget)
        faults.arm("temporary", 500)
        tokens, told = generate(ours, GREEDY, faults)
        assert (tokens, recorder.recorded) == (expected, count)
        assert [str(it.message).rpartition("; ")[2] for it in told] == [
            "the retrieval level is dropped"
        ]
        gc.collect()
        assert level() is None
        assert ours.models.levels == ["target"]


def test_kv_stays_where_none_can_stream(tiny) -> None:
    with engine(
        tiny("llama")[0], placement=PLACEMENTS["resident"], method="autoregressive", budget=None
    ) as ours:
        ours.generate(PROMPT, GREEDY)
        assert not ours._contexts.latest.sequence.give_up_resident()


def test_where_nothing_can_be_given_back_what_was_said_stays(speaking) -> None:
    placement = replace(PLACEMENTS["kv"], kv_slots=2)
    options = {"placement": placement, "method": "autoregressive", "budget": None}
    with engine(speaking, **options) as ours:
        expected = ours.generate(PROMPT, GREEDY)
        said, faults = [], Faults()
        stream = ours.stream(PROMPT, GREEDY, reuse=False)

        def listen() -> None:
            for piece in stream.pieces():
                said.append(piece.text)
                if len(said) == 5:
                    faults.arm("temporary", 20)

        with temporaries(faults), pytest.raises(OutOfDeviceMemoryError, match="planted"):
            listen()
        assert len(said) >= 5
        assert expected.text.startswith("".join(said))
        assert ours.generate(PROMPT, GREEDY).token_ids == expected.token_ids
