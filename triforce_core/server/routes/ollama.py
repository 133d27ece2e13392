"""Ollama's routes, for programs that know only its API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from triforce_core.requests.answer.split import reasons
from triforce_core.requests.answer.tool_formats import tool_format
from triforce_core.server.asking import Asking
from triforce_core.server.guard import OLLAMA_PATH
from triforce_core.server.messages.ollama import (
    OllamaChat,
    OllamaGenerate,
    OllamaShow,
    same_model,
)
from triforce_core.server.wording.model_files import ModelFiles
from triforce_core.server.wording.ollama import OllamaMessages, OllamaTexts, now
from triforce_offload.errors import UsageError

# The version of Ollama whose API this is. Some clients refuse to talk to older ones.
_VERSION = "0.9.0"
# When a model that is always loaded expires.
_NEVER = "9999-12-31T23:59:59Z"


def ollama_routes(asking: Asking, files: ModelFiles) -> APIRouter:
    """Return the routes under /api. files: what clients learn about the files"""
    router = APIRouter(prefix=OLLAMA_PATH.rstrip("/"))
    _add_answers(router, asking)
    _add_models(router, asking, files)
    return router


def _add_answers(router: APIRouter, asking: Asking) -> None:
    """Add the routes that generate text."""
    name = asking.settings.name

    @router.post("/chat")
    async def chat(body: OllamaChat, request: Request) -> Response:
        body.model = same_model(body.model, name)
        if not body.messages:
            asking.check(body.model)
            return JSONResponse(OllamaMessages(name).loaded())
        return await asking.chat(
            request, body.as_chat(), lambda new_split: OllamaMessages(name, new_split)
        )

    @router.post("/generate")
    async def generate(body: OllamaGenerate, request: Request) -> Response:
        body.model = same_model(body.model, name)
        asking.check(body.model)
        if not body.prompt:
            return JSONResponse(OllamaTexts(name).loaded())
        if body.raw or not asking.worker.engine.tokenizer.has_chat_template:
            return await asking.complete(request, body.as_completion(), lambda: OllamaTexts(name))
        return await asking.chat(
            request, body.as_chat(), lambda new_split: OllamaTexts(name, new_split)
        )

    @router.post("/embed")
    @router.post("/embeddings")
    async def embed() -> Response:
        raise UsageError("embeddings are not supported: this server generates text")


def _add_models(router: APIRouter, asking: Asking, files: ModelFiles) -> None:
    """Add the routes that describe the model."""
    name, modified = asking.settings.name, now()

    def about() -> dict[str, Any]:
        named = {"name": name, "model": name, "modified_at": modified}
        return {**named, "size": files.nbytes, "digest": files.digest, "details": files.details()}

    @router.get("/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [about()]}

    @router.get("/ps")
    async def loaded() -> dict[str, Any]:
        if asking.worker.state != "ready":
            return {"models": []}
        context = asking.worker.context_tokens
        return {"models": [about() | {"expires_at": _NEVER, "context_length": context}]}

    @router.post("/show")
    async def show(body: OllamaShow) -> dict[str, Any]:
        asking.check(same_model(body.model or body.name or "", name))
        family = asking.worker.engine.config.family
        template = asking.worker.engine.tokenizer.chat_template
        able = {"tools": tool_format(template), "thinking": reasons(template)}
        return {
            "details": files.details(),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": files.parameters,
                f"{family}.context_length": asking.worker.context_tokens,
            },
            "template": template,
            "capabilities": ["completion", *(what for what, has in able.items() if has)],
            "modified_at": modified,
        }

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": _VERSION}
