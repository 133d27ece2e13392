"""Calls of tools apart from the rest of an answer."""

from __future__ import annotations

from triforce_core.requests.answer.parts import Parts, Split, ToolCall, Tools, begun, joined
from triforce_core.requests.answer.tool_formats import ToolFormat


class TaggedCallSplit:
    """A splitter of calls that begin with a tag. Blank text before a call and after the last one is
    dropped. A call that cannot be read stays in the answer as it is.
    """

    def __init__(self, form: ToolFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._held = ""
        # Whether a call has begun, and whether there was one before.
        self._inside = self._called = False

    def take(self, text: str) -> Parts:
        """Split.take."""
        self._held += text
        parts = Parts()
        while True:
            tag = self._form.begins
            if self._inside:
                tag = self._form.ends or self._form.begins
            before, found, after = self._held.partition(tag)
            if not found:
                break
            self._held = after
            if self._inside:
                parts = joined(parts, self._closed(before, self._form.ends))
                # Without a closing tag, the next call has begun.
                self._inside = not self._form.ends
            else:
                parts = joined(parts, Parts(answer=before.rstrip()))
                self._inside = True
        if not self._inside:
            kept = begun(self._held, self._form.begins)
            rest = self._held[: len(self._held) - kept]
            ready = len(rest.rstrip())
            self._called = self._called and not ready
            parts = joined(parts, Parts(answer=self._held[:ready]))
            self._held = self._held[ready:]
        return parts

    def finish(self) -> Parts:
        """Split.finish. The end of the answer ends a call too."""
        rest, self._held = self._held, ""
        if self._inside:
            self._inside = False
            return self._closed(rest, "")
        return Parts(answer="" if self._called and not rest.strip() else rest)

    def _closed(self, body: str, end: str) -> Parts:
        """Return what a call's body is. end: the tag that ended it"""
        try:
            calls = self._form.calls(body, self._tools)
        except (ValueError, RecursionError):
            return Parts(answer=self._form.begins + body + end)
        self._called = True
        return Parts(calls=tuple(calls))


class WholeCallSplit:
    """A splitter for models whose call is the whole answer, a JSON object. An answer that begins
    otherwise passes through.
    """

    def __init__(self, form: ToolFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._held = ""
        self._passes = False

    def take(self, text: str) -> Parts:
        """Split.take."""
        self._held += text
        if not self._passes and self._held.lstrip()[:1] in ("", "{"):
            return Parts()
        self._passes = True
        return self._rest()

    def finish(self) -> Parts:
        """Split.finish."""
        if self._passes or not self._held.strip():
            return self._rest()
        calls: list[ToolCall] = []
        try:
            calls = self._form.calls(self._held, self._tools)
        except (ValueError, RecursionError):
            return self._rest()
        return Parts(calls=tuple(calls))

    def _rest(self) -> Parts:
        rest, self._held = self._held, ""
        return Parts(answer=rest)


class ReasoningThenCalls:
    """A splitter of reasoning, and then of the calls in the answer."""

    def __init__(self, reasoning: Split, calls: Split) -> None:
        self._reasoning = reasoning
        self._calls = calls

    def take(self, text: str) -> Parts:
        """Split.take."""
        return self._split(self._reasoning.take(text))

    def finish(self) -> Parts:
        """Split.finish."""
        return joined(self._split(self._reasoning.finish()), self._calls.finish())

    def _split(self, parts: Parts) -> Parts:
        return self._calls.take(parts.answer)._replace(reasoning=parts.reasoning)
