"""Turn docstrings in this project's style into Markdown for the site, as an extension of griffe.

A docstring describes parameters and fields in lines `name: what it is`, or `a, b: what they are`,
whose continuation lines are indented. On the site they become a list.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_FIELDS = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.+)")


class Fields(griffe.Extension):
    """Rewrite every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """Return the docstring with its fields as a Markdown list and their names as code."""
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
