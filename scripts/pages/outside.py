"""A hook of mkdocs: pages and figures that lie outside docs/, and the links to them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Where a file of the repository is on the site.
PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "tests/README.md": "tests.md",
}
FIGURES = "benchmarks/results/"
# The target of a link or a picture, with the anchor apart.
LINK = re.compile(r"(?<=\]\()([^()#\s]+)(#[^()\s]*)?(?=\))")


def place(path: str) -> str:
    """Where a file of the repository is on the site, both from their roots. One that is not there
    keeps its path, and a link to it fails the build.
    """
    if path in PAGES:
        return PAGES[path]
    if path.startswith(FIGURES):
        return "results/" + path.removeprefix(FIGURES)
    return path.removeprefix("docs/")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    figures = [path.relative_to(ROOT).as_posix() for path in (ROOT / FIGURES).glob("*.json")]
    for path in [*PAGES, *sorted(figures)]:
        files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    sources = {on_site: path for path, on_site in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def moved(link: re.Match[str]) -> str:
        if re.match(r"\w+:", link[1]):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        return place(path) + (link[2] or "")

    return LINK.sub(moved, markdown)
