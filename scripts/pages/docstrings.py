"""Docstrings as this house writes them, made Markdown for the site (an extension of griffe).

A docstring names what a class or a call takes in lines `name: what it is`, or `a, b: what they
are`, whose continuation is indented. On the site they become a list.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_FIELDS = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.+)")


class Fields(griffe.Extension):
    """Rewrites every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """The same text with its fields as a list, and names of calls and modules as code."""
    lines: list[str] = []
    in_list = False
    for line in docstring.splitlines():
        if field := _FIELDS.fullmatch(line):
            if not in_list:
                lines.append("")
            names = ", ".join(f"`{name}`" for name in field[1].split(", "))
            line, in_list = f"- {names}: {field[2]}", True
        elif in_list and not line.startswith(" "):
            if line:
                lines.append("")
            in_list = False
        lines.append(line)
    return "\n".join(lines)
