"""Every script finds what it takes from the others."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
# What runs in a rival's own environment imports its packages at once.
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_script_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    assert importlib.import_module(name).__doc__, "what it does is said at its top"
