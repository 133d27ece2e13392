"""The arguments of `triforce chat`."""

from __future__ import annotations

import argparse

from triforce_core.cli.generate.arguments import (
    add_decoding_arguments,
    add_model_argument,
    add_reasoning,
)


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_argument(parser)
    add("--load", metavar="FILE", help="continue a conversation from /save")
    add(
        "--commands",
        action="store_true",
        help="run lines that begin with / as commands even if the input is a pipe; commands read "
        "and write files (default: only in a terminal)",
    )
    add_conversation_arguments(parser)


def add_conversation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that a chat shares with the answer to one message."""
    add = parser.add_argument
    add("--system", metavar="TEXT", help="system prompt")
    add_reasoning(add)
    add_decoding_arguments(parser)
    add("--quiet", action="store_true", help="show no progress and no figures")
    add(
        "--color-levels",
        action="store_true",
        help="colour the text by origin: accepted draft, correction, bonus token",
    )
