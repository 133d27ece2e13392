"""A server whose engine fails for good: everybody is told, and it ends."""

from __future__ import annotations

import itertools
import json
import queue
import threading

import pytest
import torch
from running import HELLO, serving, slow, until

from triforce_core import SamplingParams
from triforce_core.conversation import Turn
from triforce_core.decoding.contexts.context import Context
from triforce_core.requests.batch import Batch
from triforce_core.server.worker import Job, Prompt
from triforce_offload.errors import DeviceHungError, LinkError, RankError

CHAT = "/v1/chat/completions"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("planted", "status"),
    [
        (DeviceHungError("it does not answer"), 500),
        (RankError("rank 1: is gone"), 500),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), 500),
        # Of a fault in this code nobody is told by the engine.
        (KeyError("odd"), 503),
    ],
    ids=["hung", "rank", "device", "fault"],
)
@pytest.mark.parametrize("once", [False, True])
def test_what_an_engine_does_not_outlive_ends_the_server(
    speaking, monkeypatch, planted: Exception, status: int, once: bool
) -> None:
    with slow(speaking) as running:
        ended = threading.Event()
        monkeypatch.setattr(running.worker, "failed", ended.set)
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 200}
        answers: list[tuple] = []
        asking = [
            threading.Thread(target=lambda: answers.append(running.ask("POST", CHAT, body)))
            for _ in "ab"
        ]
        for thread in asking:
            thread.start()
        until(lambda: running.worker.running and running.worker.waiting == 1)

        where = "_steps" if status == 500 else "step"
        original, calls = getattr(Batch, where), itertools.count()

        def fail(*arguments: object, **options: object) -> None:
            if once and next(calls):
                # What still runs could go on, and is cut.
                return original(*arguments, **options)
            raise planted

        monkeypatch.setattr(Batch, where, fail)
        for thread in asking:
            thread.join(30)
            assert not thread.is_alive()
        assert sorted(answer[0] for answer in answers) == [status, 503]
        assert all(str(planted) in str(json.loads(answer[2])["error"]) for answer in answers)
        assert ended.wait(10)
        assert str(planted) in str(running.worker.error)
        assert running.ask("GET", "/health")[0] == 503
        assert running.ask("POST", CHAT, body)[0] == 503


def test_an_error_that_ends_other_ranks_ends_the_server(speaking, monkeypatch) -> None:
    with serving(speaking, gpus=2) as running:
        ended = threading.Event()
        monkeypatch.setattr(running.worker, "failed", ended.set)
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
        assert running.ask("POST", CHAT, body)[0] == 200

        def fail(*_: object) -> None:
            raise LinkError("planted")

        # The other rank was told to read, and waits for this one.
        monkeypatch.setattr(Context, "prefill_from", fail)
        status, _, answer = running.ask("POST", CHAT, body | {"messages": [*HELLO, *HELLO]})
        assert (status, "planted" in str(answer)) == (500, True)
        assert ended.wait(10)
        assert running.ask("GET", "/health")[0] == 503


def test_what_comes_as_the_server_fails_is_told_so(speaking, monkeypatch) -> None:
    with serving(speaking) as running:
        worker, told = running.worker, queue.SimpleQueue()
        monkeypatch.setattr(worker, "check_room", lambda: worker._fail(KeyError("odd")))
        worker.submit([Job(Prompt(Turn("", [1]), False), SamplingParams(1), told.put)])
        assert "odd" in str(told.get(timeout=10))
