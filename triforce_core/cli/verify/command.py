"""`triforce verify`: print the problems of a model on disk, or where drafting changes a text."""

from __future__ import annotations

import argparse
import sys

from triforce_core.cli.generate.arguments import MODEL_HELP
from triforce_core.cli.options import add_option, engine_config
from triforce_core.cli.terminal.console import Printer
from triforce_core.cli.terminal.output import logs_json
from triforce_core.machine_settings import MachineSettings
from triforce_core.settings import DTYPE_NAMES, EngineConfig
from triforce_offload.errors import CheckpointError

# The exit code if texts differ.
_DIFFERENT = 1


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--same-bits",
        dest="prompt",
        metavar="PROMPT",
        help="instead of checking the files, generate a text without drafts and with each way of "
        "drafting, greedily and from a coupled seed, and show where they differ",
    )
    add_option(parser, MachineSettings, "device", "cuda:0 or cpu", metavar="DEVICE")
    add_option(parser, EngineConfig, "dtype", "number type of weights and KV", choices=DTYPE_NAMES)


def verify(args: argparse.Namespace) -> int:
    """Print the problems that are found. Return the exit code: that of a bad checkpoint if there
    are any, 1 if texts differ.
    """
    from triforce_core.model.found.names import resolve

    path, console = resolve(args.model), Printer(stderr=True, quiet=logs_json())
    if args.prompt is not None:
        from triforce_core.cli.verify.texts import compared

        with console.status("generating"):
            return _DIFFERENT if compared(path, args.prompt, engine_config(args)) else 0
    from triforce_core.model.checkpoints.verify import findings

    found = 0
    with console.status("checking the headers") as status:
        for line in findings(path, lambda what: status.update(f"checking {what}")):
            found += 1
            _print(line)
    if not found:
        _print(f"{path}: nothing is wrong with it")
    return CheckpointError.exit_code if found else 0


def _print(line: str) -> None:
    """Print a sentence: wrapped in a terminal, and on one line for other programs."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    Printer().print(line, soft_wrap=not terminal)
