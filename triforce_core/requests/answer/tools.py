"""Calls of tools apart from the rest of an answer."""

from __future__ import annotations

from triforce_core.requests.answer.parts import (
    HeldText,
    Parts,
    Split,
    ToolCall,
    Tools,
    all_of,
    begun,
    joined,
)
from triforce_core.requests.answer.tool_formats import ToolFormat


class TaggedCallSplit:
    """A splitter of calls that begin with a tag. Blank text before a call and after the last one is
    dropped. A call that cannot be read stays in the answer as it is.
    """

    def __init__(self, form: ToolFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        # The body of the call that has begun.
        self._body = HeldText()
        # What is held back outside of calls: blank text, and after it a part of the tag.
        self._spaces: list[str] = []
        self._held = ""
        # Whether a call has begun, and whether there was one before.
        self._inside = self._called = False

    def take(self, text: str) -> Parts:
        """Split.take."""
        found: list[Parts] = []
        while text:
            if not self._inside:
                text, self._held = self._held + text, ""
                before, tag, after = text.partition(self._form.begins)
                ready = len(before) - (0 if tag else begun(before, self._form.begins))
                found.append(self._until_blank(before[:ready]))
                self._held, text = before[ready:], after
                self._inside = bool(tag)
                continue
            given = self._body.take(text, self._form.ends or self._form.begins)
            if given is None:
                break
            body, text = given
            found.append(self._closed(body, self._form.ends))
            # Without a closing tag, the next call has begun.
            self._inside = not self._form.ends
        return all_of(found)

    def finish(self) -> Parts:
        """Split.finish. The end of the answer ends a call too."""
        if self._inside:
            self._inside = False
            return self._closed(self._body.rest(), "")
        rest = "".join([*self._spaces, self._held])
        self._spaces, self._held = [], ""
        return Parts(answer="" if self._called and not rest.strip() else rest)

    def _until_blank(self, text: str) -> Parts:
        """Return the text without the blank text at its end, which is held back."""
        ready, said = text.rstrip(), ""
        if ready:
            said = "".join([*self._spaces, ready])
            self._spaces, self._called = [], False
        self._spaces.append(text[len(ready) :])
        return Parts(answer=said)

    def _closed(self, body: str, end: str) -> Parts:
        """Return what a call's body is. end: the tag that ended it"""
        before = "".join(self._spaces)
        self._spaces = []
        calls, said = self._calls(body, end), ""
        tag = self._form.begins
        if not calls and tag in body:
            # The text names the tag before the call, or has it twice.
            head, _, body = body.rpartition(tag)
            calls, said = self._calls(body, end), f"{before}{tag}{head}".rstrip()
            body = f"{head}{tag}{body}"
        self._called = bool(calls)
        return Parts("", said, calls) if calls else Parts(answer=before + tag + body + end)

    def _calls(self, body: str, end: str) -> tuple[ToolCall, ...]:
        """Return the calls in a body, none if it cannot be read."""
        if not end and not self._form.may_end(body, self._tools):
            return ()
        try:
            return tuple(self._form.calls(body, self._tools))
        except (ValueError, RecursionError):
            return ()


class WholeCallSplit:
    """A splitter for models whose call is the whole answer, a JSON object. An answer that begins
    otherwise passes through.
    """

    def __init__(self, form: ToolFormat, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._held: list[str] = []
        # Whether the answer is text; None before its first character that is not blank.
        self._passes: bool | None = None

    def take(self, text: str) -> Parts:
        """Split.take."""
        self._held.append(text)
        if self._passes is None and (begins := text.lstrip()[:1]):
            self._passes = begins != "{"
        return self._rest() if self._passes else Parts()

    def finish(self) -> Parts:
        """Split.finish."""
        if self._passes is not False:
            return self._rest()
        rest = self._rest()
        try:
            return Parts(calls=tuple(self._form.calls(rest.answer, self._tools)))
        except (ValueError, RecursionError):
            return rest

    def _rest(self) -> Parts:
        rest = "".join(self._held)
        self._held = []
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


class FirstCallSplit:
    """A splitter that drops what follows the first call of an answer."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._called = False

    def take(self, text: str) -> Parts:
        """Split.take."""
        return Parts() if self._called else self._until_call(self._split.take(text))

    def finish(self) -> Parts:
        """Split.finish."""
        return Parts() if self._called else self._until_call(self._split.finish())

    def _until_call(self, parts: Parts) -> Parts:
        self._called = bool(parts.calls)
        return parts._replace(calls=parts.calls[:1])
