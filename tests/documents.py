"""What the documents hold: links, headings, options and commands, by plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Those of the site, in docs/ and outside.
DOCUMENTS = (
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "NOTICE.md", "tests/README.md")
    ),
    *sorted(DOCS.rglob("*.md")),
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
# A file of ours, of any suffix in a folder; a folder or module; and a name that a module defines.
_FILES = re.compile(
    r"(?:[\w-]+/)*\w+\.(?:py|sh|md|c|h|js|css|html)|(?:[a-z_]+/)+[a-z_0-9]+\.(?:json|toml|txt|yml)"
    r"|(?:[a-z_][a-z_0-9]*/)+(?:[a-z_][a-z_0-9]*(?:\.[A-Za-z]\w+)?)?"
)
_SCRIPT = re.compile(r"scripts/(bench|checks|rivals) ([a-z]\w*)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def without_code(text: str) -> str:
    return _FENCE.sub("", text)


def links(text: str) -> list[str]:
    """Targets of links and pictures, but for those elsewhere."""
    return [link for link in _LINK.findall(without_code(text)) if not re.match(r"\w+:", link)]


def anchors(text: str) -> set[str]:
    """Of headings, where GitHub and the site make the same: the site puts blanks together."""
    plain = [
        re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower()).strip()
        for heading in _HEADING.findall(without_code(text))
    ]
    return {re.sub(r"\s", "-", each) for each in plain} & {
        re.sub(r"[-\s]+", "-", each) for each in plain
    }


def options(text: str) -> set[str]:
    return set(_OPTION.findall(text))


def files(text: str) -> set[str]:
    """Files, folders and modules that are named in backticks."""
    words = {word for code in _CODE.findall(without_code(text)) for word in code.split()}
    return {word for word in words if _FILES.fullmatch(word)}


def scripts(text: str) -> set[str]:
    """Files of the scripts that are run by the name of their folder and their own."""
    return {f"scripts/{folder}/{name}" for folder, name in _SCRIPT.findall(text)}


def commands(text: str) -> Iterator[str]:
    """Lines of code that begin with the command, those that go on put together."""
    for _, code in _FENCE.findall(text):
        for line in code.replace("\\\n", " ").splitlines():
            if found := re.match(r"(?:\$ )?(?:\.venv/bin/)?(triforce \S.*)", line):
                yield from found[1].split(" && ")
