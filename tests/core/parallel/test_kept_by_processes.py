"""Contexts of ranks that are processes: what goes from one to another is whole, or not there."""

from __future__ import annotations

import itertools
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from helpers import PLACEMENTS, make_model, random_ids
from processes import ENDS_WITHIN, kill_followers

from triforce_core import Engine, SamplingParams
from triforce_core.decoding.contexts.kv_parts import KVParts
from triforce_core.parallel.wire import Wire
from triforce_offload.errors import RankError


@pytest.mark.slow
def test_contexts_are_saved_and_loaded_by_processes(tiny, tmp_path) -> None:
    path, _ = tiny("llama")
    options = {"device": "cpu", "dtype": "float32", "max_context": 120}
    options |= {"method": "triforce", "budget": 32, "draft": "none", "placement": PLACEMENTS["kv"]}
    params = SamplingParams(20, temperature=0)
    # Of the second no chunk is whole.
    for prompt in (random_ids(60), random_ids(5)):
        with Engine.from_pretrained(path, gpus=2, **options) as engine:
            expected = engine.generate([*prompt, 7], params, reuse=False).token_ids
            engine.generate(prompt, SamplingParams(1, temperature=0), reuse=False)
            engine.save_context(tmp_path / "context")
            engine.forget()
            engine.load_context(tmp_path / "context")
            result = engine.generate([*prompt, 7], params)
        with Engine.from_pretrained(path, **options) as engine:
            engine.load_context(tmp_path / "context")
            alone = engine.generate([*prompt, 7], params)
        assert result.token_ids == alone.token_ids == expected
        assert result.stats["reused_tokens"] == alone.stats["reused_tokens"] == len(prompt)


@pytest.mark.first
@pytest.mark.parametrize(
    ("name", "owner", "where", "at"),
    [
        *(("save_context", Wire, "receive_tensor", at) for at in range(3)),
        *(("load_context", Wire, "send_tensor", at) for at in range(4)),
        ("load_context", KVParts, "scattered", 1),
        ("load_context", KVParts, "agree", 0),
    ],
)
def test_an_interrupt_while_a_context_is_kept_leaves_ranks_that_go_on(
    tmp_path, monkeypatch, name: str, owner: type, where: str, at: int
) -> None:
    """Whichever tensor is on its way, or none: what has begun is sent and received wholly."""
    make_model("llama", tmp_path / "model", head_dim=512)
    context = tmp_path / "context"
    prompt, params = random_ids(400), SamplingParams(5, temperature=0)
    options = {"device": "cpu", "dtype": "float32", "max_context": 500, "gpus": 2}
    original, calls = getattr(owner, where), itertools.count()

    def interrupted(*arguments: object) -> object:
        if owner is not Wire:
            result = original(*arguments)
        if next(calls) == at:
            # In a thread that does not hear of it.
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.1)
        return original(*arguments) if owner is Wire else result

    with Engine.from_pretrained(tmp_path / "model", method="autoregressive", **options) as engine:
        engine.generate(prompt, SamplingParams(1))
        engine.save_context(context)
        expected = engine.generate([*prompt, 5], params).token_ids
        before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        monkeypatch.setattr(owner, where, interrupted)
        try:
            with pytest.raises(KeyboardInterrupt):
                getattr(engine, name)(context)
        finally:
            signal.signal(signal.SIGUSR1, before)
            monkeypatch.undo()
        assert engine.generate([*prompt, 5], params).token_ids == expected
        assert engine.load_context(context).tokens == len(prompt)
        result = engine.generate([*prompt, 5], params)
        assert (result.token_ids, result.stats["reused_tokens"]) == (expected, len(prompt))


def test_a_rank_that_is_lost_while_a_context_is_loaded_is_named(tiny, tmp_path) -> None:
    path, _ = tiny("llama")
    with Engine.from_pretrained(path, device="cpu", max_context=120, gpus=2) as engine:
        engine.generate(random_ids(60), SamplingParams(1))
        saved = engine.snapshot()
        layers = [saved.layer_kv(layer) for layer in range(saved.layers)]

        def layer_kv(layer: int) -> torch.Tensor:
            if layer == 1:
                kill_followers()
                until = time.monotonic() + 2 * ENDS_WITHIN
                while not engine.models.ranks._failed.is_set():
                    assert time.monotonic() < until
                    time.sleep(0.01)
            return layers[layer]

        with pytest.raises(RankError, match=r"rank 1: was ended by SIGKILL"):
            engine.restore(replace(saved, layer_kv=layer_kv))
