"""Anthropic's routes, for programs that know only its API, such as Claude Code."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from triforce_core.server.asking import Asking
from triforce_core.server.guard import ANTHROPIC_PATH
from triforce_core.server.messages.anthropic import CountRequest, MessagesRequest
from triforce_core.server.wording.anthropic import AnthropicMessages
from triforce_core.server.wording.wording import NewSplit, Wording


def anthropic_routes(asking: Asking) -> APIRouter:
    """Return the routes under /v1/messages."""
    router, name = APIRouter(prefix=ANTHROPIC_PATH), asking.settings.name

    @router.post("")
    async def message(body: MessagesRequest, request: Request) -> Response:
        def wording(new_split: NewSplit) -> Wording:
            return AnthropicMessages(name, body, new_split)

        return await asking.chat(request, body.as_chat(), wording)

    @router.post("/count_tokens")
    async def count(body: CountRequest) -> dict[str, int]:
        return {"input_tokens": len((await asking.turn(body.as_chat())).tokens)}

    return router
