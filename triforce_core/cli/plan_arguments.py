"""The arguments of `triforce plan`: every variable of a plan is a flag."""

from __future__ import annotations

import argparse

from triforce_core.cli.options import CONTEXT_FLAGS, add_explained_options
from triforce_core.model.mixes import NAMES
from triforce_core.model.shapes import SHAPES
from triforce_core.params import SamplingParams
from triforce_core.plan.simulation.acceptance_curve import (
    DEFAULT_ACCEPTANCE,
    MODEL_ACCEPTANCE,
    NGRAM_ACCEPTANCE,
)
from triforce_core.settings import (
    AUTO,
    DEFAULT_BUDGET,
    DRAFT_KV,
    DRAFT_WEIGHTS,
    KV_FORMATS,
    METHODS,
    WEIGHTS,
)
from triforce_offload.formats import DTYPES
from triforce_offload.machine.profiles import RESERVED_BYTES
from triforce_offload.units import format_bytes

SWEEPS = ("context", "gpus", "link")
DEFAULT_CONTEXT = 131072


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help=f"{', '.join(SHAPES)}, quantised as in qwen3-32b:Q4_K_M ({', '.join(NAMES)}), a "
        "config.json, or a .gguf file",
    )
    add("--gpu", metavar="NAME", help="a card by its name (default: this machine, measured)")
    add(
        "--gpus", type=int, choices=range(1, 9), help="how many of them (default: 1, or the plan's)"
    )
    add(
        *CONTEXT_FLAGS,
        dest="context",
        type=int,
        metavar="N",
        help=f"prompt and new tokens (default: {DEFAULT_CONTEXT} or fewer)",
    )
    add(
        "--new-tokens",
        type=int,
        default=SamplingParams.max_new_tokens,
        metavar="N",
        help="of these, generated",
    )
    add(
        "--acceptance",
        type=float,
        metavar="A",
        help=f"of drafted tokens by the target, with --budget or {DEFAULT_BUDGET} tokens "
        f"(default: {DEFAULT_ACCEPTANCE})",
    )
    add(
        "--inner-acceptance",
        type=float,
        metavar="A",
        help=f"of the drafter's tokens (default: {NGRAM_ACCEPTANCE} for n-grams, "
        f"{MODEL_ACCEPTANCE} for a small model)",
    )
    add("--stats", metavar="FILE", help="take acceptance from a run's `generate --stats`")
    add(
        "--method",
        choices=METHODS,
        help="plan for this one (default: the faster of the first two)",
    )
    add("--draft", metavar="ngram|none|MODEL", help="drafter (default: n-grams)")
    add("--budget", type=int, metavar="TOKENS", help="of the retrieval cache")
    add("--draft-tokens", type=int, metavar="N", help="drafted for each pass")
    add("--inner-draft-tokens", type=int, metavar="N", help="for each retrieval step")
    add("--resident-kv", metavar="N|Nlayers", help="KV blocks that stay on the device, or layers")
    add(
        "--weights",
        default=AUTO,
        choices=WEIGHTS,
        help="of a quantised model: stored as they are, which is auto, or dense in --dtype; of one "
        "in bfloat16 or float16: split, 12 bits a number of the first, or dense (auto: the "
        "faster, of KV too)",
    )
    add(
        "--kv",
        default=AUTO,
        choices=KV_FORMATS,
        help="of a model in bfloat16: blocks split of 12 bits a number, or dense",
    )
    add(
        "--draft-weights",
        choices=DRAFT_WEIGHTS,
        help="of the retrieval model: copies in 4 bits of all layers, of those that stream (auto, "
        "or whatever is faster), or none; split: 8 of 12 bits of those that are split",
    )
    add(
        "--draft-kv",
        choices=DRAFT_KV,
        help="of the retrieval cache: int8, which is auto on a GPU, or exact",
    )
    add(
        "--link",
        metavar="pcie4x8",
        help="the slot, if it is less than the card's own; of each card: pcie4x16,pcie4x4",
    )
    add("--link-bandwidth", metavar="RATE", help="of each link, e.g. 25.4GB/s")
    add("--host-memory", metavar="SIZE", help="refuse plans that need more (default: no limit)")
    add("--host-bandwidth", metavar="RATE", help="of host memory, which all links share")
    add(
        "--disk-bandwidth",
        metavar="RATE",
        help="lets layers that host memory has no room for be read from disk in each pass",
    )
    add(
        "--device-memory",
        metavar="SIZE",
        help=f"of each GPU (default: all but {format_bytes(RESERVED_BYTES)})",
    )
    add(
        "--dtype",
        default="float16",
        choices=list(DTYPES),
        help="of weights and KV; float32 on the emulated device",
    )
    add(
        "--compare",
        choices=METHODS,
        help="beside the best plan of another method",
    )
    add("--sweep", choices=list(SWEEPS), help="one row for each of several values")
    add("--plot", metavar="FILE.png", help="draw seconds per token of the sweep (of contexts)")
    add("--trace", metavar="FILE", help="write the simulated timeline of a round, for Perfetto")
    add(
        "--plan",
        metavar="FILE",
        help="take a plan from a file; flags change it, and what is auto is chosen",
    )
    add("--save", metavar="FILE", help="write the plan, for `generate --plan`")
    add("--json", action="store_true", help="all figures as JSON")
    add_explained_options(parser)
