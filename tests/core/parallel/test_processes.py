"""Ranks as processes: texts, one trace, signals, and T1: whatever happens to a rank the command
ends soon, says what it was, and leaves nobody behind.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers import BLOCK, PLACEMENTS, placed, random_ids
from oracle import assert_equal_but_for_ties, greedy
from processes import ENDS_WITHIN, followers, kill_followers, run

from triforce_core import Engine, SamplingParams
from triforce_core.parallel.leader import Leader
from triforce_core.plan.plan import Plan
from triforce_core.settings import MethodSettings
from triforce_offload.errors import RankError, UsageError

PROMPT = "Hello there, this is a text of some length. " * 8
# A pass of two ranks takes about half a second over such links.
SLOW = "300KB/s"


def streamed(folder: Path, gpus: int = 2, rate: str = "5GB/s") -> tuple[object, ...]:
    """Options with which all KV of `gpus` ranks streams."""
    plan = folder / "plan.json"
    method = MethodSettings(method="speculative", draft="ngram")
    Plan(440, BLOCK, method, PLACEMENTS["kv"], gpus=gpus).write(plan)
    return ("--device", "cpu", "--plan", plan, "--link-bandwidth", rate)


def generate(path: Path, *arguments: object, gpus: int = 2, **options: object) -> subprocess.Popen:
    return run(
        *("triforce_core", "generate", path, "--prompt", PROMPT, "--temperature", 0),
        *("--max-new-tokens", 60, "--gpus", gpus, *arguments),
        **options,
    )


@pytest.mark.first
@pytest.mark.parametrize("placement", ["resident", "both"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_say_what_transformers_does(tiny, ranks: int, placement: str) -> None:
    path, model = tiny("llama")
    prompt = random_ids(75)
    options = {"device": "cpu", "max_context": 120, "draft_tokens": 6}
    options |= placed(placement, {"budget": 32})
    with Engine.from_pretrained(path, dtype="float32", gpus=ranks, **options) as ours:
        first = ours.generate(prompt, greedy(16))
        again = ours.generate(prompt + first.token_ids, greedy(8))
    theirs = transformers_text(model, prompt, 24)
    assert_equal_but_for_ties(model, prompt, first.token_ids + again.token_ids, theirs)
    checksums = [rank["checksum"] for rank in again.stats["ranks"]]
    assert len(checksums) == ranks
    assert len(set(checksums)) == 1


def transformers_text(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_one_table_one_trace_with_rows_for_each_link(speaking, tmp_path) -> None:
    trace, stats = tmp_path / "trace.json", tmp_path / "stats.json"
    alone = generate(speaking, "--quiet", "--device", "cpu", "--max-new-tokens", 12, gpus=1)
    both = generate(
        *(speaking, "--max-new-tokens", 12, "--trace", trace, "--stats", stats),
        *streamed(tmp_path),
    )
    expected, _ = alone.communicate(timeout=60)
    text, err = both.communicate(timeout=60)
    assert (both.returncode, text) == (0, expected), err
    assert err.count("plan:") == 1
    assert err.count("rank 1") == 1
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"copy in, rank 0", "copy in, rank 1"} <= names
    for rank in (0, 1):
        copies = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, 0)]
        carried = sum(e["args"]["bytes"] for e in copies)
        told = json.loads(stats.read_text())["ranks"][rank]["bytes_to_device"]
        assert carried >= told > 0


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize("who", ["the command", "its group"])
def test_an_interrupt_keeps_the_text_and_ends_all(speaking, tmp_path, who: str) -> None:
    """Ctrl-C reaches the group, `kill` the command alone."""
    stats = tmp_path / "stats.json"
    process = generate(speaking, *streamed(tmp_path, rate=SLOW), "--stats", stats)
    process.stdout.read(1)
    if who == "the command":
        process.send_signal(signal.SIGINT)
    else:
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=ENDS_WITHIN)
    assert process.returncode == 130, err
    written = json.loads(stats.read_text())
    assert written["finish_reason"] == "interrupted"
    assert 0 < written["new_tokens"] < 60
    assert "Traceback" not in err


def ended(process: subprocess.Popen) -> tuple[float, str]:
    """Seconds until it ended, and what it said."""
    began = time.monotonic()
    _, err = process.communicate(timeout=ENDS_WITHIN + 20)
    return time.monotonic() - began, err


@pytest.mark.slow
@pytest.mark.first
@pytest.mark.parametrize(
    ("ranks", "rank", "number", "said"),
    [
        (2, 1, signal.SIGKILL, "triforce: rank 1: was ended by SIGKILL"),
        (4, 3, signal.SIGKILL, "triforce: rank 3: was ended by SIGKILL"),
        (2, 1, signal.SIGSTOP, "triforce: rank 1: has not answered for 5 s"),
        (2, 0, signal.SIGSTOP, "triforce: rank 0 has not answered for 5 s"),
        (2, 0, signal.SIGKILL, ""),
    ],
)
def test_a_rank_that_is_killed_or_stalls(
    speaking, tmp_path, ranks: int, rank: int, number: signal.Signals, said: str
) -> None:
    process = generate(speaking, *streamed(tmp_path, ranks, SLOW), gpus=ranks)
    process.stdout.read(1)
    others = followers(process)
    assert len(others) == ranks - 1
    (others[rank - 1] if rank else process).send_signal(number)
    seconds, err = ended(process)
    assert seconds < ENDS_WITHIN
    assert process.returncode == (-9 if rank == 0 else 1)
    assert said in err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(others, timeout=ENDS_WITHIN)
    assert not alive


FAULT = """
import os

if os.environ.get("RANK") == "1":
    import torch
    from triforce_offload.kv.sequence import SequenceKV
    from triforce_offload.runtime import Runtime

    count = 0

    def fail(method):
        def failing(self, *args, **kwargs):
            global count
            count += 1
            if count == {after}:
                {fault}
            return method(self, *args, **kwargs)
        return failing

    {where} = fail({where})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "after", "fault", "code", "said"),
    [
        ("SequenceKV.keep", 3, 'raise torch.OutOfMemoryError("CUDA")', 3, "ran out of memory"),
        ("SequenceKV.keep", 2, 'raise KeyError("odd")', 1, "rank 1: KeyError: 'odd'"),
        ("Runtime.__init__", 1, 'raise MemoryError("no")', 1, "rank 1: MemoryError: no"),
    ],
)
def test_a_rank_that_raises(
    speaking, tmp_path, where: str, after: int, fault: str, code: int, said: str
) -> None:
    source = FAULT.format(where=where, after=after, fault=fault)
    (tmp_path / "sitecustomize.py").write_text(source)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = generate(speaking, *streamed(tmp_path, rate=SLOW), env=environment)
    process.stdout.read(1)
    seconds, err = ended(process)
    assert seconds < ENDS_WITHIN
    assert process.returncode == code, err
    assert said in err
    assert "triforce: rank 1" in err


@pytest.mark.slow
def test_a_rank_that_comes_late_is_waited_for(speaking, tmp_path) -> None:
    """Later than a rank that is heard of may be silent for."""
    source = "import os, time\nif os.environ.get('RANK') == '2': time.sleep(8)\n"
    (tmp_path / "sitecustomize.py").write_text(source)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    options = ("--device", "cpu", "--max-new-tokens", 4, "--quiet")
    process = generate(speaking, *options, gpus=3, env=environment)
    _, err = process.communicate(timeout=90)
    assert (process.returncode, err) == (0, "")


def test_only_the_first_of_torchruns_ranks_leads(tiny, monkeypatch) -> None:
    world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"this is rank 1 of torchrun's, and rank 0 leads"):
        Engine.from_pretrained(tiny("llama")[0], device="cpu", gpus=2)


@pytest.mark.slow
def test_what_is_refused_is_said_once(speaking) -> None:
    for arguments, code in ((("--gpus", 7), 2), (("--device-memory", "300KB"), 3)):
        process = generate(speaking, "--device", "cpu", *arguments)
        _, err = ended(process)
        assert process.returncode == code
        assert err.count("triforce: ") == 1
        assert "Traceback" not in err


@pytest.mark.slow
def test_torchrun(speaking) -> None:
    alone = generate(speaking, "--quiet", "--device", "cpu", "--max-new-tokens", 12, gpus=1)
    process = run(
        *("torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *("-m", "triforce_core", "generate", speaking, "--prompt", PROMPT, "--temperature", 0),
        *("--max-new-tokens", 12, "--device", "cpu", "--quiet"),
    )
    expected, _ = alone.communicate(timeout=60)
    text, err = process.communicate(timeout=60)
    assert (process.returncode, text) == (0, expected), err


def test_an_engine_that_lost_a_rank_says_so_and_another_can_be_made(tiny) -> None:
    path, _ = tiny("llama")
    options = {"device": "cpu", "dtype": "float32", "max_context": 120, "gpus": 2}
    params = SamplingParams(40, temperature=0)
    with Engine.from_pretrained(path, **options) as engine:
        expected = engine.generate(random_ids(60), params).token_ids
        kill_followers()
        with pytest.raises(RankError, match=r"rank 1: was ended by SIGKILL"):
            engine.generate(random_ids(60), params)
        with pytest.raises(RankError):
            engine.generate(random_ids(60), params)
    with Engine.from_pretrained(path, **options) as engine:
        assert engine.generate(random_ids(60), params).token_ids == expected


def test_an_engine_closed_while_it_notices_a_loss_leaves_no_thread(tiny, monkeypatch) -> None:
    path, _ = tiny("llama")
    kill, threads = Leader._kill, threading.active_count()

    def kill_slowly(leader: Leader) -> None:
        if threading.current_thread() is not threading.main_thread():
            # Whoever waits for the loss to be noticed goes on, and closes the engine.
            time.sleep(0.5)
        kill(leader)

    monkeypatch.setattr(Leader, "_kill", kill_slowly)
    with Engine.from_pretrained(path, device="cpu", max_context=120, gpus=2) as engine:
        kill_followers()
        with pytest.raises(RankError):
            engine.generate(random_ids(60), SamplingParams(40, temperature=0))
    assert threading.active_count() <= threads


@pytest.mark.slow
def test_a_server_that_lost_a_rank_answers_so_and_ends(speaking) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--gpus", 2, "--device", "cpu", "--port", port)
    process = run("triforce_core", "serve", speaking, "--name", "m", *options)
    try:
        while "ready:" not in (line := process.stderr.readline()):
            assert line, "it ended by itself"
        followers(process)[0].kill()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ENDS_WITHIN)
        asked = json.dumps({"model": "m", "prompt": "Hello", "max_tokens": 5})
        connection.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        # 500 if its pass is the first to miss the rank, 503 if the server has noticed before.
        assert answer.status in (500, 503)
        assert "was ended by SIGKILL" in json.load(answer)["error"]["message"]
        connection.close()
        _, err = process.communicate(timeout=ENDS_WITHIN)
        assert (process.returncode, err.strip().splitlines()[-1]) == (
            1,
            "triforce: rank 1: was ended by SIGKILL",
        )
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_two_nodes(speaking) -> None:
    """Two networks joined by a pair of virtual cards, where users may make such."""
    may = subprocess.run(["unshare", "-Urn", "true"], capture_output=True, check=False)
    if may.returncode:
        pytest.skip("namespaces of networks are not for users here")
    script = Path(__file__).parents[3] / "scripts" / "checks" / "two_nodes.sh"
    environment = os.environ | {"PYTHON": sys.executable}
    made = subprocess.run(
        ["bash", script, speaking, PROMPT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=80,
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip()
    assert "two nodes say what one says" in made.stderr
