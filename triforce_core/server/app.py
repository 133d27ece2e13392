"""The routes of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from triforce_core.conversation import Turn
from triforce_core.params import SamplingParams, checked
from triforce_core.requests.reasoning import variables
from triforce_core.server.answers import Answers, ClientGoneError
from triforce_core.server.errors import (
    ContextLengthError,
    NotReadyError,
    QueueFullError,
    UnknownModelError,
    refused,
)
from triforce_core.server.guard import BodyTooLargeError, Guard, too_large
from triforce_core.server.messages.schema import MOST_CHOICES, ChatRequest, CompletionRequest
from triforce_core.server.messages.sentences import sentence
from triforce_core.server.messages.wording import Wording, refusal
from triforce_core.server.metrics import Metrics
from triforce_core.server.settings import ServerSettings
from triforce_core.server.worker import Asked, Worker
from triforce_offload.errors import TriforceError, UsageError

_RETRY_SECONDS = "5"
# Prompts with more characters than this for each token of the context are rejected before they are
# tokenised, because tokenising them would take minutes and gigabytes. Natural languages average 1
# to 6 characters per token.
MOST_CHARACTERS_OF_A_TOKEN = 16
_Made = TypeVar("_Made")
# The page loads nothing but itself and talks to this server only.
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_app(worker: Worker, settings: ServerSettings, metrics: Metrics) -> FastAPI:
    """Return the app that serves a worker. The app starts and closes the worker."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.close)

    app = FastAPI(title="triforce-offload", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, settings=settings)
    _add_errors(app, settings)
    _add_health(app, worker, settings, metrics)
    defaults = variables(settings.reasoning)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        _check(worker, settings, body.model)
        messages = [message.as_dict() for message in body.messages]
        _check_length(worker, [message["content"] for message in messages], len(messages))
        turn = await _prepared(
            worker, lambda: worker.conversations.turn(messages, defaults | body.template_variables)
        )
        return await _answer(request, body, [Asked(turn, True, body.owner)], body.params)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        _check(worker, settings, body.model)
        prompts = body.prompts
        if not 1 <= len(prompts) * body.choices <= MOST_CHOICES:
            raise UsageError(f"a request has 1 to {MOST_CHOICES} texts, got {len(prompts)} prompts")
        for prompt in prompts:
            if isinstance(prompt, str):
                _check_length(worker, [prompt], 0)
            else:
                _check_length(worker, [], len(prompt))
        ids = await _prepared(worker, lambda: list(map(worker.engine.token_ids, prompts)))
        asked = [Asked(Turn("", tokens), False, body.owner) for tokens in ids]
        return await _answer(request, body, asked, body.params)

    async def _answer(
        request: Request,
        body: ChatRequest | CompletionRequest,
        asked: list[Asked],
        params_of: Callable[[int], SamplingParams],
    ) -> Response:
        params = [_fitting(worker, each, params_of) for each in asked]
        prompt = asked[0].turn.text if isinstance(body, ChatRequest) else None
        wording = _wording(worker, settings, prompt, params[0])
        answers = Answers(worker, wording, asked, params, body.choices)
        if not body.stream:
            return JSONResponse(await answers.whole(request))
        usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(
            await answers.events(include_usage=usage),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    return app


def _add_health(app: FastAPI, worker: Worker, settings: ServerSettings, metrics: Metrics) -> None:
    created = int(time.time())

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        text = files("triforce_core.server").joinpath("page.html").read_text("utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _PAGE_POLICY})

    @app.get("/health")
    async def health() -> JSONResponse:
        about: dict[str, Any] = {"status": "ok" if worker.state == "ready" else worker.state}
        if worker.state == "loading":
            about["progress"] = worker.progress
        return JSONResponse(about, 200 if worker.state == "ready" else 503)

    @app.get("/metrics")
    async def measured() -> Response:
        return Response(metrics.text(worker), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != settings.name:
            raise UnknownModelError(_other_model(name, settings))
        return _model()

    def _model() -> dict[str, Any]:
        about = {
            "id": settings.name,
            "object": "model",
            "created": created,
            "owned_by": "triforce",
        }
        if worker.state == "ready":
            about["context_length"] = worker.context_tokens
        return about


def _add_errors(app: FastAPI, settings: ServerSettings) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        message, where = sentence(error.errors()[0])
        return JSONResponse(refusal(message, "invalid_request_error", None, where), 400)

    @app.exception_handler(BodyTooLargeError)
    async def large(request: Request, error: BodyTooLargeError) -> JSONResponse:
        return too_large(settings)

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        # nginx uses status 499 for a client that has left; nobody reads the answer.
        return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        # FastAPI reports a body that grows too large while it is read as a parsing error.
        if isinstance(error.__cause__, BodyTooLargeError):
            return too_large(settings)
        # It also reports a body that is not UTF-8, or that is nested too deeply, with status 400.
        unreadable = error.status_code == 400 and error.__cause__ is not None
        message = "the body cannot be read as JSON in UTF-8" if unreadable else str(error.detail)
        content = refusal(message, "invalid_request_error")
        return JSONResponse(content, error.status_code, headers=error.headers)

    @app.exception_handler(TriforceError)
    async def typed(request: Request, error: TriforceError) -> JSONResponse:
        status, content = refused(error)
        busy = isinstance(error, (QueueFullError, NotReadyError))
        return JSONResponse(content, status, {"Retry-After": _RETRY_SECONDS} if busy else None)


def _check(worker: Worker, settings: ServerSettings, model: str) -> None:
    worker.check_ready()
    if model != settings.name:
        raise UnknownModelError(_other_model(model, settings))


def _other_model(name: str, settings: ServerSettings) -> str:
    return f"there is no model {name!r} here; this server has {settings.name!r}"


def _wording(
    worker: Worker, settings: ServerSettings, prompt: str | None, params: SamplingParams
) -> Wording:
    """Return the wording of an answer. prompt: the rendered prompt of a chat, else None"""
    guided = params.json_schema is not None
    return Wording(settings.name, worker.engine.tokenizer, prompt=prompt, guided=guided)


def _fitting(
    worker: Worker, asked: Asked, params_of: Callable[[int], SamplingParams]
) -> SamplingParams:
    """Return the sampling parameters of one prompt, limited to the room left in the context.

    Raises ContextLengthError if the prompt fills the context.
    """
    most, prompt = worker.context_tokens, len(asked.turn.tokens)
    if prompt >= most:
        raise ContextLengthError(
            f"the prompt has {prompt} tokens, and the context has room for {most}"
        )
    return checked(params_of(most - prompt), worker.engine.config.vocab)


def _check_length(worker: Worker, texts: Sequence[str], least_tokens: int) -> None:
    """Reject a prompt that cannot fit the context, before any work is done.

    least_tokens: a lower bound on the tokens of the prompt that do not come from `texts`
    Raises ContextLengthError.
    """
    most, characters = worker.context_tokens, sum(map(len, texts))
    if least_tokens >= most:
        raise ContextLengthError(
            f"the prompt has {least_tokens} tokens or more, and the context has room for {most}"
        )
    if characters > most * MOST_CHARACTERS_OF_A_TOKEN:
        raise ContextLengthError(
            f"the prompt has {characters} characters, and the context has room for {most} tokens: "
            f"more than {MOST_CHARACTERS_OF_A_TOKEN} characters for each are not processed"
        )


async def _prepared(worker: Worker, make: Callable[[], _Made]) -> _Made:
    """Run `make` in another thread while the request holds a place in the queue.

    Raises QueueFullError, NotReadyError, or whatever `make` raises.
    """
    with worker.preparing():
        return await asyncio.get_running_loop().run_in_executor(worker.preparers, make)
