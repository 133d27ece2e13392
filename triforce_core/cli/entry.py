"""The command `triforce`, from its first moment."""

from __future__ import annotations

import sys

from triforce_core.cli.terminal.leaving import leave_at_once, leave_with


def main() -> int:
    """Runs the command line, and returns its exit code."""
    leave_at_once()
    from triforce_core.cli.main import main

    code = 1
    try:
        code = main()
    finally:
        waiting = sys.modules.get("triforce_offload.link.waiting")
        if waiting and waiting.hangs():
            # The driver, asked to let go of the device, would wait for it.
            leave_with(code)
    return code
