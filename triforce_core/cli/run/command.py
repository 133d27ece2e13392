"""`triforce run`: a chat in a terminal, or the answer to one message."""

from __future__ import annotations

import argparse
import sys

from triforce_core.cli.chat.command import converse
from triforce_core.cli.chat.line import Lines, OneMessage
from triforce_core.cli.terminal.reading import read_stdin


def run(args: argparse.Namespace) -> int:
    """Chat, or answer one message. Return the exit code."""
    args.load, args.commands = None, False
    if args.prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return converse(args, Lines)
    return converse(args, lambda: OneMessage(_message(args.prompt)))


def _message(prompt: str | None) -> str:
    """Return the message to answer: what is piped in, then the prompt, as Ollama joins them.

    Raises UsageError.
    """
    if prompt is None:
        return read_stdin()
    piped = "" if sys.stdin is None or sys.stdin.isatty() else read_stdin()
    return "\n\n".join(filter(None, (piped, prompt)))
