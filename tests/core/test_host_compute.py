"""Layers that the processor computes in passes: the text, what crosses, and when they pay."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import BLOCK, PLACEMENTS, random_ids
from tiny_parts import LAYERS

from triforce_core import Engine, SamplingParams
from triforce_core.loading.devices import check_processor
from triforce_core.model.transformer import Model
from triforce_core.settings import EngineConfig
from triforce_offload.errors import LinkError, UsageError
from triforce_offload.kv.caches.processor import PendingAttention, ProcessorAttention
from triforce_offload.kv.scores import ChunkScores
from triforce_offload.machine.processor import measure_processor
from triforce_offload.plan.memory_plan import LayerPlan, Where
from triforce_offload.plan.placement import Placement
from triforce_offload.plan.placing import for_processor
from triforce_offload.weights.layouts import Views
from triforce_offload.weights.locations import processor_dtype

GREEDY = SamplingParams(12, temperature=0)
ALL = PLACEMENTS["weights"]
OPTIONS = {"device": "cpu", "max_context": 200, "block_tokens": BLOCK, "draft": "none"}


@pytest.mark.first
@pytest.mark.parametrize(
    "family",
    ["llama", "gemma3", "qwen3_5", "lfm2-moe", "qwen3_moe", "gpt-oss-moe", "nemotron_h-latent-moe"],
)
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_text_is_the_same_at_every_share(tiny, family: str, stochastic: bool) -> None:
    path, _ = tiny(family)
    params = SamplingParams(12, temperature=0.8, seed=3) if stochastic else GREEDY
    with Engine.from_pretrained(path, placement=ALL, **OPTIONS) as engine:
        plain = engine.generate(random_ids(75), params)
    crossed = [plain.stats["link"]["bytes_to_device"]]
    for layers in ((1,), (0, 2), (0, 1, 2)):
        placement = replace(ALL, processor_layers=layers)
        with Engine.from_pretrained(path, placement=placement, **OPTIONS) as engine:
            result = engine.generate(random_ids(75), params)
            left = sum(each.link_bytes for each in engine.memory_plan.layers)
        assert result.token_ids == plain.token_ids, layers
        link, passes = result.stats["link"], result.stats["passes"]
        assert link["bytes_to_device"] == passes * left
        # The device computes the prompt.
        assert link["prefill_bytes_to_device"] == plain.stats["link"]["prefill_bytes_to_device"]
        assert result.stats["placement"]["processor_layers"] == len(layers)
        crossed.append(link["bytes_to_device"])
    assert crossed == sorted(crossed, reverse=True)
    assert crossed[-1] == 0


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "qwen3_5", "lfm2", "nemotron_h-latent-moe", "gpt-oss-moe"]
)
def test_layers_in_half_precision_are_computed_in_float32(tiny, monkeypatch, family: str) -> None:
    """By compiled kernels. What comes back is in the dtype of the device, and nearer to what a
    model in float32 gives for the same token than what the device computes.
    """
    path, _ = tiny(family)
    given, returned = set(), []
    forward, layer = Model._forward, Model._layer

    def note_layer(model: Model, index: int, w: Views, hidden: torch.Tensor, *rest: object) -> None:
        given.add((w.by_processor, hidden.dtype))
        layer(model, index, w, hidden, *rest)

    def note_forward(*arguments: object) -> torch.Tensor:
        returned.append(forward(*arguments).clone())
        return returned[-1]

    monkeypatch.setattr(Model, "_layer", note_layer)
    monkeypatch.setattr(Model, "_forward", note_forward)
    options = OPTIONS | {"same_bits": "off", "method": "autoregressive"}
    always = replace(GREEDY, max_new_tokens=8, logit_bias={7: 1e4})
    passes = {}
    for dtype, layers in (("float32", ()), ("bfloat16", ()), ("bfloat16", (0, 1, 2))):
        placement = replace(ALL, processor_layers=layers)
        returned.clear()
        with Engine.from_pretrained(path, placement=placement, dtype=dtype, **options) as engine:
            engine.generate(random_ids(75), always)
        assert {hidden.dtype for hidden in returned} == {getattr(torch, dtype)}
        passes[dtype, layers] = torch.cat(returned[1:]).double()
    bfloat16 = torch.bfloat16
    expected = {(False, torch.float32), (False, bfloat16), (True, processor_dtype(bfloat16))}
    assert given == expected
    exact, device, processor = passes.values()
    assert exact.shape == (7, exact.shape[1])
    if processor_dtype(bfloat16) is not bfloat16:
        assert (processor - exact).norm() < (device - exact).norm()


@pytest.mark.first
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_left_to_the_processor_change_neither_text_nor_scores(
    tiny, monkeypatch, dtype: str
) -> None:
    """And what the link brings falls by their share. Chunks are chosen by the same scores."""
    path, _ = tiny("llama")
    placement = Placement((), True, 3, 0, 3, 2)
    options = OPTIONS | {"budget": 32, "dtype": dtype, "draft_tokens": 4}
    seen: dict[float, list[torch.Tensor]] = {}
    taken = ChunkScores.take
    texts, crossed, share = {}, {}, 0.0

    def take(scores: ChunkScores, tokens: int, chunks: int) -> torch.Tensor:
        result = taken(scores, tokens, chunks)
        seen.setdefault(share, []).append(result.clone())
        return result

    monkeypatch.setattr(ChunkScores, "take", take)
    for share in (0.0, 0.4, 1.0):
        where = replace(placement, processor_kv=share)
        with Engine.from_pretrained(path, placement=where, **options) as engine:
            result = engine.generate(random_ids(100), GREEDY)
            plan = engine.memory_plan
        texts[share], link = result.token_ids, result.stats["link"]
        crossed[share] = link["bytes_to_device"] / result.stats["passes"]
        assert link["prefill_bytes_to_device"] == 0
        assert result.stats["retrieval"]["churn"] is not None, "it was refreshed"
    # What is left are chunks for the retrieval cache.
    assert crossed[0.0] > crossed[0.4] > crossed[1.0]
    assert plan.kv.by_processor == plan.kv.away > 0
    # In bfloat16 a text may go on differently after a tie.
    if dtype == "float32":
        assert texts[0.0] == texts[0.4] == texts[1.0]
    # Scores are kept in bfloat16.
    bound = 2**-7 if dtype == "float32" else 0.05
    for share in (0.4, 1.0):
        torch.testing.assert_close(seen[share][0], seen[0.0][0], rtol=bound, atol=bound)


def test_split_blocks_are_read_where_they_are(tiny) -> None:
    path, _ = tiny("llama")
    options = OPTIONS | {"dtype": "bfloat16", "same_bits": "off", "method": "autoregressive"}
    logits = {}
    for kv in ("dense", "split"):
        placement = Placement((), True, 3, 0, 3, 2, processor_kv=0.7)
        with Engine.from_pretrained(path, placement=placement, kv=kv, **options) as engine:
            result = engine.generate(random_ids(100), replace(GREEDY, logprobs=4))
            logits[kv] = result.logprobs
            assert engine.memory_plan.kv.by_processor > 0
    # Without loss: the same numbers in the same order.
    assert logits["dense"] == logits["split"]


def test_what_fails_in_the_thread_reaches_the_request(tiny, monkeypatch) -> None:
    """And the context can be used again."""
    path, _ = tiny("llama")
    placement = Placement((), True, 3, 0, 3, 2, processor_kv=0.7)
    with Engine.from_pretrained(path, placement=placement, **OPTIONS) as engine:
        expected = engine.generate(random_ids(75), GREEDY).token_ids

        def fails(*arguments: object) -> None:
            raise LinkError("the memory is broken")

        with monkeypatch.context() as broken:
            broken.setattr(ProcessorAttention, "_attended", fails)
            with pytest.raises(LinkError, match="the memory is broken"):
                engine.generate(random_ids(75), GREEDY)
        assert engine.generate(random_ids(75), GREEDY).token_ids == expected


def test_an_interrupted_pass_waits_for_the_thread(tiny, monkeypatch) -> None:
    """Blocks are given back only once nothing reads them."""
    path, _ = tiny("llama")
    placement = Placement((), True, 3, 0, 3, 2, processor_kv=0.7)
    attended, reading, done = ProcessorAttention._attended, threading.Event(), []

    def slow(*arguments: object) -> object:
        reading.set()
        time.sleep(0.2)
        done.append(attended(*arguments))
        return done[-1]

    def interrupted(*arguments: object) -> None:
        reading.wait()
        raise KeyboardInterrupt

    with Engine.from_pretrained(path, placement=placement, **OPTIONS) as engine:
        expected = engine.generate(random_ids(75), GREEDY).token_ids
        with monkeypatch.context() as late:
            late.setattr(ProcessorAttention, "_attended", slow)
            late.setattr(PendingAttention, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(random_ids(75), GREEDY)
            assert len(done) == 1
        assert engine.generate(random_ids(75), GREEDY).token_ids == expected


def test_drafts_and_several_sequences_keep_their_texts(tiny) -> None:
    path, _ = tiny("llama")
    prompts = [random_ids(n) * 2 for n in (31, 40)]
    with Engine.from_pretrained(path, method="autoregressive", **OPTIONS) as engine:
        expected = [engine.generate(prompt, GREEDY).token_ids for prompt in prompts]
    for options in (
        {"draft": "ngram", "draft_tokens": 4},
        {"draft": "ngram", "tree": 6},
        {"draft": path, "draft_tokens": 4},
        {"draft": "ngram", "sequences": 2},
    ):
        placement = replace(PLACEMENTS["processor"], reclaimed_kv_blocks=0)
        with Engine.from_pretrained(
            path, **OPTIONS | options, placement=placement, method="speculative"
        ) as engine:
            results = engine.generate_all(prompts, GREEDY)
        assert [result.token_ids for result in results] == expected, options


def test_a_share_of_what_streams_is_computed(tiny) -> None:
    path, _ = tiny("llama")
    options = OPTIONS | {"method": "autoregressive", "dtype": "float32", "same_bits": "off"}
    with Engine.from_pretrained(path, **options, placement=ALL) as engine:
        streaming = engine.memory_plan
        expected = engine.generate(random_ids(75), GREEDY).token_ids
    # Nothing but KV blocks could be given up for weights.
    options["device_memory"] = streaming.device_bytes - streaming.kv.device_bytes
    counts = {}
    for share in ("auto", "off", 0.5, 1.0):
        with Engine.from_pretrained(path, **options, host_compute=share) as engine:
            plan = engine.memory_plan
            assert engine.generate(random_ids(75), GREEDY).token_ids == expected
        assert plan.weights_prefill_link_bytes > 0
        counts[share] = plan.layer_counts["processor_layers"], len(for_processor(plan))
    # On a CPU the device is the processor: nothing is gained unasked.
    assert counts["auto"] == counts["off"]
    assert counts["off"][0] == 0
    assert counts[1.0][0] == counts[1.0][1] > 1
    assert counts[0.5][0] == round(counts[0.5][1] / 2)


def test_a_plan_file_says_which_layers(tiny, tmp_path: Path) -> None:
    path, _ = tiny("llama")
    placement, file = PLACEMENTS["processor"], tmp_path / "plan.json"
    with Engine.from_pretrained(path, placement=placement, **OPTIONS) as engine:
        engine.plan.write(file)
    raw = json.loads(file.read_text())
    assert raw["processor_layers"] == [0, 2]
    with Engine.from_pretrained(path, plan=file, device="cpu") as engine:
        assert engine.memory_plan.placement.processor_layers == (0, 2)
        assert "2 computed by the CPU" in engine.plan.line(LAYERS, 1)
    with Engine.from_pretrained(path, plan=file, device="cpu", host_compute="off") as engine:
        assert engine.memory_plan.placement.processor_layers == ()


@pytest.mark.parametrize("value", [1.5, -0.1, "some", True, None, float("nan")])
def test_a_share_is_a_number_from_0_to_1(value: object) -> None:
    with pytest.raises(UsageError, match="host_compute must be auto, off or a share from 0 to 1"):
        EngineConfig(host_compute=value)


def test_off_takes_what_a_plan_leaves_to_the_processor_back() -> None:
    placed = EngineConfig(placement=PLACEMENTS["processor"])
    assert placed.uses_processor
    assert not placed.changed(host_compute="off").uses_processor


def test_a_share_of_nothing_changes_nothing(tiny) -> None:
    path, _ = tiny("llama")
    with Engine.from_pretrained(path, **OPTIONS, host_compute=0.5) as engine:
        plan = engine.memory_plan
        assert plan.kv.away == 0
        assert not plan.streams
        assert not plan.placement.uses_processor


@pytest.mark.parametrize("share", [0.2, 0.5, 0.7])
def test_stats_count_the_blocks_that_do_not_cross(tiny, share: float) -> None:
    path, _ = tiny("llama")
    placement = Placement((), True, 4, 0, 3, 2, processor_kv=share)
    options = OPTIONS | {"method": "autoregressive", "placement": placement}
    with Engine.from_pretrained(path, **options) as engine:
        # One pass, over blocks that are complete.
        stats = engine.generate(random_ids(7 * BLOCK + 1), SamplingParams(2)).stats
        block = engine.memory_plan.kv.shape.block_bytes
    where = stats["placement"]
    away = where["kv_blocks"] - where["resident_kv_blocks"]
    crossed = stats["link"]["bytes_to_device"] // block
    assert crossed == (away - where["processor_kv_blocks"]) * stats["passes"]
    assert 0 < where["processor_kv_blocks"] < away


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"processor_layers \[1\] are not all streamed_layers"):
        Placement((0,), True, 0, 1, 1, 1, processor_layers=(1,))
    with pytest.raises(UsageError, match="cannot be both file_layers and processor_layers"):
        Placement((0,), True, 0, 1, 1, 1, file_layers=(0,), processor_layers=(0,))


def test_a_layer_of_the_processor_crosses_in_prefills_only() -> None:
    layer = LayerPlan(Where.PROCESSOR, 100)
    assert (layer.device_bytes, layer.host_bytes, layer.processor_bytes) == (0, 100, 100)
    assert (layer.prefill_link_bytes, layer.link_bytes, layer.file_bytes) == (100, 0, 0)
    assert not layer.can_draft
    assert replace(layer, copy_bytes=30).can_draft


def test_the_processor_is_measured_where_it_has_kernels(monkeypatch) -> None:
    from triforce_kernels import dispatch

    measure_processor.cache_clear()
    monkeypatch.setattr(dispatch, "_forced", dispatch.REFERENCE)
    assert measure_processor() is None
    measure_processor.cache_clear()
    # Triton does not run on a processor without its interpreter.
    monkeypatch.setattr(dispatch, "_forced", dispatch.TRITON)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch._backend.cache_clear()
    assert measure_processor() is None
    with pytest.raises(UsageError, match="the CPU cannot compute parts of passes"):
        check_processor()
    dispatch._backend.cache_clear()
    measure_processor.cache_clear()
    monkeypatch.undo()
    if dispatch.backend(torch.device("cpu")) == dispatch.HOST:
        rates = measure_processor()
        assert rates.bytes_per_second > 0
        assert rates.flops_per_second > 0
    measure_processor.cache_clear()
