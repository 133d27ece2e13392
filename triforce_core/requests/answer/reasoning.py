"""Answers of models that reason first: the reasoning apart from the answer."""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from triforce_core.model.tokenizing.channels import TAGS

BEGINS, ENDS = "<think>", "</think>"
# Settings of `--reasoning`, and the variable of chat templates that each stands for.
AS_TEMPLATE, ON, OFF = "auto", "on", "off"


def variables(setting: str) -> dict[str, bool]:
    """Return the chat template's variables for a setting of `--reasoning`."""
    return {} if setting == AS_TEMPLATE else {"enable_thinking": setting == ON}


class Parts(NamedTuple):
    """Parts of a text."""

    reasoning: str
    answer: str


class Split(Protocol):
    """A splitter of a text that arrives in pieces."""

    def take(self, text: str) -> Parts:
        """Return what a piece of the text completes."""

    def finish(self) -> Parts:
        """Return the text that was held back."""


def whole(split: Split, text: str) -> Parts:
    """Return the parts of a complete text."""
    some, rest = split.take(text), split.finish()
    return Parts(some.reasoning + rest.reasoning, some.answer + rest.answer)


def split_of(template: str, prompt: str) -> Split | None:
    """Return a splitter of answers to a rendered prompt, None if the chat template knows no way to
    reason.
    """
    if CHANNEL in template:
        return ChannelSplit()
    return ReasoningSplit(prompt) if ENDS in template else None


CHANNEL, START, MESSAGE, END = TAGS
_ANSWERS_IN = re.compile(r"<\|channel\|>\s*final\b")


class ChannelSplit:
    """A splitter of messages in channels: the answer is in the channel "final", and all else is
    reasoning. Headers are dropped.
    """

    def __init__(self) -> None:
        self._held = ""
        # Whether the body of a message comes, not its header; and whether it is the answer.
        self._body = self._answers = False

    def take(self, text: str) -> Parts:
        """Split.take."""
        self._held += text
        reasoning = answer = ""
        while True:
            tags = (END, START, CHANNEL) if self._body else (MESSAGE,)
            found = [(at, tag) for tag in tags if (at := self._held.find(tag)) >= 0]
            if not found:
                break
            at, tag = min(found)
            before, self._held = self._held[:at], self._held[at + len(tag) :]
            if self._body:
                reasoning, answer = self._added(reasoning, answer, before)
                # A header may begin with its channel.
                self._held = (tag if tag != END else "") + self._held
            else:
                self._answers = bool(_ANSWERS_IN.search(before))
            self._body = not self._body
        if self._body:
            kept = max(_begun(self._held, tag) for tag in (END, START, CHANNEL))
            ready = len(self._held) - kept
            reasoning, answer = self._added(reasoning, answer, self._held[:ready])
            self._held = self._held[ready:]
        return Parts(reasoning, answer)

    def finish(self) -> Parts:
        """Split.finish. A text without any message is an answer."""
        rest, self._held = self._held, ""
        if not self._body:
            return Parts("", "" if CHANNEL in rest or START in rest else rest)
        return Parts(*self._added("", "", rest))

    def _added(self, reasoning: str, answer: str, text: str) -> tuple[str, str]:
        return (reasoning, answer + text) if self._answers else (reasoning + text, answer)


def _begun(text: str, tag: str) -> int:
    """Return how many characters at the end of a text may begin a tag."""
    most = min(len(text), len(tag) - 1)
    return next((n for n in range(most, 0, -1) if tag.startswith(text[len(text) - n :])), 0)


class ReasoningSplit:
    """A splitter of a text that arrives in pieces. It holds back what may be part of a tag, and
    drops the tags and the blank lines after them.
    """

    def __init__(self, prompt: str) -> None:
        """prompt: the rendered prompt, which may begin the reasoning"""
        begun = prompt.rstrip().endswith(BEGINS)
        self._tag = ENDS if begun else BEGINS
        self._held = ""
        # Whether only blank lines came since the last tag.
        self._blank = begun
        self._answers = False

    def take(self, text: str) -> Parts:
        """Return what a piece of the text completes."""
        self._held += text
        reasoning = answer = ""
        while True:
            if self._blank and not self._without_blank_lines():
                break
            if self._answers:
                answer, self._held = answer + self._held, ""
                break
            if self._tag == BEGINS:
                # The reasoning is at the beginning, after blank text at most, or there is none.
                begun = self._held.lstrip()
                if begun.startswith(BEGINS):
                    self._held, self._tag, self._blank = begun[len(BEGINS) :], ENDS, True
                    continue
                if BEGINS.startswith(begun):
                    break
                self._answers = True
                continue
            before, found, after = self._held.partition(ENDS)
            if found:
                reasoning += before.rstrip()
                self._held, self._answers, self._blank = after, True, True
                continue
            kept = _tail(self._held)
            reasoning += self._held[: len(self._held) - kept]
            self._held = self._held[len(self._held) - kept :]
            break
        return Parts(reasoning, answer)

    def finish(self) -> Parts:
        """Return the text that was held back."""
        rest, self._held = self._held, ""
        return Parts("", rest) if self._answers or self._tag == BEGINS else Parts(rest, "")

    def _without_blank_lines(self) -> bool:
        """Drop blank lines at the beginning of what is held. Return whether more than blank text is
        held, whose first line keeps its indentation.
        """
        begun = self._held.lstrip()
        blank = self._held[: len(self._held) - len(begun)]
        self._held = blank[blank.rfind("\n") + 1 :] + begun
        self._blank = not begun
        return bool(begun)


def _tail(text: str) -> int:
    """Return how many characters at the end may begin the closing tag: blank text before it, and a
    part of it.
    """
    begun = _begun(text, ENDS)
    rest = text[: len(text) - begun]
    return begun + len(rest) - len(rest.rstrip())
