"""The arguments of `triforce serve`."""

from __future__ import annotations

import argparse
from typing import Any

from triforce_core.cli.generate_arguments import (
    add_machine_and_method,
    add_model_argument,
    add_sequences,
)
from triforce_core.cli.options import add_option
from triforce_core.server.settings import ServerSettings


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)

    def add(name: str, text: str, **options: Any) -> None:
        add_option(parser, ServerSettings, name, text, **options)

    add("host", "address to listen on; one that others reach needs a key", metavar="ADDRESS")
    add("port", "to listen on", type=int, metavar="N")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="that clients must send (default: TRIFORCE_API_KEY, or none)",
    )
    parser.add_argument("--name", metavar="NAME", help="of the model (default: its file's)")
    add("queue", "requests that may wait", type=int, metavar="N")
    add("max_body", "largest request, e.g. 32MiB", metavar="SIZE")
    add(
        "contexts",
        "conversations besides the one at hand whose KV is kept in host memory",
        type=int,
        metavar="N",
    )
    add_sequences(parser)
    add_machine_and_method(parser)
    parser.add_argument("--log-requests", action="store_true", help="a line for each request")
    parser.add_argument("--quiet", action="store_true", help="warnings alone")
