"""The arguments of `triforce chat`."""

from __future__ import annotations

import argparse

from triforce_core.cli.generate.arguments import add_decoding_arguments, add_model_argument
from triforce_core.requests.answer.reasoning import AS_TEMPLATE, OFF, ON


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
    add(
        "--reasoning",
        choices=(AS_TEMPLATE, ON, OFF),
        default=AS_TEMPLATE,
        help="whether the model reasons before it answers; auto: the chat template decides",
    )
    add_decoding_arguments(parser)
    add("--quiet", action="store_true", help="show no progress and no figures")
    add(
        "--color-levels",
        action="store_true",
        help="colour the text by origin: accepted draft, correction, bonus token",
    )
