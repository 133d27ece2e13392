"""The server over plain HTTP: what it refuses, and what it does when clients leave."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
from command import heed_signals, run
from helpers import PLACEMENTS
from running import CONTEXT, HELLO, Running, serving, slow, until

from triforce_core import Completion, Engine
from triforce_core.cli.serve.command import log_text
from triforce_core.server.settings import ServerSettings
from triforce_core.server.worker import Job
from triforce_offload.errors import UsageError

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 17}, "n must be 16 or less"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, f"context length is {CONTEXT}"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"frequency_penalty": 3.0}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"seed": 1 << 64}, "seed"),
        ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "no format of tool calls"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "UTF-8"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_refused_with_its_name(
    server, change: dict[str, Any], said: str, stream: bool
) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 5, "stream": stream, **change}
    status, _, answer = server.ask("POST", CHAT, body)
    error = json.loads(answer)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert said in error["message"]


def test_other_paths_and_methods(server) -> None:
    assert server.ask("GET", "/v1/models/other")[0] == 404
    assert server.ask("GET", "/v2")[0] == 404
    assert server.ask("GET", CHAT)[0] == 405
    assert server.ask("POST", CHAT, "{")[0] == 400
    assert server.ask("POST", CHAT, "[]")[0] == 400
    assert server.ask("POST", CHAT)[0] == 400


def test_health_metrics_and_the_page(server) -> None:
    status, _, answer = server.ask("GET", "/health")
    assert (status, json.loads(answer)) == (200, {"status": "ok"})
    server.client.completions.create(model="tiny", prompt="Hi", max_tokens=3)
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    asked = {"messages": [{"role": "user", "content": "Hi"}], "response_format": wrong}
    assert server.ask("POST", CHAT, json.dumps(asked))[0] == 400
    _, _, answer = server.ask("GET", "/metrics")
    lines = [line for line in answer.decode().splitlines() if not line.startswith("#")]
    values = dict(line.rsplit(" ", 1) for line in lines)
    assert float(values['triforce_tokens_total{kind="generated"}']) >= 3
    assert float(values['triforce_requests_total{outcome="length"}']) >= 1
    for name in ('requests_total{outcome="refused"}', 'refusals_total{status="400"}'):
        assert float(values[f"triforce_{name}"]) >= 1
    assert 'triforce_requests_total{outcome="failed"}' not in values
    status, headers, answer = server.ask("GET", "/")
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/html")
    assert b"<title>triforce</title>" in answer
    loads = rb"(?:src|href|action)\s*=\s*[\"']?(?:https?:)?//|url\(http|@import|fetch\([\"']http"
    assert not re.search(loads, answer), "it needs nothing from elsewhere"
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


def test_pages_elsewhere_cannot_use_a_browser_to_get_here(server) -> None:
    for path in ("/", "/v1/models", "/health"):
        status, _, answer = server.ask("GET", path, headers={"Host": "evil.example:80"})
        assert status == 403
        assert "evil.example" in json.loads(answer)["error"]["message"]
    for name in ("testserver", "localhost.evil.example", ""):
        assert server.ask("GET", "/health", headers={"Host": name})[0] == 403
    for name in ("localhost", "127.0.0.1:8080", "[::1]"):
        assert server.ask("GET", "/health", headers={"Host": name})[0] == 200
    status, headers, _ = server.ask("OPTIONS", CHAT, headers={"Origin": "x"})
    assert status == 405
    assert "access-control-allow-origin" not in headers


def test_a_key_is_asked_for_and_loading_says_so(speaking) -> None:
    running = Running(speaking, ServerSettings(name="tiny", api_key="secret", max_body=2000))
    running.gate.clear()
    running.start()
    try:
        status, _, answer = running.ask("GET", "/health")
        assert (status, json.loads(answer)["status"]) == (503, "loading")
        key = {"Authorization": "Bearer secret"}
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
        status, headers, _ = running.ask("POST", CHAT, body, key)
        assert (status, headers["retry-after"]) == (503, "5")
        running.gate.set()
        running.ready()
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert running.ask("GET", "/v1/models", headers=given)[0] == 401
            assert running.ask("GET", "/metrics", headers=given)[0] == 401
        assert running.ask("POST", CHAT, body, key)[0] == 200
        assert running.ask("GET", "/")[0] == 200
        body["messages"] = [{"role": "user", "content": "x" * 3000}]
        status, _, answer = running.ask("POST", CHAT, body, key)
        assert status == 413
        assert b"larger than the 2000 bytes" in answer
        # The same without saying so beforehand.
        status, _, _ = running.ask("POST", CHAT, iter([b"x" * 1500] * 3), key)
        assert status == 413
    finally:
        running.stop()


def test_it_says_ready_only_once_it_is(speaking) -> None:
    """A client that waits for the line `ready: ...` is never answered that the model loads."""
    running = Running(speaking, ServerSettings(name="tiny"))
    seen = []
    running.worker.became_ready = lambda engine: seen.append(running.ask("GET", "/health")[0])
    running.start()
    try:
        until(lambda: seen)
    finally:
        running.stop()
    assert seen == [200]


def test_every_route_but_health_and_the_page_asks_for_the_key(speaking) -> None:
    with serving(speaking, ServerSettings(name="tiny", api_key="secret")) as running:
        routes = [
            (method.upper(), path.replace("{model}", "tiny"))
            for path, methods in running.app.openapi()["paths"].items()
            for method in methods
        ]
        asking = [each for each in routes if each[1] not in ("/", "/health")]
        assert {("POST", CHAT), ("POST", "/v1/completions")} < set(asking)
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
        wrong = ("Bearer wrong", "Bearer ", "Bearer secrets", "Basic secret", "secret")
        for method, path in asking:
            sent = body if method == "POST" else None
            for headers in ({}, *({"Authorization": given} for given in wrong)):
                status, _, answer = running.ask(method, path, sent, headers)
                assert (status, b"API key" in answer) == (401, True), (method, path, headers)
        key = {"Authorization": "Bearer secret"}
        assert running.ask("POST", CHAT, body, key)[0] == 200
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}
        assert running.ask("POST", "/v1/completions", body, key)[0] == 200


def test_a_full_queue_says_when_to_come_back(speaking) -> None:
    with slow(speaking) as running:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 200}
        asking = [threading.Thread(target=running.ask, args=("POST", CHAT, body)) for _ in "ab"]
        for thread in asking:
            thread.start()
        until(lambda: running.worker.running and running.worker.waiting == 1)
        for stream in (False, True):
            status, headers, answer = running.ask("POST", CHAT, body | {"stream": stream})
            assert (status, headers["retry-after"]) == (429, "5")
            assert json.loads(answer)["error"]["code"] == "queue_full"
        # Closing ends what is under way and what waits.
        running.worker.stop()
        for thread in asking:
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(speaking, monkeypatch, capsys, stream: bool) -> None:
    with slow(speaking) as running:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 250, "stream": stream}
        results: list[Completion] = []

        def served(job: Job, result: Completion) -> None:
            log_text(job, result)
            results.append(result)

        monkeypatch.setattr(running.worker, "_served", served)
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        until(lambda: running.worker.running)
        answer = None
        if stream:
            answer = connection.getresponse()
            assert answer.read(10)
            answer.close()
        connection.close()
        until(lambda: not running.worker.running)
        (cut,) = results
        assert cut.finish_reason == "interrupted"
        assert len(cut.token_ids) < 250
        short = body | {"max_tokens": 1, "stream": False}
        assert running.ask("POST", CHAT, short)[0] == 200
    said = capsys.readouterr().err
    new = len(cut.token_ids)
    assert re.search(rf"text: \d+ prompt tokens \(0 reused\), {new} new, interrupted, ", said)


def test_a_request_need_not_name_the_model(server) -> None:
    for path, body in (
        (CHAT, {"messages": HELLO, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}),
    ):
        status, _, answer = server.ask("POST", path, body)
        assert (status, json.loads(answer)["model"]) == (200, "tiny")
        assert server.ask("POST", path, body | {"model": "other"})[0] == 404


def test_streams_say_that_they_are_alive(speaking, monkeypatch) -> None:
    monkeypatch.setattr("triforce_core.server.answers.PING_SECONDS", 0.02)
    with slow(speaking) as running:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "stream": True}
        _, _, answer = running.ask("POST", CHAT, body)
        events = answer.decode().split("\n\n")
        assert any(event.startswith(": ") for event in events)
        assert events[-2] == "data: [DONE]"


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match=r"a server on 0.0.0.0 can be reached from elsewhere"):
        ServerSettings(host="0.0.0.0")
    assert ServerSettings(host="0.0.0.0", api_key="x").port == 8080
    for wrong in ({"port": 70000}, {"queue": 0}, {"contexts": -1}, {"api_key": " "}):
        with pytest.raises(UsageError):
            ServerSettings(**wrong)


def test_several_texts_of_one_request_wait_together(speaking) -> None:
    with slow(speaking) as running:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 5, "n": 3}
        answers: list[tuple] = []
        thread = threading.Thread(target=lambda: answers.append(running.ask("POST", CHAT, body)))
        thread.start()
        until(lambda: running.worker.running)
        # The queue has one place, which the request's other texts take together.
        assert running.worker.waiting == 1
        assert running.ask("POST", CHAT, body)[0] == 429
        thread.join(30)
        assert answers[0][0] == 200
        assert len(json.loads(answers[0][2])["choices"]) == 3


def test_clients_that_left_leave_room(speaking) -> None:
    with slow(speaking) as running:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 100}
        header = {"Content-Type": "application/json"}
        connections = []
        for _ in range(2):
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
            connection.request("POST", CHAT, json.dumps(body), header)
            connections.append(connection)
            until(lambda: running.worker.running)
        until(lambda: running.worker.waiting == 1)
        connections[1].close()
        until(lambda: running.worker.waiting == 0)
        connections[0].close()
        assert running.ask("POST", CHAT, body | {"max_tokens": 1})[0] == 200


def test_what_a_closing_server_cuts_is_no_answer(speaking) -> None:
    with slow(speaking) as running:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 200}
        answers: list[tuple] = []
        thread = threading.Thread(target=lambda: answers.append(running.ask("POST", CHAT, body)))
        thread.start()
        until(lambda: running.worker.running)
        running.worker.stop()
        thread.join(30)
        assert answers[0][0] == 503
        assert json.loads(answers[0][2])["error"]["code"] == "not_ready"


def test_a_port_in_use_is_told_before_anything_is_loaded(
    speaking, server, capsys, monkeypatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(Engine, "from_pretrained", lambda *model, **_: loaded.append(model))
    code, _, err = run(capsys, "serve", speaking, "--port", server.port, "--device", "cpu")
    assert (code, "cannot listen on 127.0.0.1" in err) == (2, True)
    assert "Address already in use; give another --port\n" in err
    assert "ready:" not in err
    assert not loaded


@pytest.mark.slow
def test_a_signal_ends_a_server_that_loads_or_serves(speaking) -> None:
    for wait_for in (b"Waiting for application startup", b"ready:"):
        served = subprocess.Popen(
            [
                *(sys.executable, "-m", "triforce_core.cli", "serve", str(speaking)),
                *("--port", "0", "--device", "cpu"),
            ],
            stderr=subprocess.PIPE,
            preexec_fn=heed_signals,
        )
        try:
            while wait_for not in (line := served.stderr.readline()):
                assert line, "it ended by itself"
            served.send_signal(signal.SIGTERM)
            served.wait(20)
            assert served.returncode in (143, -signal.SIGTERM)
        finally:
            served.kill()
            served.stderr.close()
            served.wait()


@pytest.mark.slow
def test_requests_that_come_together_are_served_together(speaking) -> None:
    """Streamed and whole, of different lengths, one of them given up: each is what it is alone."""
    options = {"method": "autoregressive", "placement": PLACEMENTS["weights"], "sequences": 4}
    settings = ServerSettings(name="tiny", queue=8)
    with serving(speaking, settings, link_bandwidth="4MB/s", **options) as running:
        bodies = [
            {
                "model": "tiny",
                "prompt": f"text {i} " * (i + 1),
                "max_tokens": 8 + i,
                "temperature": 0,
            }
            for i in range(6)
        ]
        path = "/v1/completions"
        alone = [json.loads(running.ask("POST", path, body)[2]) for body in bodies]
        answers: dict[int, dict] = {}
        most = []

        def ask(index: int) -> None:
            answers[index] = json.loads(running.ask("POST", path, bodies[index])[2])
            most.append(len(running.worker.running))

        left = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
        header = {"Content-Type": "application/json"}
        left.request("POST", path, json.dumps(bodies[0] | {"max_tokens": 200}), header)
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        until(lambda: len(running.worker.running) == 4)
        left.close()
        for thread in threads:
            thread.join(60)
        until(lambda: not running.worker.running, 10)
        texts = [answers[i]["choices"][0]["text"] for i in range(6)]
        assert texts == [answer["choices"][0]["text"] for answer in alone]
        assert any(most), "none was under way when another ended"


@pytest.mark.slow
def test_choices_of_one_request_stream_side_by_side(speaking) -> None:
    options = {"method": "autoregressive", "placement": PLACEMENTS["weights"], "sequences": 3}
    settings = ServerSettings(name="tiny", queue=8)
    with serving(speaking, settings, link_bandwidth="4MB/s", **options) as running:
        body = {"model": "tiny", "prompt": "a text", "max_tokens": 30, "n": 3, "stream": True}
        _, _, answer = running.ask("POST", "/v1/completions", body | {"seed": 1})
        events = [line[6:] for line in answer.decode().split("\n\n") if line.startswith("data: {")]
        given = [choice["index"] for e in events for choice in json.loads(e)["choices"]]
        assert set(given) == {0, 1, 2}
        first_end = given.index(0) + given.count(0)
        assert {1, 2} & set(given[:first_end]), "one choice after another"


def test_of_streams_that_come_at_once_each_is_whole_or_refused_with_a_status(speaking) -> None:
    """More than there is room for: none begins and then says that the queue is full."""
    with slow(speaking, queue=3) as running:
        body = {"model": "tiny", "messages": HELLO, "max_tokens": 2, "stream": True}
        answers: list[tuple] = []
        threads = [
            threading.Thread(target=lambda: answers.append(running.ask("POST", CHAT, body)))
            for _ in range(40)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert {status for status, _, _ in answers} == {200, 429}
        for status, _, answer in answers:
            assert status == 429 or answer.endswith(b"data: [DONE]\n\n"), answer
