"""The arguments of Gemma's tool calls: objects whose keys are bare and whose texts have quotes of
their own, so that a text needs no escapes.
"""

from __future__ import annotations

from typing import Any

from triforce_core.requests.answer.arguments import MOST_DEEP, loaded


def parsed(text: str, quote: str) -> dict[str, Any]:
    """Return the arguments that a text such as `{key:<|"|>value<|"|>,n:1}` has.

    quote: stands before and after each text
    Raises ValueError.
    """
    reader = _Reader(text, quote)
    found = reader.value(0)
    reader.skip()
    if not isinstance(found, dict) or reader.at < len(text):
        raise ValueError("the arguments are no object")
    return found


class _Reader:
    """Reads one value. at: the position of the next character"""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self.at = 0

    def value(self, depth: int) -> Any:
        """Return the next value. Raises ValueError."""
        if depth > MOST_DEEP:
            raise ValueError("the arguments are nested too deeply")
        self.skip()
        if self._text.startswith(self._quote, self.at):
            return self._quoted()
        if self._takes("{"):
            return self._object(depth)
        if self._takes("["):
            return self._list(depth)
        bare = self._bare(",}]")
        try:
            return loaded(bare)
        except ValueError:
            return bare

    def skip(self) -> None:
        """Skip blank text."""
        while self.at < len(self._text) and self._text[self.at].isspace():
            self.at += 1

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._takes("}"):
            self.skip()
            quoted = self._text.startswith(self._quote, self.at)
            key = self._quoted() if quoted else self._bare(":").strip('"')
            self._expect(":")
            found[key] = self.value(depth + 1)
            self._between("}")
        return found

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._takes("]"):
            found.append(self.value(depth + 1))
            self._between("]")
        return found

    def _between(self, closing: str) -> None:
        """Expect a comma, or the closing bracket, which stays."""
        self.skip()
        if not self._text.startswith(closing, self.at):
            self._expect(",")

    def _takes(self, character: str) -> bool:
        self.skip()
        if not self._text.startswith(character, self.at):
            return False
        self.at += 1
        return True

    def _expect(self, character: str) -> None:
        if not self._takes(character):
            raise ValueError(f"{character!r} is missing at character {self.at}")

    def _quoted(self) -> str:
        begins = self.at + len(self._quote)
        ends = self._text.find(self._quote, begins)
        if ends < 0:
            raise ValueError("a text has no end")
        self.at = ends + len(self._quote)
        return self._text[begins:ends]

    def _bare(self, ends: str) -> str:
        """Return the text up to one of `ends`."""
        begins = self.at
        while self.at < len(self._text) and self._text[self.at] not in ends:
            self.at += 1
        found = self._text[begins : self.at].strip()
        if not found:
            raise ValueError(f"a value is missing at character {begins}")
        return found
