"""Run one of a folder's scripts by its name: `python scripts/bench decode --tokens 6000`."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
_RUNS = re.compile(r"^(def main\(|main = )", re.MULTILINE)


def run(folder: str) -> int:
    """Run the script of `folder` that the first argument names; return its exit code."""
    known = names(folder)
    if len(sys.argv) < 2 or sys.argv[1] not in known:
        return _list(folder, known)
    name = sys.argv[1]
    # The script's help and record use this name.
    sys.argv[:2] = [f"scripts/{folder} {name}"]
    return importlib.import_module(f"{folder}.{name}").main() or 0


def names(folder: str) -> list[str]:
    """Return the names of a folder's scripts that can be run. Its other modules are shared code."""
    paths = sorted((SCRIPTS / folder).glob("[a-z]*.py"))
    return [path.stem for path in paths if _RUNS.search(path.read_text("utf-8"))]


def _list(folder: str, known: list[str]) -> int:
    """Print the first docstring line of every script. Return 0 for help, 2 after a wrong name."""
    asked = sys.argv[1:2]
    helped = asked in (["-h"], ["--help"])
    file = sys.stdout if helped else sys.stderr
    if asked and not helped:
        print(f"scripts/{folder} has no script {asked[0]!r}", file=file)
    print(
        f"usage: python scripts/{folder} NAME [OPTIONS]; NAME --help lists its options", file=file
    )
    for name in known:
        tree = ast.parse((SCRIPTS / folder / f"{name}.py").read_text("utf-8"))
        print(f"  {name:20} {(ast.get_docstring(tree) or '').splitlines()[0]}", file=file)
    return 0 if helped else 2
