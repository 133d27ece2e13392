"""The command `triforce`, from its first moment."""

from __future__ import annotations

from triforce_core.cli.signals import leave_at_once


def main() -> int:
    """Runs the command line, and returns its exit code."""
    leave_at_once()
    from triforce_core.cli.main import main

    return main()
