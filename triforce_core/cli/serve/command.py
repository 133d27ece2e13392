"""`triforce serve`: serve one model through an OpenAI-compatible API and a web page."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from triforce_core.cli.chat.arguments import DEFAULT_CONTEXT
from triforce_core.cli.options import check_ctx_size, engine_config, given
from triforce_core.cli.ranks import followed, of_world
from triforce_core.cli.terminal.ending import leave
from triforce_core.cli.terminal.output import JSON_LOGGING, WARNING, announce, logs_json, say
from triforce_core.loading.open_model import OpenModel
from triforce_core.settings import EngineConfig
from triforce_offload.errors import UsageError

if TYPE_CHECKING:
    from uvicorn import Config

    from triforce_core.engine import Engine
    from triforce_core.requests.stream import Completion
    from triforce_core.server.worker import Job, Worker

KEY_VARIABLE = "TRIFORCE_API_KEY"


def serve(args: argparse.Namespace) -> int:
    """Serve until a signal arrives. Return the exit code.

    Raises errors after which the engine cannot continue.
    """
    if (code := followed(quiet=args.quiet)) is not None:
        return code
    try:
        from uvicorn.config import LOGGING_CONFIG

        from triforce_core.server.app import make_app
        from triforce_core.server.connections import uvicorn_config
        from triforce_core.server.metrics import Metrics
        from triforce_core.server.settings import SUFFIX, ServerSettings
        from triforce_core.server.wording.model_files import ModelFiles
        from triforce_core.server.worker import Worker
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the server needs the package {error.name}: "
            f"{sys.executable} -m pip install 'triforce-offload[server]'"
        ) from error
    model = _open(args.model)
    named = {"name": args.name or Path(str(args.model).rstrip("/")).name.removesuffix(SUFFIX)}
    key = args.api_key or os.environ.get(KEY_VARIABLE)
    settings = ServerSettings(**{**given(args, ServerSettings), **named, "api_key": key})
    config = _config(args, model)

    def announce(engine: Engine) -> None:
        say(f"plan: {engine.plan_line}")
        say(f"ready: http://{settings.host}:{settings.port}/ and /v1; the model is {settings.name}")

    metrics = Metrics()

    def served(job: Job, result: Completion | BaseException) -> None:
        metrics.served(job, result)
        if args.log_requests:
            log_text(job, result)

    def log(line: str) -> None:
        if args.log_requests:
            say(line, WARNING)

    worker = Worker(_loader(model, config), settings.queue, settings.contexts, served)
    if not args.quiet:
        worker.became_ready = announce
    run(
        worker,
        uvicorn_config(
            make_app(worker, settings, metrics, ModelFiles.of(model.checkpoint), log),
            settings.host,
            settings.port,
            log_level="warning" if args.quiet else "info",
            access_log=args.log_requests,
            log_config=JSON_LOGGING if logs_json() else LOGGING_CONFIG,
            timeout_graceful_shutdown=10,
            server_header=False,
        ),
    )
    return 0


def _loader(
    model: OpenModel, config: EngineConfig
) -> Callable[[Callable[[str, int, int], None]], Engine]:
    """Return what loads the engine, and then closes the model's files."""

    def load(progress: Callable[[str, int, int], None]) -> Engine:
        from triforce_core.engine import Engine

        try:
            return Engine.from_pretrained(model, config, progress=progress)
        finally:
            model.close()

    return load


def log_text(job: Job, result: Completion | BaseException) -> None:
    """Log a text that has ended, also if its client has gone."""
    seconds = time.monotonic() - job.submitted
    if isinstance(result, BaseException):
        say(f"text: {type(result).__name__} after {seconds:.1f} s: {result}", WARNING)
        return
    stats = result.stats
    tokens = f"{stats['prompt_tokens']} prompt tokens ({stats['reused_tokens']} reused)"
    line = f"text: {tokens}, {stats['new_tokens']} new, {result.finish_reason}, {seconds:.1f} s"
    say(line, finish_reason=result.finish_reason, seconds=seconds)


def run(worker: Worker, config: Config) -> None:
    """Serve until a signal arrives or the worker fails. Raises the worker's error."""
    from uvicorn import Server

    class Stoppable(Server):
        def handle_exit(self, number: int, frame: FrameType | None) -> None:
            # While the model loads, or on a second signal, the process exits immediately.
            if worker.state in ("loading", "closed"):
                leave(number)
            worker.stop()
            super().handle_exit(number, frame)

    server = Stoppable(config)

    def failed() -> None:
        server.should_exit = True

    worker.failed = failed
    with listening(config.host, config.port) as door:
        server.run([door])
    if worker.error is not None:
        raise worker.error


def _open(name: str) -> OpenModel:
    """Open a model that has a tokenizer. Raises UsageError."""
    model = OpenModel.at(name, announce=announce)
    if model.tokenizer is None:
        model.close()
        raise UsageError(f"{model.checkpoint.path} has no tokenizer")
    return model


def _config(args: argparse.Namespace, model: OpenModel) -> EngineConfig:
    config = of_world(engine_config(args, None))
    positions = model.checkpoint.config.positions
    check_ctx_size(config.max_context, positions)
    return replace(config, max_context=config.max_context or min(positions, DEFAULT_CONTEXT))


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open a listening socket, before anything is loaded. Raises UsageError."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.create_server(address[:2], family=family, reuse_port=False)
    except OSError as error:
        # Python adds the address to what the system says.
        reason = str(error.strerror or error).partition(" (while attempting")[0]
        if error.errno == errno.EADDRINUSE:
            reason += "; give another --port"
        raise UsageError(f"cannot listen on {host}:{port}: {reason}") from error
    with made:
        yield made
