"""Access to the tests folder, whose helpers the long checks use."""

from __future__ import annotations

import os
import sys

from frame import ROOT

TESTS = ROOT / "tests"


def use_tests(*folders: str) -> None:
    """Make the modules of tests/ and its `folders` importable, here and in child processes."""
    paths = [str(TESTS / folder) for folder in ("", *folders)]
    sys.path += paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
