"""The arguments of `triforce bench`."""

from __future__ import annotations

import argparse
from typing import Any

from triforce_core.bench.settings import TESTS, BenchSettings
from triforce_core.cli.options import CONTEXT_FLAGS, add_machine_options, add_option
from triforce_core.model.shapes import SHAPES
from triforce_core.settings import DEFAULT_BUDGET


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    def add(name: str, text: str, **options: Any) -> None:
        add_option(parser, BenchSettings, name, text, **options)

    add("shape", f"{', '.join(SHAPES)}, or a config.json", metavar="SHAPE|FILE")
    add("draft_shape", "of the drafter", metavar="SHAPE|FILE|none")
    add("context", "tokens in the KV cache", flags=CONTEXT_FLAGS, type=int, metavar="N")
    parser.add_argument("--tests", default="all", metavar="NAME,...", help=f"of {', '.join(TESTS)}")
    add("repeats", "runs of each, of which the median", type=int, metavar="N")
    add("draft_tokens", "verified by a pass", type=int, metavar="N")
    add(
        "budget",
        f"of the retrieval cache (default: {DEFAULT_BUDGET} or less)",
        type=int,
        metavar="TOKENS",
    )
    parser.add_argument("--output", default="md", choices=["md", "json"], help="form of the result")
    add_machine_options(parser)
