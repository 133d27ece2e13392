"""Answers of models that reason first: the reasoning apart from the answer."""

from __future__ import annotations

from typing import NamedTuple

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

    def whole(self, text: str) -> Parts:
        """Return the parts of a complete text."""
        some, rest = self.take(text), self.finish()
        return Parts(some.reasoning + rest.reasoning, some.answer + rest.answer)

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
    most = min(len(text), len(ENDS) - 1)
    begun = next((n for n in range(most, 0, -1) if ENDS.startswith(text[len(text) - n :])), 0)
    rest = text[: len(text) - begun]
    return begun + len(rest) - len(rest.rstrip())
