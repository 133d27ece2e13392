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
        self._answers = False
        # What is held back: blank text, and after it a part of a tag.
        self._spaces: list[str] = []
        self._held = ""

    def take(self, text: str) -> Parts:
        """Return what a piece of the text completes."""
        text, self._held = self._held + text, ""
        reasoning, answer = [], ""
        while text:
            if self._blank:
                text = self._without_blank_lines(text)
            elif self._answers:
                answer, text = text, ""
            elif self._begun:
                before, found, after = text.partition(self._tags.ends)
                text = after
                ready = len(before) - (0 if found else begun(before, self._tags.ends))
                reasoning += self._until_blank(before[:ready])
                self._held = before[ready:]
                if found:
                    self._spaces, self._answers, self._blank = [], True, True
            else:
                text = self._begin(text)
        return Parts("".join(reasoning), answer)

    def finish(self) -> Parts:
        """Return the text that was held back."""
        rest = "".join([*self._spaces, self._held])
        self._spaces, self._held = [], ""
        return Parts(rest) if self._begun and not self._answers else Parts("", rest)

    def _begin(self, text: str) -> str:
        """Return the text after the opening tag, or the whole text of an answer without one.

        The reasoning is at the beginning, after blank text at most, or there is none.
        """
        rest, tag = text.lstrip(), self._tags.begins
        self._spaces.append(text[: len(text) - len(rest)])
        if rest.startswith(tag):
            self._spaces, self._begun, self._blank = [], True, True
            return rest[len(tag) :]
        if tag.startswith(rest):
            self._held = rest
            return ""
        rest = "".join(self._spaces) + rest
        self._spaces, self._answers = [], True
        return rest

    def _until_blank(self, text: str) -> list[str]:
        """Return the text without the blank text at its end, which is held back."""
        ready, said = text.rstrip(), []
        if ready:
            said, self._spaces = [*self._spaces, ready], []
        self._spaces.append(text[len(ready) :])
        return said

    def _without_blank_lines(self, text: str) -> str:
        """Return the text without the blank lines at its beginning. The first line that is not
        blank keeps its indentation, which is held back until then.
        """
        rest = text.lstrip()
        blank = text[: len(text) - len(rest)]
        if "\n" in blank:
            self._spaces = []
        self._spaces.append(blank[blank.rfind("\n") + 1 :])
        if not rest:
            return ""
        text = "".join(self._spaces) + rest
        self._spaces, self._blank = [], False
        return text
