"""OpenAI's routes: chat and text completions, models."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from triforce_core.server.asking import Asking, other_model
from triforce_core.server.errors import UnknownModelError
from triforce_core.server.messages.responses import ResponsesRequest
from triforce_core.server.messages.schema import ChatRequest, CompletionRequest
from triforce_core.server.wording.openai import ChatCompletions, TextCompletions
from triforce_core.server.wording.responses import Responses
from triforce_core.server.wording.wording import NewSplit, Wording
from triforce_offload.errors import UsageError


def openai_routes(asking: Asking) -> APIRouter:
    """Return the routes under /v1."""
    router = APIRouter(prefix="/v1")
    _add_answers(router, asking)
    _add_models(router, asking)
    return router


def _add_answers(router: APIRouter, asking: Asking) -> None:
    """Add the routes that generate text."""
    name = asking.settings.name

    @router.post("/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        def wording(new_split: NewSplit) -> Wording:
            return ChatCompletions(
                name,
                asking.token_text,
                new_split,
                logprobs=bool(body.logprobs),
                usage=body.streams_usage,
            )

        return await asking.chat(request, body, wording)

    @router.post("/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        def wording() -> Wording:
            logprobs = body.logprobs is not None
            return TextCompletions(
                name, asking.token_text, logprobs=logprobs, usage=body.streams_usage
            )

        return await asking.complete(request, body, wording)

    @router.post("/responses")
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        def wording(new_split: NewSplit) -> Wording:
            return Responses(name, body, asking.worker.engine.tokenizer, new_split)

        return await asking.chat(request, body.as_chat(), wording)

    @router.post("/embeddings")
    async def embed() -> Response:
        raise UsageError("embeddings are not supported: this server generates text")


def _add_models(router: APIRouter, asking: Asking) -> None:
    """Add the routes that describe the model."""
    name, created = asking.settings.name, int(time.time())
    # What Anthropic's clients read of a model, beside what OpenAI's do.
    moment = datetime.fromtimestamp(created, UTC).isoformat()
    more = {"type": "model", "display_name": name, "created_at": moment}

    @router.get("/models")
    async def models() -> dict[str, Any]:
        pages = {"has_more": False, "first_id": name, "last_id": name}
        return {"object": "list", "data": [about()], **pages}

    @router.get("/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        if model != name:
            raise UnknownModelError(other_model(model, asking.settings))
        return about()

    def about() -> dict[str, Any]:
        found = {"id": name, "object": "model", "created": created, "owned_by": "triforce"} | more
        if asking.worker.state == "ready":
            # The second name is vLLM's, which some clients read.
            tokens = asking.worker.context_tokens
            found |= {"context_length": tokens, "max_model_len": tokens}
        return found
