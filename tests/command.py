"""Running the command line in a test's own process."""

from __future__ import annotations

import signal

from triforce_core.cli.main import main
from triforce_core.cli.signals import NAMES

GREEDY = ("--temperature", "0", "--max-new-tokens", "20", "--device", "cpu")


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        # Of argparse.
        code = exit_.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def heed_signals() -> None:
    for name in NAMES:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
