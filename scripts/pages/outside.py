"""A hook of mkdocs for pages, figures and packages outside docs/, and the links to them."""

from __future__ import annotations

import atexit
import posixpath
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.plugins import event_priority

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# The path on the site of each file of the repository.
PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "NOTICE.md": "licenses.md",
    "tests/README.md": "tests.md",
}
FIGURES = "benchmarks/results/"
# Packages that are installed under a different name from their folder's.
FOLDERS = {"triforce_offload": "offload"}
# The target of a link or a picture, separate from its anchor.
LINK = re.compile(r"(?<=\]\()([^()#\s]+)(#[^()\s]*)?(?=\))")


def place(path: str) -> str:
    """Return the path on the site of a file of the repository, both relative to their roots.

    A file that is not on the site keeps its path, and a link to it fails the build.
    """
    if path in PAGES:
        return PAGES[path]
    if path.startswith(FIGURES):
        return "results/" + path.removeprefix(FIGURES)
    return path.removeprefix("docs/")


@event_priority(100)  # before mkdocstrings reads it
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let mkdocstrings find packages by their installed names."""
    names = Path(tempfile.mkdtemp(prefix="packages-"))
    atexit.register(shutil.rmtree, names)
    for name, folder in FOLDERS.items():
        (names / name).symlink_to(ROOT / folder)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [".", str(names)]
    return config


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
