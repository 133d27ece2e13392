"""Every script is found by its name, imports what it needs and says what it does."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import names
from frame import Benchmark

SCRIPTS = Path(__file__).parents[2] / "scripts"
FOLDERS = ("bench", "checks", "rivals")
# The systems of rivals/ run in an environment of their own, and import its packages at once.
NAMES = [
    *(path.stem for path in sorted(SCRIPTS.glob("*.py"))),
    *(f"{folder}.{name}" for folder in FOLDERS for name in names(folder)),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_script_can_be_imported(name: str) -> None:
    assert importlib.import_module(name).__doc__, "its docstring says what it does"


@pytest.mark.parametrize("name", NAMES)
def test_a_script_has_the_options_that_it_asks_for(name: str) -> None:
    module = importlib.import_module(name)
    if not isinstance(main := getattr(module, "main", None), Benchmark):
        return
    parsed = vars(main._parser().parse_args([]))
    asked = set(re.findall(r"\bargs\.(\w+)", inspect.getsource(module)))
    assert asked <= set(parsed), "what is asked of the arguments is an option"


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=SCRIPTS.parent, capture_output=True, text=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_lists_its_scripts(folder: str) -> None:
    listed = start(f"scripts/{folder}", "--help")
    assert listed.returncode == 0
    assert {line.split()[0] for line in listed.stdout.splitlines()[1:]} == set(names(folder))
    wrong = start(f"scripts/{folder}", "nothing")
    assert wrong.returncode == 2
    assert "no script 'nothing'" in wrong.stderr


def test_a_script_lists_its_options_and_its_own_name() -> None:
    helped = start("scripts/bench", "decode", "--help")
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.startswith("usage: bench decode")
    assert "--tokens" in helped.stdout
