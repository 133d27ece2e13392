"""`triforce verify`: print the problems of a model on disk, one per line."""

from __future__ import annotations

import argparse

from rich.console import Console

from triforce_core.cli.terminal.output import logs_json
from triforce_core.model.checkpoints.checkpoint import resolve
from triforce_core.model.checkpoints.verify import findings
from triforce_offload.errors import CheckpointError


def verify(args: argparse.Namespace) -> int:
    """Print the problems found. Return the exit code, that of a bad checkpoint if there are any."""
    path, found = resolve(args.model), 0
    console = Console(stderr=True, quiet=logs_json())
    with console.status("looking at the headers") as status:
        for line in findings(path, lambda what: status.update(what)):
            found += 1
            print(line)
    if not found:
        print(f"{path}: nothing is wrong with it")
    return CheckpointError.exit_code if found else 0
