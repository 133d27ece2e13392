"""KV split: bitwise what dense blocks of bfloat16 give, in three quarters of the bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import BLOCK, PLACEMENTS, placed, random_ids

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.context import Context
from triforce_core.decoding.decoder import PassInput
from triforce_kernels.kv import split_kv
from triforce_offload.errors import UsageError
from triforce_offload.kv.store import KVStore
from triforce_offload.plan.placement import Placement
from triforce_offload.weights.locations import DenseLocation

PROMPT, NEW = random_ids(75), 40


def engine(path: Path, kv: str, **options: object) -> Engine:
    options = {"device": "cpu", "dtype": "bfloat16", "max_context": 120, **options}
    return Engine.from_pretrained(path, kv=kv, block_tokens=BLOCK, **options)


def with_slots(placement: Placement) -> Placement:
    """A block that cannot be split streams, at every placement."""
    return placement.with_slots()


@pytest.fixture(params=["as they are", "some without room"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Also where every third block has more exceptions than the split format takes."""
    if request.param != "as they are":
        calls = iter(range(10**9))
        encode = split_kv.encode_block

        def some(keys_values: torch.Tensor, into: split_kv.SplitKV) -> bool:
            return encode(keys_values, into) and next(calls) % 3 != 1

        monkeypatch.setattr("triforce_offload.kv.block_format.encode_block", some)
    return request.param


@pytest.mark.one_in(20)
@pytest.mark.parametrize("family", ["llama", "llama-mqa", "llama-head-dim", "qwen3"])
@pytest.mark.parametrize("placement", ["resident", "kv-in-part", "both-one-slot"])
def test_logits_are_bitwise_those_of_dense_kv(tiny, room, family: str, placement: str) -> None:
    path, _ = tiny(family)
    logits = []
    for kv in ("dense", "split"):
        where = with_slots(PLACEMENTS[placement])
        options = {"method": "speculative", "draft_tokens": 4, "placement": where}
        with engine(path, kv, **options) as running:
            context = Context(running.models)
            read = context.prefill(PROMPT, 8, lambda layer: None).logits
            fed = [
                context.run(PassInput(torch.tensor([5]), is_kept=True, more=True))
                for _ in range(NEW)
            ]
            several = context.run(PassInput(torch.tensor([7, 8, 9])))
            context.close()
        logits.append(torch.cat((read, *fed, several)))
    dense, split = logits
    assert dense.std() > 1e-3, "it would be no test"
    assert torch.equal(split, dense)


@pytest.mark.one_in(32)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_texts_are_the_same_at_every_placement(tiny, room, placement: str) -> None:
    """Also when a text goes on from one before it, whose last block comes back to the tail."""
    path, _ = tiny("llama")
    params = SamplingParams(NEW, temperature=0.8, top_p=0.9, seed=3)
    options = placed(placement, {"budget": 32, "accept": "coupled", "draft_tokens": 4})
    options["placement"] = with_slots(options["placement"])
    texts = []
    for kv in ("dense", "split"):
        with engine(path, kv, **options) as running:
            result = running.generate(PROMPT, params)
            again = running.generate([*PROMPT[:50], 3, 4, 5], params)
            assert again.stats["reused_tokens"] == 50
        texts.append((result.token_ids, again.token_ids))
        memory = result.stats["memory"]
        assert memory["device_peak_bytes"] <= memory["device_budget_bytes"]
    assert texts[0] == texts[1]


def test_blocks_without_room_are_dense_ones_that_stream(tiny, monkeypatch) -> None:
    path, _ = tiny("llama")
    locations: list[list] = []
    close = KVStore.close

    def closing(store: KVStore) -> None:
        locations.extend(list(store.locations(layer)) for layer in range(store.shape.layers))
        close(store)

    monkeypatch.setattr(KVStore, "close", closing)
    monkeypatch.setattr("triforce_offload.kv.block_format.encode_block", lambda *_: False)
    where = with_slots(PLACEMENTS["resident"])
    with engine(path, "split", method="autoregressive", placement=where) as running:
        result = running.generate(PROMPT, SamplingParams(8, temperature=0))
    assert locations
    assert all(isinstance(location, DenseLocation) for layer in locations for location in layer)
    dense = running.runtime.plan.kv.shape.dense_block_bytes
    assert {location.memory.numel() for layer in locations for location in layer} == {dense}
    assert result.stats["link"]["bytes_to_device"] > 0


def test_three_quarters_cross_the_link_and_lie_on_the_host(tiny) -> None:
    path, _ = tiny("llama-mha")
    found = []
    for kv in ("dense", "split"):
        options = {"method": "autoregressive", "placement": PLACEMENTS["kv"], "max_context": 512}
        with Engine.from_pretrained(
            path, kv=kv, dtype="bfloat16", device="cpu", block_tokens=128, **options
        ) as running:
            stats = running.generate(random_ids(400), SamplingParams(8, temperature=0)).stats
            assert running.plan.kv == kv
            taken = running.runtime.host_blocks.taken_bytes
        found.append((stats["link"]["bytes_to_device"], taken))
        bits = stats["bits_per_number"]["kv"]
        assert bits["stored"] == bits["link"]
    for dense, split in zip(*found, strict=True):
        assert dense
        assert split < 0.77 * dense
    assert bits["stored"] < 12.3, "blocks of 128 tokens, whose bases take 8 / 128 bits"


def test_auto_keeps_dense_blocks_on_a_cpu(tiny) -> None:
    path, _ = tiny("llama")
    with engine(path, "auto", placement=PLACEMENTS["kv"]) as running:
        assert running.plan.kv == "dense"


def test_a_plan_keeps_what_it_was_made_with(tiny, tmp_path) -> None:
    path, _ = tiny("llama")
    with engine(path, "split", placement=PLACEMENTS["kv"]) as running:
        running.plan.write(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["kv"] == "split"
    with Engine.from_pretrained(
        path, device="cpu", dtype="bfloat16", plan=tmp_path / "plan.json"
    ) as running:
        assert running.plan.kv == "split"
        assert running.runtime.plan.kv.shape.split


def test_what_cannot_be_split_is_refused(tiny) -> None:
    path, _ = tiny("llama")
    with pytest.raises(UsageError, match="only bfloat16 can be split, and KV is in float32 here"):
        engine(path, "split", dtype="float32")
    with pytest.raises(UsageError, match="kv 'halves' is not one of auto, dense, split"):
        engine(path, "halves")
    with pytest.raises(UsageError, match="needs KV slots"):
        engine(path, "split", placement=PLACEMENTS["resident"])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kv", ["dense", "split"])
@pytest.mark.parametrize("placement", ["kv", "kv-in-part", "kv-reclaimed"])
def test_chunks_that_are_read_where_they_lie_are_the_same(
    tiny, monkeypatch, room, kv: str, placement: str
) -> None:
    """As a GPU reads registered memory; where some block could not be split the host collects."""
    path, _ = tiny("llama")
    options = {"draft": "none", "budget": 64, "draft_tokens": 4, "accept": "coupled"}
    options["placement"] = with_slots(PLACEMENTS[placement])
    params = SamplingParams(NEW, temperature=0.8, seed=3)
    texts, read, lengths = [], [], []
    for in_place in (False, True):
        monkeypatch.setattr(
            "triforce_offload.kv.direct.reads_in_place", lambda _, here=in_place: here
        )
        with engine(path, kv, **options) as running:
            result = running.generate(PROMPT, params)
        texts.append(result.token_ids)
        read.append(result.stats["retrieval"]["bytes_read_in_place"])
        lengths.append(result.stats["acceptance"]["accepted_lengths"])
    assert texts[0] == texts[1]
    assert lengths[0] == lengths[1], "the same drafts, of the same chunks"
    assert read[0] == 0
    assert (read[1] > 0) == (kv == "dense" or room == "as they are")
