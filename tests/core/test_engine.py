"""The Python interface: arguments, streaming, seeds, stats, and what it refuses."""

from __future__ import annotations

import gc
import json
import threading

import numpy as np
import pytest
import torch
from helpers import BLOCK, PLACEMENTS, random_ids

import triforce_core
from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.context import Context
from triforce_core.loading.open_model import OpenModel
from triforce_core.model.tokenizing.tokenizer import Tokenizer
from triforce_offload.errors import DoesNotFitError, LinkError, UsageError


def make(path, **options) -> Engine:
    return Engine.from_pretrained(
        path, **{"device": "cpu", "max_context": 200, "block_tokens": BLOCK, **options}
    )


def test_a_seed_gives_the_same_text_at_every_placement(speaking) -> None:
    params = SamplingParams(max_new_tokens=60, temperature=1.0, top_p=0.95, top_k=40, seed=7)
    texts = set()
    for placement in ("resident", "both"):
        with make(speaking, method="autoregressive", placement=PLACEMENTS[placement]) as engine:
            texts.add(engine.generate("What is this?", params).text)
            texts.add(engine.generate("What is this?", params).text)
            other = SamplingParams(max_new_tokens=60, temperature=1.0, seed=8)
            assert engine.generate("What is this?", other).text not in texts
    assert len(texts) == 1


def test_a_seed_that_was_drawn_is_reported_and_repeats(speaking) -> None:
    with make(speaking, draft_tokens=5, inner_draft_tokens=2) as engine:
        first = engine.generate("Hello", SamplingParams(max_new_tokens=40, temperature=1.5))
        again = SamplingParams(max_new_tokens=40, temperature=1.5, seed=first.stats["seed"])
        assert engine.generate("Hello", again).token_ids == first.token_ids


def test_pieces_add_up_to_the_text_and_tokens_are_the_new_ones(speaking) -> None:
    with make(speaking) as engine:
        stream = engine.stream("Hello there", SamplingParams(max_new_tokens=30, temperature=0))
        with pytest.raises(RuntimeError, match="has not ended"):
            _ = stream.result
        pieces = list(stream)
        result = stream.result
        assert "".join(pieces) == result.text == engine.tokenizer.decode(result.token_ids)
        assert len(result.token_ids) == 30
        ids = engine.tokenizer.encode("Hello there")
        assert engine.generate(ids, SamplingParams(30, 0)).token_ids == result.token_ids


def test_stats_say_what_happened(speaking) -> None:
    with make(
        speaking,
        method="autoregressive",
        placement=PLACEMENTS["both"],
        link_bandwidth="2GB/s",
    ) as engine:
        stats = engine.generate(random_ids(70), SamplingParams(max_new_tokens=41)).stats
        (layer_bytes,) = set(engine.runtime.plan.requirements.layer_bytes)
    assert json.loads(json.dumps(stats)) == stats
    assert stats["prompt_tokens"] == 70
    assert stats["new_tokens"] == 41 == len(stats["token_ids"])
    assert stats["passes"] == 40
    assert stats["tokens_per_pass"] == 1
    assert stats["finish_reason"] == "length"
    assert stats["method"] == "autoregressive"
    assert set(stats["seconds"]) == {"load", "prefill", "decode", "draft", "verify"}
    assert stats["levels"] == ["target"]
    assert stats["acceptance"]["target"] is stats["retrieval"] is None
    assert stats["seconds_per_token"] == pytest.approx(stats["seconds"]["decode"] / 40)
    link = stats["link"]
    assert link["emulated"] is True
    assert link["bandwidth_gb_per_s"] == 2.0
    assert link["busy_seconds"] == pytest.approx(link["bytes_to_device"] / 2e9)
    assert link["floor_seconds_per_pass"] == pytest.approx(link["bytes_to_device"] / 40 / 2e9)
    placement = stats["placement"]
    assert placement["layers"] == 3
    assert placement["resident_weight_layers"] == 0
    assert placement["resident_kv_layers"] == 0
    # 110 tokens have KV at the end: 6 blocks of 16 a layer; the last token was never fed.
    assert placement["kv_blocks"] == 18
    # What crossed: in pass i all weights and the blocks that were full before it.
    layer = (stats["link"]["bytes_to_device"] - 3 * 16 * 256 * blocks_seen(70, 40)) / 40 / 3
    assert layer == layer_bytes
    out = 3 * 16 * 256
    assert link["prefill_bytes_to_host"] == out * (70 // 16)
    assert link["bytes_to_host"] == out * (110 // 16 - 70 // 16)


def blocks_seen(prompt: int, passes: int) -> int:
    return sum((prompt + i) // BLOCK for i in range(passes))


def test_resident_models_move_nothing(speaking) -> None:
    with make(speaking) as engine:
        link = engine.generate("Hello", SamplingParams(max_new_tokens=3)).stats["link"]
    assert link["bytes_to_device"] == link["bytes_to_host"] == 0
    assert link["floor_seconds_per_pass"] is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"method": "magic"}, "magic"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device_memory": "lots"}, "lots"),
        ({"device_memory": "4000TiB"}, "4000"),
        ({"link_bandwidth": "25GB"}, "25GB"),
        ({"dtype": "int8"}, "int8"),
        ({"block_tokens": 24}, "24"),
        ({"block_tokens": "16"}, "block_tokens"),
        ({"max_context": 0}, "max_context"),
        ({"max_context": 100.5}, "max_context"),
        ({"max_context": 513}, "max_context 513 is more than the 512 positions"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(speaking, options, named) -> None:
    if options.get("device_memory") == "4000TiB":
        named = "has"
    with pytest.raises(UsageError, match=named):
        make(speaking, **options)


def test_a_context_of_a_few_tokens_is_enough(speaking) -> None:
    with Engine.from_pretrained(speaking, device="cpu", max_context=3) as engine:
        assert len(engine.generate([5], SamplingParams(2, temperature=0)).token_ids) == 2


def test_unknown_arguments_are_refused(speaking) -> None:
    with pytest.raises(TypeError, match="gpu_memory"):
        make(speaking, gpu_memory="1GiB")


def test_prompts_that_cannot_be_taken_are_refused_and_never_cut(speaking, tiny) -> None:
    with make(speaking) as engine:
        with pytest.raises(
            UsageError, match="190 prompt tokens and 11 new ones are more than the 200 positions"
        ):
            engine.generate([1] * 190, SamplingParams(max_new_tokens=11))
        engine.generate([1] * 190, SamplingParams(max_new_tokens=10))
        for prompt in ("", []):
            with pytest.raises(UsageError, match="empty"):
                engine.generate(prompt)
        for token in (97, -1, "a", 2.0):
            with pytest.raises(UsageError, match=r"token id|several prompts"):
                engine.generate([token])
    path, _ = tiny("llama")
    with make(path) as engine, pytest.raises(UsageError, match="no tokenizer"):
        engine.generate("text")


def test_what_does_not_fit_is_refused_before_loading(speaking, monkeypatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("read before the refusal")

    monkeypatch.setattr("triforce_core.model.checkpoints.checkpoint.Checkpoint.read", read)
    with pytest.raises(DoesNotFitError, match=r"needs [\d.]+ [KM]iB and 100 KiB is available"):
        make(speaking, device_memory="100KiB")


def test_one_request_at_a_time_and_none_after_close(speaking) -> None:
    engine = make(speaking)
    params = SamplingParams(max_new_tokens=20, temperature=0)
    stream = engine.stream("Hello", params)
    pieces = iter(stream)
    next(pieces)
    with pytest.raises(UsageError, match="one request at a time"):
        engine.generate("Hello", params)
    stream.close()
    expected = engine.generate("Hello", params).token_ids
    abandoned = engine.stream("Hello", params)
    next(iter(abandoned))
    del abandoned
    gc.collect()
    assert engine.generate("Hello", params).token_ids == expected
    unfinished = engine.stream("Hello", params)
    next(iter(unfinished))
    engine.close()
    engine.close()
    assert list(unfinished) == []
    with pytest.raises(UsageError, match="closed"):
        engine.generate("Hello", params)


def test_of_two_streams_the_second_to_begin_is_refused(speaking) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=0)
    with make(speaking, placement=PLACEMENTS["both"]) as engine:
        expected = engine.generate("Hello", params).text
        first = engine.stream("Hello", params)
        second = engine.stream("Hello", params)
        pieces = iter(first)
        text = next(pieces)
        with pytest.raises(UsageError, match="one request at a time"):
            next(iter(second))
        assert text + "".join(pieces) == expected
        first = engine.stream("Hello", params)
        second = engine.stream("Hello", params)
        pieces = iter(first)
        next(pieces)
    assert list(pieces) == list(second) == []
    assert engine.runtime.memory.available_bytes == engine.runtime.memory.limit_bytes


def test_an_engine_closes_under_a_reader_that_fails(speaking) -> None:
    def fail() -> None:
        with engine:
            for _ in engine.stream("Hello", SamplingParams(max_new_tokens=20)):
                raise ZeroDivisionError

    engine = make(speaking, placement=PLACEMENTS["both"])
    with pytest.raises(ZeroDivisionError):
        fail()
    assert engine.runtime.memory.available_bytes == engine.runtime.memory.limit_bytes


def test_an_interrupt_ends_within_a_pass_and_keeps_the_text(speaking) -> None:
    with make(speaking, placement=PLACEMENTS["both"]) as engine:
        whole = engine.generate("Hello", SamplingParams(max_new_tokens=50, temperature=0))
        stream = engine.stream("Hello", SamplingParams(max_new_tokens=50, temperature=0))
        pieces = []
        for piece in stream:
            pieces.append(piece)
            if len(pieces) == 5:
                engine.interrupt()
        result = stream.result
        assert result.finish_reason == "interrupted"
        assert 5 <= len(result.token_ids) <= 6
        assert result.token_ids == whole.token_ids[: len(result.token_ids)]
        assert engine.generate("Hello", SamplingParams(50, 0)).token_ids == whole.token_ids


def test_an_interrupt_during_prefill_ends_between_layers(speaking) -> None:
    seen = []
    engine = make(speaking, progress=lambda what, done, _: seen.append((what, done)))
    engine.progress = lambda what, done, _: (seen.append((what, done)), engine.interrupt())
    result = engine.generate("Hello", SamplingParams(max_new_tokens=5))
    assert result.finish_reason == "interrupted"
    assert result.token_ids == []
    assert seen == [("load", 1), ("load", 2), ("load", 3), ("prefill", 1)]
    engine.progress = lambda *_: None
    assert len(engine.generate("Hello", SamplingParams(max_new_tokens=5)).token_ids) == 5
    engine.close()


def test_engines_leave_no_threads_behind(speaking) -> None:
    before = threading.active_count()
    for _ in range(3):
        with make(speaking, placement=PLACEMENTS["both"]) as engine:
            engine.generate("Hello", SamplingParams(max_new_tokens=2))
    with pytest.raises(DoesNotFitError):
        make(speaking, device_memory="100KiB")
    assert threading.active_count() == before
    assert not torch.is_inference_mode_enabled()


def test_an_engine_is_not_closed_from_within_a_pass(speaking) -> None:
    said: list[str] = []

    def close(what: str, done: int, total: int) -> None:
        if what == "prefill" and not said:
            try:
                engine.close()
            except UsageError as error:
                said.append(str(error))

    engine = make(speaking, progress=close)
    params = SamplingParams(max_new_tokens=5, temperature=0)
    assert len(engine.generate("Hello", params).token_ids) == 5
    assert "interrupt it first" in said[0]
    engine.close()


def test_a_context_that_does_not_close_is_not_used_again(speaking, monkeypatch) -> None:
    engine = make(speaking)
    params = SamplingParams(max_new_tokens=5, temperature=0)
    expected = engine.generate("Hello", params).token_ids
    close = Context.close

    def fail(context: Context) -> None:
        close(context)
        raise LinkError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(Context, "close", fail)
        with pytest.raises(LinkError, match="planted"):
            engine.forget()
        assert engine.generate("Hello", params).token_ids == expected
        with pytest.raises(LinkError, match="planted"):
            engine.close()
    assert engine.runtime.memory.available_bytes == engine.runtime.memory.limit_bytes


def test_a_model_may_be_loaded_in_inference_mode(speaking) -> None:
    """Which a thread has for itself, and layers are read by several."""
    params = SamplingParams(max_new_tokens=5, temperature=0)
    with make(speaking, draft=speaking) as engine:
        expected = engine.generate("Hello", params).token_ids
    with torch.inference_mode(), make(speaking, draft=speaking) as engine:
        assert engine.generate("Hello", params).token_ids == expected


def test_a_tokenizer_that_is_given_is_the_one_that_is_used(speaking) -> None:
    with OpenModel.at(speaking) as model:
        tokenizer = Tokenizer(object())
        with Engine.from_pretrained(model, device="cpu", tokenizer=tokenizer) as engine:
            assert engine.tokenizer is tokenizer
        with Engine.from_pretrained(model, device="cpu") as engine:
            assert engine.tokenizer is model.tokenizer


@pytest.mark.parametrize("how", ["break", "close", "drop", "next"])
def test_a_stream_that_is_left_ends_and_has_what_it_gave(speaking, how: str) -> None:
    with make(speaking, method="autoregressive") as engine:
        params = SamplingParams(max_new_tokens=30, temperature=0)
        whole = engine.generate("Hello", params)
        stream, text = engine.stream("Hello", params), ""
        if how == "next":
            text = next(iter(stream))
        else:
            pieces = iter(stream)
            for piece in pieces:
                text += piece
                if len(text) >= 4:
                    break
        if how == "close":
            stream.close()
        elif how == "break":
            del pieces
        if how != "drop":
            result = stream.result
            assert result.finish_reason == "interrupted"
            assert result.text.startswith(text)
            assert whole.token_ids[: len(result.token_ids)] == result.token_ids
            assert 0 < len(result.token_ids) < 30
            assert list(stream) == []
        else:
            del pieces, stream
        # Nothing is under way any more.
        assert engine.generate("Hello", params).token_ids == whole.token_ids


def test_a_stream_that_never_began_has_no_result(speaking) -> None:
    with make(speaking) as engine:
        stream = engine.stream("Hello", SamplingParams(max_new_tokens=5))
        stream.close()
        assert list(stream) == []
        with pytest.raises(RuntimeError, match="has not ended"):
            _ = stream.result


def test_prefill_that_is_interrupted_has_taken_its_time(speaking) -> None:
    with make(speaking) as engine:
        engine.progress = lambda *_: engine.interrupt()
        result = engine.generate("Hello", SamplingParams(max_new_tokens=5))
    assert result.finish_reason == "interrupted"
    assert result.stats["seconds"]["prefill"] > 0


def test_token_ids_may_be_numbers_of_any_library(speaking) -> None:
    params = SamplingParams(max_new_tokens=5, temperature=0)
    with make(speaking) as engine:
        expected = engine.generate([5, 6, 7], params).token_ids
        assert engine.generate(np.array([5, 6, 7]), params).token_ids == expected
        assert engine.generate(torch.tensor([5, 6, 7]), params).token_ids == expected
        texts = (["Hello", "Good day"], "generate_all takes them")
        for prompt, said in ((b"Hello", "is bytes"), (None, "is NoneType"), (3.5, "float"), texts):
            with pytest.raises(UsageError, match=said):
                engine.generate(prompt, params)
        for token, kind in ((1.0, "float"), (True, "bool"), ("a", "str"), (10**9, "int")):
            with pytest.raises(UsageError, match=f"token id .* \\({kind}\\) is not"):
                engine.generate([5, token], params)


def test_messages_go_through_the_template(speaking) -> None:
    params = SamplingParams(max_new_tokens=5, temperature=0)
    with make(speaking) as engine:
        expected = engine.generate("<u>Hi<a>", params).token_ids
        assert engine.chat("Hi", params).token_ids == expected
        messages = [{"role": "user", "content": "Hi"}]
        assert engine.chat(messages, params).token_ids == expected
        assert engine.tokenizer.decode(engine.chat_tokens("Hi")).endswith("Hi<a>")
        with pytest.raises(UsageError, match="template does not take"):
            engine.chat([3], params)


def test_the_package_gives_what_a_program_needs() -> None:
    for name in triforce_core.__all__:
        assert getattr(triforce_core, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = triforce_core.Motor
