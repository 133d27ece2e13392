"""The command `triforce`, from its first moment."""

from __future__ import annotations

import os

from triforce_core.cli.leaving import leave_at_once


def main() -> int:
    """Runs the command line, and returns its exit code."""
    leave_at_once()
    # Threads that wait for work spin for a moment and then sleep: two processes on one machine do
    # not wait for each other's. Read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from triforce_core.cli.main import main

    return main()
