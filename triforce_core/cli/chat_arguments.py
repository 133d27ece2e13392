"""The arguments of `triforce chat`."""

from __future__ import annotations

import argparse

from triforce_core.cli.generate_arguments import add_decoding_arguments, add_model_argument


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_argument(parser)
    add("--system", metavar="TEXT", help="system prompt")
    add("--load", metavar="FILE", help="a conversation that /save wrote")
    add(
        "--commands",
        action="store_true",
        help="over a pipe too, a line that begins with / is a command, which may read and write "
        "files (default: in a terminal alone)",
    )
    add_decoding_arguments(parser)
    add("--quiet", action="store_true", help="no progress and no figures")
    add(
        "--color-levels",
        action="store_true",
        help="colour the text by where it came from: accepted draft, correction, bonus",
    )
