"""A server in a thread, on a port of its own."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import uvicorn
from helpers import PLACEMENTS

from triforce_core import Engine
from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_core.server.app import make_app
from triforce_core.server.connections import uvicorn_config
from triforce_core.server.metrics import Metrics
from triforce_core.server.settings import ServerSettings
from triforce_core.server.wording.model_files import ModelFiles
from triforce_core.server.worker import Worker

CONTEXT = 300
HELLO = [{"role": "user", "content": "Hello"}]


class Running:
    """gate: the model is not loaded before it is set."""

    def __init__(self, model: Path, settings: ServerSettings, **options: Any) -> None:
        self.settings, self.model = settings, model
        options = {"device": "cpu", "max_context": CONTEXT, **options}
        self.gate = threading.Event()
        self.gate.set()

        def load(progress: Any) -> Engine:
            self.gate.wait(60)
            return Engine.from_pretrained(model, progress=progress, **options)

        metrics = Metrics()
        self.worker = Worker(load, settings.queue, settings.contexts, metrics.served)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        # The lines of refused requests.
        self.log: list[str] = []
        with closing(open_checkpoint(model)) as checkpoint:
            files = ModelFiles.of(checkpoint)
        self.app = make_app(self.worker, settings, metrics, files, self.log.append)
        config = uvicorn_config(self.app, "127.0.0.1", self.port, log_level="error")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @property
    def client(self) -> openai.OpenAI:
        key = self.settings.api_key or "none"
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)

    def start(self) -> None:
        self._thread.start()
        until(lambda: self._server.started)

    def ready(self) -> None:
        until(lambda: self.worker.state != "loading")
        assert self.worker.state == "ready", self.worker.error

    def stop(self) -> None:
        self.gate.set()
        self.worker.stop()
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = json.dumps(body) if isinstance(body, (dict, list)) else body
        given = {"Content-Type": "application/json"} if data is not None else {}
        connection.request(method, path, data, given | (headers or {}))
        answer = connection.getresponse()
        whole = answer.read()
        connection.close()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, whole


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.01)


@contextmanager
def serving(
    model: Path, settings: ServerSettings | None = None, **options: Any
) -> Iterator[Running]:
    running = Running(model, settings or ServerSettings(name="tiny"), **options)
    running.start()
    try:
        running.ready()
        yield running
    finally:
        running.stop()


def slow(model: Path, queue: int = 1) -> AbstractContextManager[Running]:
    """A server whose passes take a tenth of a second or so."""
    return serving(
        model,
        ServerSettings(name="tiny", queue=queue),
        method="autoregressive",
        placement=PLACEMENTS["weights"],
        link_bandwidth="4MB/s",
    )
