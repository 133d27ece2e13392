"""The folder of the tests, whose helpers the long runs use."""

from __future__ import annotations

import os
import sys

from frame import ROOT

TESTS = ROOT / "tests"


def use_tests(*folders: str) -> None:
    """Let this process, and those that it starts, import the modules of tests/ and its folders."""
    paths = [str(TESTS / folder) for folder in ("", *folders)]
    sys.path += paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
