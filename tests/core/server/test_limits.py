"""What may be sent costs little before it is served: long texts, many of them, slow and idle
connections.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPResponse
from types import SimpleNamespace

import pytest
from running import CONTEXT, HELLO, Running, serving, until

from triforce_core import SamplingParams
from triforce_core.conversation import Conversations, Turn
from triforce_core.model.tokenizing.tokenizer import Tokenizer
from triforce_core.server import asking, connections
from triforce_core.server.settings import ServerSettings
from triforce_core.server.worker import Job, Prompt, Worker
from triforce_offload.errors import UsageError

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
MOST = CONTEXT * asking.MOST_CHARACTERS_OF_A_TOKEN


@pytest.fixture
def never_tokenised(monkeypatch) -> None:
    def called(*_: object) -> None:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(Tokenizer, "render", called)
    monkeypatch.setattr(Tokenizer, "encode", called)


@pytest.mark.parametrize(
    ("path", "asked", "said"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * (MOST + 1)}]}, "characters"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * MOST}, *HELLO]}, "characters"),
        (CHAT, {"messages": HELLO * CONTEXT}, f"context length is {CONTEXT}"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 20_000}, "messages"),
        (COMPLETE, {"prompt": "x" * (MOST + 1)}, "characters"),
        (COMPLETE, {"prompt": ["x", "x" * (MOST + 1)]}, "characters"),
        (COMPLETE, {"prompt": [1] * CONTEXT}, f"context length is {CONTEXT}"),
        (COMPLETE, {"prompt": ["x"] * 17}, "16"),
        (COMPLETE, {"prompt": ["x"] * 9, "n": 2}, "16"),
    ],
)
def test_more_than_there_can_be_room_for_is_refused_unseen(
    server, never_tokenised, path: str, asked: dict, said: str
) -> None:
    status, _, answer = server.ask("POST", path, {"model": "tiny"} | asked)
    assert status == 400
    assert said in json.loads(answer)["error"]["message"]


def test_a_text_that_is_tokenised_has_a_place_in_the_queue(speaking, monkeypatch) -> None:
    """And the server answers others meanwhile."""
    turn, let_go = Conversations.turn, threading.Event()
    begun: list[threading.Thread] = []

    def waiting(*arguments: object) -> object:
        begun.append(threading.current_thread())
        assert let_go.wait(60)
        return turn(*arguments)

    monkeypatch.setattr(Conversations, "turn", waiting)
    with serving(speaking, ServerSettings(name="tiny", queue=1)) as running:
        body, answers = {"model": "tiny", "messages": HELLO, "max_tokens": 2}, []
        asking = [
            threading.Thread(target=lambda: answers.append(running.ask("POST", CHAT, body)))
            for _ in "ab"
        ]
        for thread in asking:
            thread.start()
        # One that the idle engine takes next, and one that waits.
        until(lambda: len(begun) == 2)
        assert threading.main_thread() not in begun
        assert running.worker.waiting == 2
        assert running.ask("GET", "/health")[0] == 200
        status, _, answer = running.ask("POST", CHAT, body)
        assert (status, json.loads(answer)["error"]["code"]) == (429, "queue_full")
        let_go.set()
        for thread in asking:
            thread.join(60)
        assert [answer[0] for answer in answers] == [200, 200]
        until(lambda: running.worker.waiting == 0)


def test_what_cannot_be_tokenised_gives_its_place_back(server) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}
    for _ in range(40):
        assert server.ask("POST", CHAT, body)[0] == 400
    assert server.worker.waiting == 0


BODY = json.dumps({"model": "tiny", "messages": HELLO, "max_tokens": 2}).encode()
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as made:
        yield made


def is_closed(connection: socket.socket) -> bool:
    """Wait until the other end has closed it, whatever it answers before. A reset closes it too."""
    with suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def answer(connection: socket.socket) -> bytes:
    """The first part of what is answered."""
    return connection.recv(1 << 16)


@pytest.mark.parametrize(
    ("deadline", "sent"),
    [
        ("HEAD_SECONDS", b""),
        ("HEAD_SECONDS", HEAD[:1]),
        ("HEAD_SECONDS", HEAD[:-2]),
        ("BODY_SECONDS", HEAD),
        ("BODY_SECONDS", HEAD + BODY[:-1]),
        # Answered before its body is there, which does not come.
        ("BODY_SECONDS", HEAD.replace(b"/v1/chat", b"/v2/chat")),
        ("BODY_SECONDS", HEAD.replace(b"Host: localhost", b"Host: elsewhere")),
    ],
)
def test_who_does_not_say_what_it_wants_is_cut(
    server, monkeypatch, deadline: str, sent: bytes
) -> None:
    with monkeypatch.context() as soon:
        soon.setattr(connections, deadline, 0.2)
        with connected(server) as connection:
            with suppress(ConnectionError):  # on a busy machine it is cut before it sends
                connection.sendall(sent)
            assert is_closed(connection)
    assert server.ask("GET", "/health")[0] == 200


def test_a_second_request_that_is_half_sent_is_cut(server, monkeypatch) -> None:
    with connected(server) as connection:
        connection.sendall(GET)
        assert b"200 OK" in answer(connection)
        monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
        connection.sendall(GET[:-2])
        assert is_closed(connection)


def test_who_drips_is_cut_too(server, monkeypatch) -> None:
    """A deadline is of the whole head, and not of the time between two bytes."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with connected(server) as connection:
        cut = threading.Event()
        threading.Thread(target=lambda: is_closed(connection) and cut.set(), daemon=True).start()
        dripped = 0
        while not cut.wait(0.05):
            with suppress(ConnectionError):
                connection.sendall(b"X")
            dripped += 1
            assert dripped < 1000


def test_who_waits_for_an_answer_is_not_cut(server, monkeypatch) -> None:
    """Whole requests, one after another on a connection: no deadline runs while one is answered."""
    turn, deadlines = Conversations.turn, []

    def looking(*arguments: object) -> object:
        (theirs,) = server._server.server_state.connections
        deadlines.append(theirs._deadline)
        return turn(*arguments)

    until(lambda: not server._server.server_state.connections)
    monkeypatch.setattr(Conversations, "turn", looking)
    with connected(server) as connection:
        for _ in range(2):
            connection.sendall(HEAD + BODY)
            answered = HTTPResponse(connection)
            answered.begin()
            assert (answered.status, json.loads(answered.read())["object"]) == (
                200,
                "chat.completion",
            )
    assert deadlines == [None, None]


def test_connections_beyond_the_most_are_closed_as_they_come(server, monkeypatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 60.0)
    here = server._server.server_state.connections
    until(lambda: not here)
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 3)
    with connected(server), connected(server), connected(server) as last:
        until(lambda: len(here) == 3)
        with connected(server) as another:
            assert is_closed(another)
        last.sendall(GET)
        assert b"200 OK" in answer(last)
    until(lambda: not here)
    assert server.ask("GET", "/health")[0] == 200


def test_requests_of_clients_that_have_gone_are_not_kept() -> None:
    """Clients that wait too long try again. What they asked for first leaves the queue."""
    worker = Worker(lambda progress: None, 2, 0)
    worker.state, worker.engine = "ready", SimpleNamespace(sequences=1, max_context=CONTEXT)
    worker.running = [Job(Prompt(Turn("", [1]), False), SamplingParams(), print)]
    for _ in range(9):
        jobs = [Job(Prompt(Turn("Hi", [1]), False), SamplingParams(), print) for _ in range(2)]
        worker.submit(jobs)
        worker.cancel(jobs)
    assert not worker._jobs
    assert worker.waiting == 0


def test_pages_of_allowed_origins_alone_may_read_answers(speaking) -> None:
    """A browser asks first, without a key, and reads refusals too."""
    allowed = "http://localhost:3000"
    settings = ServerSettings(
        name="tiny", api_key="secret", allow_origins=f"{allowed}, https://b.example"
    )
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    with serving(speaking, settings) as running:
        for origin in (allowed, "https://b.example", "http://evil.example"):
            given = {"Origin": origin}
            status, first, _ = running.ask("OPTIONS", "/v1/chat/completions", headers=asked | given)
            refused, second, _ = running.ask("GET", "/v1/models", headers=given)
            key = {"Authorization": "Bearer secret"}
            answered, third, _ = running.ask("GET", "/v1/models", headers=given | key)
            assert (refused, answered) == (401, 200)
            assert (status == 200) == (origin != "http://evil.example")
            for headers in (first, second, third):
                named = headers.get("access-control-allow-origin")
                assert named == (origin if origin != "http://evil.example" else None)


@pytest.mark.parametrize(
    "wrong", ["*", "localhost:3000", "http://a/b", "http://a,*", "http://a@b", "http://a?b"]
)
def test_what_is_no_origin_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="an origin is a scheme, a host"):
        ServerSettings(allow_origins=wrong)
