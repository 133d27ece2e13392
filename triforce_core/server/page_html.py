"""The chat page: one HTML document, joined from the files in the folder page/."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_LINK = re.compile(r'<link rel="stylesheet" href="([\w.]+)">|<script src="([\w.]+)"></script>')


@cache
def page_html() -> str:
    """Return the page with its styles and scripts inside, so that it loads nothing else."""
    folder = files("triforce_core.server").joinpath("page")

    def inlined(link: re.Match[str]) -> str:
        tag, name = ("style", link[1]) if link[1] else ("script", link[2])
        return f"<{tag}>\n{folder.joinpath(name).read_text('utf-8')}</{tag}>"

    return _LINK.sub(inlined, folder.joinpath("index.html").read_text("utf-8"))
