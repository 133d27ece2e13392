"""The documents: links and anchors resolve, options exist, every page is in the navigation."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from documents import DOCS, DOCUMENTS, ROOT, anchors, commands, files, links, options, scripts

from triforce_core.cli.main import _parser

COMMANDS = _parser()[1]
# Options of programs that are not ours, by the program.
OTHERS = {
    "torchrun": {"--nproc-per-node"},
    "docker": {"--target", "--ulimit"},
    "mkdocs": {"--strict"},
    "prlimit": {"--memlock", "--pid"},
    "hf": {"--local-dir"},
    "pip": {"--force-reinstall"},
    "wsl": {"--shutdown"},
}
# The form of a hub id, and what building makes.
NOT_OURS = {"owner/name", "dist/"}
SCRIPTS = "".join(
    path.read_text("utf-8")
    for path in sorted((ROOT / "scripts").rglob("*"))
    if path.suffix in {".py", ".sh"}
)
FILES = {
    f"/{path.relative_to(ROOT).as_posix()}": path
    for room in ROOT.glob("[!.]*")
    for path in (room, *room.rglob("*"))
    if "__pycache__" not in path.parts
}
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]


def own(parser: argparse.ArgumentParser) -> set[str]:
    return set(parser._option_string_actions)


KNOWN = {"--version"}.union(*map(own, COMMANDS.values()))


@pytest.fixture(params=NAMES)
def document(request: pytest.FixtureRequest) -> Path:
    return ROOT / request.param


def test_links_and_anchors_resolve(document: Path) -> None:
    text = document.read_text("utf-8")
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target.read_text("utf-8")), link


def test_what_is_named_exists(document: Path) -> None:
    """Files and folders by the end of their path, modules also with a name that they define."""
    if document.name == "CHANGELOG.md":
        return
    text = document.read_text("utf-8")
    for name in (files(text) | scripts(text)) - NOT_OURS:
        path = re.sub("^triforce_(?=kernels/|offload/)", "", name).rstrip("/")
        module, _, defined = path.rpartition(".")
        assert (
            found(path)
            or found(f"{path}.py")
            or any(defined in each for each in found(f"{module}.py"))
        ), f"{name} does not exist"


def found(path: str) -> list[str]:
    """The texts of files whose path ends so; a folder has none."""
    there = [each for name, each in FILES.items() if name.endswith(f"/{path}")]
    return [each.read_text("utf-8", "replace") if each.is_file() else "" for each in there]


def test_every_option_is_one(document: Path) -> None:
    known = KNOWN.union(*OTHERS.values())
    for option in options(document.read_text("utf-8")) - known:
        assert re.search(rf"{option}(?![\w-])", SCRIPTS), f"{option} is no option"


def test_every_command_takes_what_it_is_given(document: Path) -> None:
    for line in commands(document.read_text("utf-8")):
        name, *given = shlex.split(line, comments=True)[1:]
        if name.startswith("-"):
            continue
        assert name in COMMANDS, line
        for word in given:
            if word.startswith("-"):
                assert word.split("=")[0] in own(COMMANDS[name]), line


def test_every_page_is_in_the_navigation() -> None:
    sys.path.insert(0, str(ROOT / "scripts" / "pages"))
    try:
        from outside import PAGES
    finally:
        sys.path.pop(0)
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    named = list(pages(site["nav"]))
    inside = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(named) == sorted({*inside, *PAGES.values()})
    assert {*PAGES, *(f"docs/{name}" for name in inside)} == set(NAMES)


def pages(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for each in nav.values():
            yield from pages(each)
    else:
        for each in nav:
            yield from pages(each)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra docs is not installed")
def test_the_site_is_built(tmp_path: Path) -> None:
    """Strictly, and without a package that takes long to import."""
    for name in ("torch", "transformers"):
        (tmp_path / "none" / name).mkdir(parents=True)
        (tmp_path / "none" / name / "__init__.py").write_text("raise ImportError('not to be had')")
    built = subprocess.run(
        [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "none"), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "site" / "api.html").read_text("utf-8")
    import triforce_core

    for name in triforce_core.__all__:
        assert f'id="triforce_core.{name}"' in reference, name
    assert (
        "<li><code>temperature</code>: sampling temperature; 0 takes the arg-max</li>" in reference
    )
