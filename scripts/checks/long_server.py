"""S1: run `triforce serve` under many clients for a long time: nothing hangs, grows or fails.

SmolLM2-135M streams its layers over an EMULATED link. Each client makes requests of random kinds: a
complete answer, a streamed one, several choices, a conversation that continues; a malformed, partly
unknown or too large request; a request whose client leaves early or reads slowly. Every status must
be the expected one, or 429 when the queue is full. A greedy answer must be the same at the end as
at the beginning, and the engine must be free soon after the last client has left.

    python scripts/checks long_server [--minutes 10] [--clients 32] [--sequences 4]

Prints a line from time to time and writes benchmarks/results/long_server.json. Exits with 1 if a
client hung, an answer was wrong or the last greedy answer differs.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil

from bench.material import model_file
from frame import Benchmark, Figures, Option

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIXED = {"model": "m", "prompt": "The with statement", "max_tokens": 24, "temperature": 0}
# A longer wait in seconds for an answer means that something hangs.
PATIENCE = 180


def measure(args: argparse.Namespace) -> Iterator[Figures]:
    yield {name: getattr(args, name) for name in ("minutes", "clients", "sequences")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-P", "-m", "triforce_core.cli", "serve", str(model_file())),
        *("--port", str(port), "--name", "m", "--device", "cpu", "--quiet", "-c", "1024"),
        *("--device-memory", "700MiB", "--link-bandwidth", "4GB/s", "--weights", "dense"),
        *("--sequences", str(args.sequences), "--queue", "16", "--max-body", "20000"),
    ]
    with subprocess.Popen(command) as server:
        try:
            yield from under_load(port, psutil.Process(server.pid), args)
        finally:
            server.terminate()
            code = server.wait(60)
    yield {"exit_code": code}


def under_load(port: int, process: psutil.Process, args: argparse.Namespace) -> Iterator[Figures]:
    wait_until_up(port, process)
    first = text_of(ask(port, "POST", COMPLETIONS, FIXED))
    seconds, began = 60 * args.minutes, time.monotonic()
    clients = [Client(port, seed, began + seconds) for seed in range(args.clients)]
    samples = []
    while (elapsed := time.monotonic() - began) < seconds:
        samples.append(
            {
                "seconds": round(elapsed),
                "resident_bytes": process.memory_info().rss,
                "threads": process.num_threads(),
                "descriptors": process.num_fds(),
                "done": sum(sum(client.done.values()) for client in clients),
            }
        )
        print(samples[-1], file=sys.stderr, flush=True)
        yield {"samples": samples[-1:]}
        time.sleep(min(30.0, seconds / 10))
    for client in clients:
        client.thread.join(2 * PATIENCE)
    hung = sum(client.thread.is_alive() for client in clients)
    left = time.monotonic()
    while running(port) and time.monotonic() < left + PATIENCE:
        time.sleep(0.05)
    freed = time.monotonic() - left
    done = sum((client.done for client in clients), Counter())
    half = samples[len(samples) // 2 :]
    yield {
        "requests": dict(sorted(done.items())),
        "wrong": [wrong for client in clients for wrong in client.wrong][:20],
        "hung_clients": hung,
        "seconds_until_free": freed,
        "same_answer": text_of(ask(port, "POST", COMPLETIONS, FIXED)) == first,
        "grown_in_the_second_half_bytes": half[-1]["resident_bytes"] - half[0]["resident_bytes"],
    }


def wait_until_up(port: int, process: psutil.Process) -> None:
    began = time.monotonic()
    while ask(port, "GET", "/health")[0] != 200:
        if process.status() == psutil.STATUS_ZOMBIE or time.monotonic() - began > 120:
            raise RuntimeError("the server does not start")
        time.sleep(0.2)


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Return the status and the body. The status is 0 if the server does not listen."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    data = json.dumps(body) if isinstance(body, dict) else body
    try:
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except ConnectionRefusedError:
        return 0, b""
    finally:
        connection.close()


def text_of(answer: tuple[int, bytes]) -> str:
    return json.loads(answer[1])["choices"][0]["text"]


def running(port: int) -> bool:
    metrics = ask(port, "GET", "/metrics")[1].decode()
    return float(re.search(r"^triforce_running (\S+)$", metrics, re.MULTILINE)[1]) > 0


class Client:
    """A client that makes random requests until the end.

    done: the number of requests by kind and status
    wrong: the unexpected answers
    """

    def __init__(self, port: int, seed: int, end: float) -> None:
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._port = port
        self._choose = random.Random(seed)
        self._end = end
        self._messages: list[dict[str, str]] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        kinds = (self._whole, self._streamed, self._choices, self._conversation,
                 self._malformed, self._too_large, self._leaves, self._slow)  # fmt: skip
        while time.monotonic() < self._end:
            kind = self._choose.choice(kinds)
            try:
                status, due = kind()
            except (OSError, http.client.HTTPException) as error:
                status, due = type(error).__name__, (200,)
            name = kind.__name__.strip("_")
            self.done[f"{name} {status}"] += 1
            if status not in (*due, 429):
                self.wrong.append(f"{name}: {status}")
            if status == 429:
                time.sleep(self._choose.uniform(0.1, 1))

    def _body(self, **more: Any) -> dict[str, Any]:
        words = " ".join(self._choose.choices(("the", "with", "text", "9", "né"), k=30))
        return {"model": "m", "prompt": words, "max_tokens": self._choose.randint(1, 20), **more}

    def _whole(self) -> tuple[object, tuple]:
        return ask(self._port, "POST", COMPLETIONS, self._body())[0], (200,)

    def _streamed(self) -> tuple[object, tuple]:
        status, answer = ask(self._port, "POST", COMPLETIONS, self._body(stream=True))
        whole = status != 200 or answer.endswith(b"data: [DONE]\n\n")
        return status if whole else "cut", (200,)

    def _choices(self) -> tuple[object, tuple]:
        status, answer = ask(self._port, "POST", COMPLETIONS, self._body(n=3, logprobs=2))
        whole = status != 200 or len(json.loads(answer)["choices"]) == 3
        return status if whole else "too few", (200,)

    def _conversation(self) -> tuple[object, tuple]:
        if len(self._messages) > 6:
            self._messages = []
        self._messages.append({"role": "user", "content": "and then?"})
        body = {"model": "m", "messages": self._messages, "max_tokens": 12}
        status, answer = ask(self._port, "POST", CHAT, body)
        if status == 200:
            self._messages.append(json.loads(answer)["choices"][0]["message"])
        else:
            self._messages = []
        return status, (200,)

    def _malformed(self) -> tuple[object, tuple]:
        body = self._choose.choice(
            ("{", "[]", b"\xff\xfe", '{"model": 3}', json.dumps(self._body(unknown=1)))
        )
        return ask(self._port, "POST", COMPLETIONS, body)[0], (400,)

    def _too_large(self) -> tuple[object, tuple]:
        if self._choose.random() < 0.5:
            return ask(self._port, "POST", COMPLETIONS, "x" * 30000)[0], (413,)
        return ask(self._port, "POST", COMPLETIONS, self._body(prompt="word " * 2000))[0], (400,)

    def _leaves(self) -> tuple[object, tuple]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        body = json.dumps(self._body(max_tokens=400, stream=True))
        connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
        status: object = "left before"
        if self._choose.random() < 0.7:
            answer = connection.getresponse()
            status = answer.status
            answer.read(self._choose.randint(1, 300))
            answer.close()
        connection.close()
        return status, (200, "left before")

    def _slow(self) -> tuple[object, tuple]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        body = json.dumps(self._body(stream=True))
        connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        while answer.read(60):
            time.sleep(0.05)
        connection.close()
        return answer.status, (200,)


main = Benchmark(
    __doc__,
    "long_server",
    measure,
    (
        Option("--minutes", 10.0, "how long clients ask"),
        Option("--clients", 32, "number of clients"),
        Option("--sequences", 4, "sequences that the server runs at once"),
    ),
)
