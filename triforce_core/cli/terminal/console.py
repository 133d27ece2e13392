"""Tables and sentences that fit the terminal, on a stream whose reader may close the pipe."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import IO

from rich.box import HEAVY_HEAD, Box
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

from triforce_core.cli.terminal.output import terminal_columns

_COLUMNS = 80
_WORD = re.compile(r"^\s*\S+|\S+")
# The cells of a row, or None for a line across the table.
Row = Sequence[str] | None


class Printer(Console):
    """A console that prints text as it is, and nothing wider than its terminal.

    It raises BrokenPipeError when its reader leaves; rich would exit the process.
    """

    def __init__(self, *, stderr: bool = False, quiet: bool = False) -> None:
        # A model's name may contain brackets or colons, which rich takes for styles and emoji.
        super().__init__(stderr=stderr, quiet=quiet, markup=False, emoji=False, highlight=False)

    @property
    def size(self) -> ConsoleDimensions:
        return ConsoleDimensions(columns_of(self.file), super().size.height)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def table(
        self, titles: Sequence[str], rows: Sequence[Row], keys: int = 0, box: Box = HEAVY_HEAD
    ) -> None:
        """Print a table. Cells wrap between words.

        titles: the header, or as many empty strings for a table without one
        keys: if the table is still too wide, it is printed in parts, which all begin with this
            many columns; 0: it is never divided, and words break at last
        """
        natural, least = _widths([titles, *(row for row in rows if row is not None)])
        for part in _parts(least, keys, self.width):
            widths = fitted(
                [natural[i] for i in part], [least[i] for i in part], _room(len(part), self.width)
            )
            table = Table(box=box, show_header=any(titles))
            for index, width in zip(part, widths, strict=True):
                table.add_column(titles[index], width=width, overflow="fold")
            for row in rows:
                if row is None:
                    table.add_section()
                else:
                    table.add_row(*(row[index] for index in part))
            self.print(table)

    def markdown(self, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table in Markdown. Cells wrap between words, into rows of their own.

        titles: the header, which does not wrap
        """
        natural, least = _widths([titles, *rows])
        least = [max(narrow, cell_len(title)) for narrow, title in zip(least, titles, strict=True)]
        widths = fitted(natural, least, _room(len(titles), self.width))
        lines = [titles, ["-" * width for width in widths]]
        for row in rows:
            wrapped = [
                [line.plain.rstrip() for line in Text(cell).wrap(self, width)]
                for cell, width in zip(row, widths, strict=True)
            ]
            lines += map(list, zip_longest(*wrapped, fillvalue=""))
        for line in lines:
            cells = (set_cell_size(cell, width) for cell, width in zip(line, widths, strict=True))
            self.print(f"| {' | '.join(cells)} |", soft_wrap=True)


def columns_of(stream: IO[str]) -> int:
    """Return the width for a stream: that of COLUMNS, else its terminal's, else 80."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    return terminal_columns(stream) or _COLUMNS


def fitted(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return the widths of columns that share `room` cells. The widest columns give way first.

    natural: widths at which nothing wraps
    least: widths of the longest words, which are kept if they all fit
    """
    widths, most = list(natural), max(natural)
    while sum(widths) > room and most:
        most -= 1
        widths = [min(wide, max(narrow, most)) for wide, narrow in zip(natural, least, strict=True)]
    while sum(widths) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return widths


def _parts(least: Sequence[int], keys: int, width: int) -> list[list[int]]:
    """Return the columns of each part of a table, with as few parts as fit, of like sizes.

    least: the least width of each column
    """
    first, others = list(range(keys)), list(range(keys, len(least)))
    for most in range(len(others), 0, -1) if keys else ():
        count = -(-len(others) // most)
        size = -(-len(others) // count)
        parts = [first + others[at : at + size] for at in range(0, len(others), size)]
        if all(sum(least[i] for i in part) <= _room(len(part), width) for part in parts):
            return parts
    return [[*first, other] for other in others] if keys else [others]


def _widths(rows: Sequence[Sequence[str]]) -> tuple[list[int], list[int]]:
    """Return the widths of columns without wrapping, and those of their longest words."""
    columns = list(zip(*rows, strict=True))
    natural = [max(map(cell_len, column)) for column in columns]
    return natural, [max(map(_longest_word, column)) for column in columns]


def _room(columns: int, width: int) -> int:
    """Return the cells that a table leaves for text, beside borders and padding."""
    return width - 3 * columns - 1


def _longest_word(cell: str) -> int:
    return max((cell_len(word) for word in _WORD.findall(cell)), default=0)
