"""Answers of models that reason first: the reasoning apart from the answer."""

from __future__ import annotations

from typing import NamedTuple

from triforce_core.requests.answer.parts import Parts, begun

# Settings of `--reasoning`, and the variable of chat templates that each stands for.
AS_TEMPLATE, ON, OFF = "auto", "on", "off"


def variables(setting: str) -> dict[str, bool]:
    """Return the chat template's variables for a setting of `--reasoning`."""
    return {} if setting == AS_TEMPLATE else {"enable_thinking": setting == ON}


class Tags(NamedTuple):
    """The texts around what a model reasons."""

    begins: str
    ends: str


THINK = Tags("<think>", "</think>")
GEMMA_THOUGHT = Tags("<|channel>thought", "<channel|>")


def tags_of(template: str) -> Tags | None:
    """Return the tags around the reasoning, None if the chat template knows none."""
    if "<channel|>" in template:
        return GEMMA_THOUGHT
    return THINK if THINK.ends in template else None


class ReasoningSplit:
    """A splitter of a text that arrives in pieces. It holds back what may be part of a tag, and
    drops the tags and the blank lines after them.
    """

    def __init__(self, prompt: str, tags: Tags = THINK) -> None:
        """prompt: the rendered prompt, which may begin the reasoning"""
        self._tags = tags
        # Whether the reasoning has begun; and whether only blank lines came since the last tag.
        self._begun = self._blank = prompt.rstrip().endswith(tags.begins)
        self._held = ""
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
            if not self._begun:
                # The reasoning is at the beginning, after blank text at most, or there is none.
                rest, tag = self._held.lstrip(), self._tags.begins
                if rest.startswith(tag):
                    self._held, self._begun, self._blank = rest[len(tag) :], True, True
                    continue
                if tag.startswith(rest):
                    break
                self._answers = True
                continue
            before, found, after = self._held.partition(self._tags.ends)
            if found:
                reasoning += before.rstrip()
                self._held, self._answers, self._blank = after, True, True
                continue
            kept = _tail(self._held, self._tags.ends)
            reasoning += self._held[: len(self._held) - kept]
            self._held = self._held[len(self._held) - kept :]
            break
        return Parts(reasoning, answer)

    def finish(self) -> Parts:
        """Return the text that was held back."""
        rest, self._held = self._held, ""
        return Parts(rest) if self._begun and not self._answers else Parts("", rest)

    def _without_blank_lines(self) -> bool:
        """Drop blank lines at the beginning of what is held. Return whether more than blank text is
        held, whose first line keeps its indentation.
        """
        rest = self._held.lstrip()
        blank = self._held[: len(self._held) - len(rest)]
        self._held = blank[blank.rfind("\n") + 1 :] + rest
        self._blank = not rest
        return bool(rest)


def _tail(text: str, tag: str) -> int:
    """Return how many characters at the end may begin the closing tag: blank text before it, and a
    part of it.
    """
    part = begun(text, tag)
    rest = text[: len(text) - part]
    return part + len(rest) - len(rest.rstrip())
