"""How answers are written: the interface, and what all forms of answers have in common."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from triforce_core.requests.answer.parts import Parts, Split
from triforce_core.requests.stats import LEAST_EXAMINED
from triforce_core.requests.stream import Completion, Piece

# A new splitter of one answer.
NewSplit = Callable[[], Split]
_ID_LETTERS = string.ascii_letters + string.digits
# Some chat templates (Mistral's) take ids of calls of this length only.
_CALL_ID_LETTERS = 9


class Wording(Protocol):
    """The wording of one answer, whole or as a stream. A stream's parts are "" if nothing is sent.

    media_type: of a stream
    """

    media_type: str

    def whole(self, completions: Sequence[Completion], each: int) -> dict[str, Any]:
        """Return a complete answer. each: the number of completions of one prompt"""

    def begin(self, texts: int) -> str:
        """Return the beginning of a stream of `texts` texts."""

    def waiting(self, progress: float) -> str:
        """Return a sign of life. progress: the share of the prompt that is processed"""

    def piece(self, index: int, piece: Piece) -> str:
        """Return a piece of text `index`."""

    def last(self, index: int, completion: Completion) -> str:
        """Return the end of text `index`."""

    def end(self, completions: Sequence[Completion], each: int) -> str:
        """Return the end of the stream. each: as in `whole`"""

    def failed(self, error: dict[str, Any]) -> str:
        """Return an error that ends the stream. error: a body as `refusal` returns it"""


class WholeAnswer:
    """The splitter of an answer that has one part."""

    def take(self, text: str) -> Parts:
        """Split.take."""
        return Parts(answer=text)

    def finish(self) -> Parts:
        """Split.finish."""
        return Parts()


def event(what: dict[str, Any], name: str | None = None) -> str:
    """Return a server-sent event. name: its type"""
    data = json.dumps(what, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "") + f"data: {data}\n\n"


def comment(progress: float) -> str:
    """Return a server-sent comment, which clients skip. progress: see `Wording.waiting`"""
    return f": {progress:.2f} of the prompt is processed\n\n"


def call_id() -> str:
    """Return an id for a call of a tool."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_CALL_ID_LETTERS))


def usage(completions: Sequence[Completion], each: int) -> dict[str, Any]:
    """Count prompt tokens, once for each prompt, and completion tokens.

    each: the number of completions of one prompt
    """
    firsts = completions[::each]
    prompt = sum(first.stats["prompt_tokens"] for first in firsts)
    new = sum(len(one.token_ids) for one in completions)
    reused = sum(first.stats["reused_tokens"] for first in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": reused},
    }


def timings(completion: Completion) -> dict[str, Any]:
    """Return the statistics of a run that a client can show."""
    stats = completion.stats
    seconds, link = stats["seconds_per_token"], stats["link"]
    busy = link["busy_seconds"] / stats["seconds"]["decode"] if stats["seconds"]["decode"] else 0.0
    few = stats["draft_tokens"]["examined"] < LEAST_EXAMINED
    return {
        "tokens_per_second": 1 / seconds if seconds else None,
        "prefill_seconds": stats["seconds"]["prefill"],
        "tokens_per_pass": stats["tokens_per_pass"],
        "acceptance": None if few else stats["acceptance"]["target"],
        "link_share": min(1.0, busy),
        "prompt_tokens": stats["prompt_tokens"],
        "reused_tokens": stats["reused_tokens"],
        "context_tokens": stats["prompt_tokens"] + len(completion.token_ids),
        "device_memory_bytes": stats["memory"]["device_peak_bytes"],
        "device_budget_bytes": stats["memory"]["device_budget_bytes"],
    }


def refusal(
    message: str, kind: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Return an error body in OpenAI's format."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
