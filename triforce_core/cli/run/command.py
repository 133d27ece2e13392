"""`triforce run`: a chat in a terminal, or the answer to one message."""

from __future__ import annotations

import argparse
import os
import stat
import sys

from triforce_core.cli.chat.command import converse
from triforce_core.cli.chat.line import Lines, OneMessage
from triforce_core.cli.terminal.output import say
from triforce_core.cli.terminal.reading import read_stdin


def run(args: argparse.Namespace) -> int:
    """Chat, or answer one message. Return the exit code."""
    args.load, args.commands = None, False
    if args.prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return converse(args, Lines)
    return converse(args, lambda: OneMessage(_message(args.prompt)))


def _message(prompt: str | None) -> str:
    """Return the message to answer: what comes from a pipe or a file, then the prompt, as Ollama
    joins them. Raises UsageError.
    """
    if prompt is None:
        return read_stdin()
    if not _is_piped():
        return prompt
    say("the message begins with standard input, which is read now (</dev/null leaves it out)")
    return "\n\n".join(filter(None, (read_stdin(), prompt)))


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file, not a terminal or a device."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(kind) or stat.S_ISREG(kind)
