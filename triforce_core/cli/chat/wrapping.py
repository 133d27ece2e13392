"""Word wrapping for text that streams to a terminal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from wcwidth import wcwidth

from triforce_core.requests.stream import Piece

_TAB = 8


class WordWrap:
    """A writer that breaks lines between words. It holds a word back until the word has ended.

    Words longer than a line break at the margin; wide characters may break anywhere.
    """

    def __init__(
        self, write: Callable[[str], bool], show: Callable[[Piece], str], columns: int
    ) -> None:
        """write: writes text and returns whether it was written
        show: returns a piece's text with its colour
        columns: the width of a line
        """
        self._write = write
        self._show = show
        self._columns = columns
        self._column = 0
        self._word: list[tuple[str, str]] = []
        self._word_columns = 0
        # Characters ready to write, each with the origin of its piece.
        self._ready: list[tuple[str, str]] = []

    def take(self, piece: Piece) -> bool:
        """Write the words that end in a piece. Return whether the text was written."""
        for character in piece.text:
            self._take(character, piece.origin)
        return self._flush()

    def end(self) -> bool:
        """Write the last word. Return whether the text was written."""
        self._end_word()
        return self._flush()

    def _take(self, character: str, origin: str) -> None:
        if character.isspace():
            self._end_word()
            self._space(character, origin)
            return
        columns = max(0, wcwidth(character))
        if columns > 1 or self._word_columns + columns > self._columns:
            self._end_word()
        self._word.append((character, origin))
        self._word_columns += columns
        if columns > 1:
            self._end_word()

    def _space(self, character: str, origin: str) -> None:
        if character == "\n":
            self._column = 0
        elif character == "\t":
            self._column = min(self._columns, (self._column // _TAB + 1) * _TAB)
        elif self._column < self._columns:
            self._column += 1
        else:
            # The line breaks here, so the space is not needed.
            return
        self._ready.append((character, origin))

    def _end_word(self) -> None:
        if self._column and self._column + self._word_columns > self._columns:
            self._ready.append(("\n", self._word[0][1]))
            self._column = 0
        self._ready += self._word
        self._column += self._word_columns
        self._word, self._word_columns = [], 0

    def _flush(self) -> bool:
        shown = ""
        for origin, characters in groupby(self._ready, key=lambda each: each[1]):
            shown += self._show(Piece("".join(each for each, _ in characters), origin))
        self._ready.clear()
        return self._write(shown)
