"""Two engines of one process, and two processes of one machine, at the same time: each says what it
says alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from command import least_memory
from helpers import BLOCK, PLACEMENTS, random_ids

from triforce_core import Engine, SamplingParams
from triforce_core.requests.batch import Batch
from triforce_offload.errors import UsageError

PROMPTS = [random_ids(60, seed) for seed in range(4)]
# Of engines that share nothing but the process: what streams, what drafts, and how a text is drawn.
ENGINES = (
    {"placement": PLACEMENTS["kv"], "draft": "none", "draft_tokens": 3, "budget": 16},
    {"placement": PLACEMENTS["both"], "method": "autoregressive"},
)
PARAMS = (
    SamplingParams(12, temperature=0),
    SamplingParams(12, temperature=0.9, seed=5, repeat_penalty=1.2),
)


def texts(path: Path, number: int, meet: threading.Barrier | None = None) -> list[list[int]]:
    """An engine's answers. meet: where it waits for others before each."""
    said = []
    with Engine.from_pretrained(
        path,
        device="cpu",
        max_context=100,
        block_tokens=BLOCK,
        link_bandwidth="20MB/s",
        accept="coupled",
        **ENGINES[number],
    ) as engine:
        for prompt in PROMPTS:
            if meet is not None:
                meet.wait(60)
            said.append(engine.generate(prompt, PARAMS[number], reuse=False).token_ids)
    return said


def test_two_engines_of_one_process_at_once(tiny) -> None:
    path, _ = tiny("llama")
    alone = [texts(path, number) for number in range(2)]
    meet, together = threading.Barrier(2), {}

    def run(number: int) -> None:
        together[number] = texts(path, number, meet)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together.get(number) for number in range(2)] == alone
    assert alone[0] != alone[1]


@pytest.mark.slow
def test_two_processes_at_once_on_one_cache(speaking, tmp_path) -> None:
    """Both make copies in 4 bits and measure the machine, and keep them in the same places."""
    command = [
        *(sys.executable, "-P", "-m", "triforce_core.cli", "generate", str(speaking), "--quiet"),
        *("--prompt", "Hello there, this is a text of some length. " * 8),
        *("--max-new-tokens", "20", "--temperature", "0", "--device", "cpu"),
    ]
    command += [*least_memory(*command[4:]), "--link-bandwidth", "20MB/s"]
    said = []
    for count in (2, 1):
        files = [tmp_path / f"{count} {number}" for number in range(count)]
        running = [subprocess.Popen([*command, "--stats", str(file)]) for file in files]
        assert [process.wait(120) for process in running] == [0] * count
        said += [json.loads(file.read_text())["token_ids"] for file in files]
    assert len(said[0]) == 20
    assert said[0] == said[1] == said[2]


def test_a_thread_that_comes_during_a_pass_waits_or_is_refused(tiny, monkeypatch) -> None:
    """At the moment when the pass has taken its requests out of the list of those that run."""
    path, _ = tiny("llama")
    params, known = SamplingParams(6, temperature=0), Batch._current_for
    begun, comes = threading.Event(), threading.Event()
    received: list = []
    contexts: list[int] = []

    def slowly(self: Batch, members: list) -> object:
        if self._new or begun.is_set():
            return known(self, members)
        begun.set()
        assert comes.wait(60)
        # Long enough for a thread that does not wait.
        time.sleep(0.2)
        contexts.append(len(engine._contexts._all))
        return known(self, members)

    def other() -> None:
        assert begun.wait(60)
        comes.set()
        try:
            received.append(engine.generate(random_ids(20, 7), params).token_ids)
        except UsageError as error:
            received.append(str(error))

    with Engine.from_pretrained(path, device="cpu", max_context=100) as engine:
        expected = engine.generate(random_ids(9), params).token_ids
        others = engine.generate(random_ids(20, 7), params).token_ids
        monkeypatch.setattr(Batch, "_current_for", slowly)
        thread = threading.Thread(target=other)
        thread.start()
        assert engine.generate(random_ids(9), params, reuse=False).token_ids == expected
        thread.join(60)
        assert contexts == [1]
        assert received[0] == others or "one is under way" in received[0]
