"""Running the command line in a test's own process."""

from __future__ import annotations

import re
import signal
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from triforce_core.cli.main import main
from triforce_core.cli.terminal.ending import NAMES

GREEDY = ("--temperature", "0", "--max-new-tokens", "20", "--device", "cpu")


def least_memory(*command: object) -> tuple[str, str]:
    """`--device-memory`, just large enough for a command: the weights of every layer stream."""
    with redirect_stderr(StringIO()) as said:
        main([*map(str, command), "--device-memory", "9KiB"])
    needed = re.search(r"needs ([\d.]+) (KiB|MiB) and 9 KiB is", said.getvalue())
    assert needed, said.getvalue()
    # The refusal rounds.
    return "--device-memory", f"{1.01 * float(needed[1]):.4f}{needed[2]}"


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as exit_:
        # Of argparse.
        code = exit_.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def wait_until_heeded(process: int) -> None:
    """Waits until a command heeds signals. What comes before is the interpreter's own start, in
    which an interrupt is a KeyboardInterrupt of its own, or an end with code 1.
    """
    until = time.monotonic() + 60
    while time.monotonic() < until:
        status = Path(f"/proc/{process}/status").read_text()
        (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
        # Python itself leaves this one to the system.
        if int(caught, 16) >> signal.SIGTERM - 1 & 1:
            return
        time.sleep(0.001)
    raise AssertionError("the command heeds no signal")


def heed_signals() -> None:
    for name in NAMES:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
