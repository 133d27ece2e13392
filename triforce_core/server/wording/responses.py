"""Answers in the format of OpenAI's Responses API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from triforce_core.model.tokenizing.tokenizer import Tokenizer
from triforce_core.requests.answer.parts import Parts, ToolCall, whole
from triforce_core.requests.stream import Completion, Piece
from triforce_core.server.messages.responses import ResponsesRequest
from triforce_core.server.wording.wording import NewSplit, call_id, comment, event, timings, usage

_REASONING, _MESSAGE = "reasoning", "message"


class Responses:
    """The wording of a response: items of reasoning, of text, and of calls, in their order."""

    media_type = "text/event-stream"

    def __init__(
        self, model: str, body: ResponsesRequest, tokenizer: Tokenizer, new_split: NewSplit
    ) -> None:
        """model: name of the model that is served"""
        self._tokenizer = tokenizer
        self._new_split = new_split
        self._split = new_split()
        self._reasoned: list[str] = []
        self._items: list[dict[str, Any]] = []
        # The pieces of text so far of the item that is open, if one is.
        self._open: list[str] | None = None
        self._events = 0
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        choice = body.tool_choice or "auto"
        self._head = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}}
            if body.text is None
            else body.text.model_dump(exclude_none=True, by_alias=True),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{"parameters": None, "strict": None, **tool} for tool in tools],
            "top_p": body.top_p,
            "truncation": "disabled",
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    def whole(self, completions: Sequence[Completion], each: int) -> dict[str, Any]:
        """Wording.whole."""
        (completion,) = completions
        parts = whole(self._new_split(), completion.text)
        self._reasoned.append(parts.reasoning)
        if parts.reasoning:
            self._items.append(_reasoning(parts.reasoning))
        if parts.answer or not parts.calls:
            self._items.append(_message(parts.answer))
        self._items += [_call(call) for call in parts.calls]
        if completion.finish_reason == "length":
            self._cut()
        return self._finished(completion)

    def begin(self, texts: int) -> str:
        """Wording.begin."""
        response = self._head | {"status": "in_progress", "output": []}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def waiting(self, progress: float) -> str:
        """Wording.waiting."""
        return comment(progress)

    def piece(self, index: int, piece: Piece) -> str:
        """Wording.piece."""
        return self._said(self._split.take(piece.text))

    def last(self, index: int, completion: Completion) -> str:
        """Wording.last."""
        said = self._said(self._split.finish())
        if not self._items:
            said += self._opened(_MESSAGE)
        if completion.finish_reason == "length":
            self._cut()
        said += self._closed()
        response = self._finished(completion)
        return said + self._event(f"response.{response['status']}", response=response)

    def end(self, completions: Sequence[Completion], each: int) -> str:
        """Wording.end."""
        return ""

    def failed(self, error: dict[str, Any]) -> str:
        """Wording.failed."""
        if self._open is not None:
            self._items[-1]["content"][0]["text"] = "".join(self._open)
            self._cut()
        about = error["error"]
        said = {"code": about["code"] or about["type"], "message": about["message"]}
        response = self._head | {"status": "failed", "output": self._items, "error": said}
        return self._event("response.failed", response=response)

    def _cut(self) -> None:
        """Mark the last item as incomplete if it is a text."""
        if self._items and self._items[-1]["type"] == _MESSAGE:
            self._items[-1]["status"] = "incomplete"

    def _finished(self, completion: Completion) -> dict[str, Any]:
        """Return the complete response."""
        cut = completion.finish_reason == "length"
        used = usage([completion], 1)
        reasoned = "".join(self._reasoned)
        return self._head | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {
                    "reasoning_tokens": len(self._tokenizer.encode_rendered(reasoned))
                    if reasoned
                    else 0
                },
                "total_tokens": used["total_tokens"],
            },
            "timings": timings(completion),
        }

    def _said(self, parts: Parts) -> str:
        """Return the events of what a piece completes."""
        self._reasoned.append(parts.reasoning)
        said = ""
        if parts.reasoning:
            said += self._added(_REASONING, parts.reasoning)
        if parts.answer:
            said += self._added(_MESSAGE, parts.answer)
        for call in parts.calls:
            said += self._closed() + self._called(call)
        return said

    def _added(self, kind: str, text: str) -> str:
        """Return the events that add text to an item of a kind."""
        said = ""
        if self._open is None or self._items[-1]["type"] != kind:
            said = self._closed() + self._opened(kind)
        self._open.append(text)
        extra = {} if kind == _REASONING else {"logprobs": []}
        return said + self._event(
            f"response.{_TEXT[kind]}.delta", delta=text, **self._at(), **extra
        )

    def _opened(self, kind: str) -> str:
        item = _reasoning("") if kind == _REASONING else _message("")
        self._items.append(item)
        self._open = []
        begun = item | {"status": "in_progress", "content": []}
        said = self._event("response.output_item.added", item=begun, **self._place())
        part = item["content"][0]
        return said + self._event("response.content_part.added", part=part, **self._at())

    def _closed(self) -> str:
        """Return the events that end the open item, if one is."""
        if self._open is None:
            return ""
        item, text = self._items[-1], "".join(self._open)
        kind, self._open = item["type"], None
        item["content"][0]["text"] = text
        extra = {} if kind == _REASONING else {"logprobs": []}
        return (
            self._event(f"response.{_TEXT[kind]}.done", text=text, **self._at(), **extra)
            + self._event("response.content_part.done", part=item["content"][0], **self._at())
            + self._event("response.output_item.done", item=item, **self._place())
        )

    def _called(self, call: ToolCall) -> str:
        item = _call(call)
        self._items.append(item)
        begun = item | {"status": "in_progress", "arguments": ""}
        place = self._place()
        at = place | {"item_id": item["id"]}
        kind, text = "response.function_call_arguments", call.arguments
        return (
            self._event("response.output_item.added", item=begun, **place)
            + self._event(f"{kind}.delta", delta=text, **at)
            + self._event(f"{kind}.done", arguments=text, name=call.name, **at)
            + self._event("response.output_item.done", item=item, **place)
        )

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._items) - 1}

    def _at(self) -> dict[str, Any]:
        return self._place() | {"item_id": self._items[-1]["id"], "content_index": 0}

    def _event(self, kind: str, **about: Any) -> str:
        number, self._events = self._events, self._events + 1
        return event({"type": kind, "sequence_number": number, **about}, kind)


# The names of the events of each kind of item.
_TEXT = {_REASONING: "reasoning_text", _MESSAGE: "output_text"}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _reasoning(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": _REASONING, "id": _id("rs"), "summary": [], "content": content}


def _message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    about = {"type": _MESSAGE, "id": _id("msg"), "role": "assistant", "status": "completed"}
    return about | {"content": content}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": _id("fc"),
        "call_id": call_id(),
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }
