"""`triforce serve`: one model behind an OpenAI-compatible interface, and a page to talk to it."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from triforce_core.cli.chat import DEFAULT_CONTEXT
from triforce_core.cli.leaving import leave
from triforce_core.cli.options import engine_config, given
from triforce_core.cli.output import JSON_LOGGING, logs_json, say
from triforce_core.cli.ranks import followed, of_world
from triforce_core.opening import OpenModel
from triforce_offload.errors import UsageError

KEY_VARIABLE = "TRIFORCE_API_KEY"


def serve(args: argparse.Namespace) -> int:
    """Serves until a signal ends it. Returns the exit code.

    Raises what the engine does not outlive.
    """
    if (code := followed(quiet=args.quiet)) is not None:
        return code
    try:
        import uvicorn

        from triforce_core.server.app import make_app
        from triforce_core.server.connections import uvicorn_config
        from triforce_core.server.metrics import Metrics
        from triforce_core.server.settings import ServerSettings
        from triforce_core.server.worker import Worker
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the server needs the package {error.name}: pip install 'triforce-offload[server]'"
        ) from error
    model = OpenModel.at(args.model)
    if model.tokenizer is None:
        model.close()
        raise UsageError(f"{model.checkpoint.path} has no tokenizer")
    named = {"name": args.name or Path(str(args.model).rstrip("/")).name}
    key = args.api_key or os.environ.get(KEY_VARIABLE)
    settings = ServerSettings(**{**given(args, ServerSettings), **named, "api_key": key})
    config = of_world(engine_config(args, None))
    if config.max_context is None:
        positions = model.checkpoint.config.positions
        config = replace(config, max_context=min(positions, DEFAULT_CONTEXT))

    def load(progress: Callable[[str, int, int], None]) -> object:
        from triforce_core.engine import Engine

        try:
            engine = Engine.from_pretrained(model, config, progress=progress)
        finally:
            model.close()
        if not args.quiet and worker.state == "loading":
            say(f"plan: {engine.plan_line}")
            say(f"ready: http://{settings.host}:{settings.port}/ and /v1")
        return engine

    metrics = Metrics()
    worker = Worker(load, settings.queue, settings.contexts, metrics.served)

    class Server(uvicorn.Server):
        def handle_exit(self, number: int, frame: FrameType | None) -> None:
            # What loads, or a second signal, waits for nothing.
            if worker.state in ("loading", "closed"):
                leave(number)
            worker.stop()
            super().handle_exit(number, frame)

    server = Server(
        uvicorn_config(
            make_app(worker, settings, metrics),
            settings.host,
            settings.port,
            log_level="warning" if args.quiet else "info",
            access_log=args.log_requests,
            log_config=JSON_LOGGING if logs_json() else uvicorn.config.LOGGING_CONFIG,
            timeout_graceful_shutdown=10,
            server_header=False,
        )
    )

    def failed() -> None:
        server.should_exit = True

    worker.failed = failed
    with listening(settings.host, settings.port) as door:
        server.run([door])
    if worker.error is not None:
        raise worker.error
    return 0


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens, before anything is loaded. Raises UsageError."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.create_server(address[:2], family=family, reuse_port=False)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot listen on {host}:{port}: {reason}") from error
    with made:
        yield made
