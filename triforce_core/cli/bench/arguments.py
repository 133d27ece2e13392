"""The arguments of `triforce bench`."""

from __future__ import annotations

import argparse
from typing import Any

from triforce_core.bench.settings import TESTS, BenchSettings
from triforce_core.cli.options import CONTEXT_FLAGS, add_machine_options, add_option, tokens
from triforce_core.model.known.shapes import SHAPES
from triforce_core.settings import DEFAULT_BUDGET


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    def add(name: str, text: str, **options: Any) -> None:
        add_option(parser, BenchSettings, name, text, **options)

    add("shape", f"{', '.join(SHAPES)}, or a config.json", metavar="SHAPE|FILE")
    add("draft_shape", "shape of the draft model", metavar="SHAPE|FILE|none")
    add("context", "tokens in the KV cache", flags=CONTEXT_FLAGS, type=tokens, metavar="N")
    parser.add_argument(
        "--tests",
        default="all",
        metavar="NAME,...",
        help=f"tests to run, out of {', '.join(TESTS)}",
    )
    add("repeats", "number of runs of each test; the median is printed", type=int, metavar="N")
    add("draft_tokens", "draft tokens that a pass verifies", type=int, metavar="N")
    add(
        "budget",
        f"tokens in the retrieval cache (default: {DEFAULT_BUDGET} or less)",
        type=tokens,
        metavar="TOKENS",
    )
    parser.add_argument(
        "--output", default="md", choices=["md", "json"], help="format of the result"
    )
    add_machine_options(parser)
