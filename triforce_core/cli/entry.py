"""The entry point of the `triforce` command, from the start of the process."""

from __future__ import annotations

import sys

from triforce_core.cli.terminal.ending import leave_at_once, leave_with


def main() -> int:
    """Run the command line and return its exit code."""
    leave_at_once()
    from triforce_core.cli.main import main

    code = 1
    try:
        code = main()
    finally:
        waiting = sys.modules.get("triforce_offload.link.waiting")
        if waiting and waiting.hangs():
            # The device hangs: a normal exit releases it, and the driver would wait for it.
            leave_with(code)
    return code
