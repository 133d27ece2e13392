"""A few hundred plans, recorded: what a change of the planner's code must not change unnoticed.

`grid.json` has what `triforce plan` gave for each case, and what an engine took on a device with as
much memory. A change that is meant is recorded anew:

    python tests/core/plan/plan_grid.py
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triforce_core.cli.main import main
from triforce_core.model.known.mixes import NAMES, OF_SAFETENSORS
from triforce_core.model.known.shapes import SHAPES, read_model
from triforce_core.model.known.sparse import SPARSE

RECORD = Path(__file__).with_name("grid.json")
COUNT = 320
_MIXES = [name for name in NAMES if name not in OF_SAFETENSORS]
NEWER = ("mistral-small3.2", "seed-oss-36b", "glm4-32b", "phi4-14b", "granite3.3-8b", "smollm3-3b")
RECURRENT = ("qwen3.8-27b", "qwen3.5-9b", "lfm2-1.2b")
WINDOWED = ("gemma3-4b", "gemma3-12b", "gemma3-27b", "gemma4-31b", "olmo3-32b", "exaone4-32b")
SMALL_WINDOWED = ("gemma3-270m",)
LATEST = ("gemma4-12b",)
OF_NOVEMBER = ("lfm3-1.7b", "cwm-32b", "iquest-coder-40b")
LATEST_SPARSE = ("qwen3-next-80b-a3b", "minimax-m2", "laguna-xs-2.1", "lfm2-8b-a1b")
SMALL_OF_NOVEMBER = ("gemma4-e2b", "gemma4-e4b")
SPARSE_OF_NOVEMBER = ("solar-open-100b", "mellum2-12b-a2.5b")
_STREAMED = ("qwen3.8-27b:FP8", "qwen2.5-32b:FP8", "qwen2.5-32b:Q8_0", "qwen2.5-32b:Q6_K")
_SHARED = {"llama3.1-70b:Q4_K_M": "8192", "gpt-oss-120b": "8192", "llama2-7b-128k": "131072"}
# Of what `triforce plan --json` prints: names and figures of the plan, and of its parts.
FIGURES = (
    *("method", "seconds_per_token", "seconds_per_round", "seconds_per_pass", "draft_seconds"),
    *("refresh_seconds", "tokens_per_pass", "bytes_per_pass", "prefetched_bytes"),
    *("disk_bytes_per_pass", "compute_seconds", "retrieval_step_seconds", "prefill_seconds"),
    *("acceptance", "placement", "memory"),
)
PLAN = (
    *("weights", "kv", "draft_tokens", "inner_draft_tokens", "draft_weights", "draft_kv"),
    *("weight_slots", "kv_slots", "staging_slots", "streamed_layers"),
)


def cases() -> list[list[str]]:
    """Arguments of `triforce plan`: each known shape on one card, then a seeded sample. Shapes that
    came later are drawn after the others, so that these cases stay as they are.
    """
    every = []
    others = (*NEWER, *WINDOWED, *RECURRENT, *SPARSE, *LATEST, *SMALL_WINDOWED, *OF_NOVEMBER)
    others += SMALL_OF_NOVEMBER
    first = [name for name in SHAPES if name not in others]
    sparse = [name for name in SPARSE if name not in (*LATEST_SPARSE, *SPARSE_OF_NOVEMBER)]
    later = ((40, NEWER), (30, WINDOWED), (20, RECURRENT), (25, sparse), (3, LATEST))
    later += ((9, LATEST_SPARSE), (1, SMALL_WINDOWED))
    later += ((8, OF_NOVEMBER), (5, SPARSE_OF_NOVEMBER), (6, SMALL_OF_NOVEMBER))
    for count, names in ((COUNT, first), *later):
        draw = random.Random(33)
        some = [[name, "--gpu", "rtx4090"] for name in names]
        while len(some) < count:
            some.append(_drawn(draw, names))
        every += some
    # Quantised layers that stream, with draft copies of them.
    every += [[name, "--gpu", "rtx4090", "--context", "32768"] for name in _STREAMED]
    every += [[name, *every[-1][1:], "--draft-weights", "int4"] for name in _STREAMED[-2:]]
    # What a processor computes of layers, of experts, and of KV.
    rates = ["--host-bandwidth", "60GB/s", "--host-flops", "1.5e12"]
    for name, context in _SHARED.items():
        every.append([name, "--gpu", "rtx4090", "--context", context, *rates])
    return every


def _drawn(draw: random.Random, names: Sequence[str]) -> list[str]:
    name = draw.choice(names)
    quantised = draw.random() < 0.25
    if quantised:
        name += f":{draw.choice(_MIXES)}"
    arguments = [name, "--gpu", draw.choice(["rtx4090"] * 3 + ["rtx3060", "rtx5090", "h100"])]

    def maybe(share: float, flag: str, *values: object) -> None:
        if draw.random() < share:
            arguments.extend((flag, str(draw.choice(values))))

    maybe(0.3, "--gpus", 2, 2, 4)
    positions = read_model(name).config.positions
    contexts = [each for each in (2048, 4096, 16384, 32768, 65536, 131072) if each <= positions]
    maybe(0.7, "--context", *contexts)
    maybe(0.2, "--method", "triforce", "speculative", "autoregressive")
    maybe(0.3, "--device-memory", "4GiB", "8GiB", "12GiB", "16GiB", "20GiB")
    maybe(0.3, "--host-memory", "16GiB", "32GiB", "64GiB")
    maybe(0.2, "--disk-bandwidth", "3GB/s")
    maybe(0.2, "--link", "pcie4x8", "pcie5x16")
    maybe(0.2, "--budget", 1024, 4096)
    maybe(0.2, "--draft-tokens", 8, 24)
    maybe(0.2, "--draft", "none", _drafter(name))
    maybe(0.2, "--draft-weights", "exact", *([] if quantised else ["int4"]))
    maybe(0.2, "--draft-kv", "exact", "int8")
    maybe(0.2, "--resident-kv", 0, "2layers")
    dtype = draw.choice(["bfloat16", "bfloat16", "float16", "float32"])
    arguments += ["--dtype", dtype]
    if dtype == "bfloat16":
        maybe(0.3, "--kv", "dense", "split")
    if dtype != "float32" and not quantised:
        maybe(0.3, "--weights", "dense", "split")
    return arguments


def _drafter(name: str) -> str:
    """A small model with the vocabulary of a shape, if one is known."""
    small = ("llama-68m", "smollm2-135m", "llama3.2-1b", "qwen3-4b", "qwen2.5-7b", "gemma3-4b")
    vocab = read_model(name).config.vocab
    return next((each for each in small if read_model(each).config.vocab == vocab), "ngram")


def planned(arguments: list[str]) -> dict[str, Any]:
    """What `triforce plan` gives: figures, or its exit code and the numbers of its refusal."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(["plan", *arguments, "--json"])
        except SystemExit as error:
            code = error.code
    if code:
        return {"code": code, "numbers": re.findall(r"\d+(?:\.\d+)?", err.getvalue())}
    given = json.loads(out.getvalue())
    return {name: given[name] for name in FIGURES} | {name: given["plan"][name] for name in PLAN}


def write() -> None:
    rows = [{"arguments": each, "gives": planned(each)} for each in cases()]
    lines = ",\n".join(json.dumps(row) for row in rows)
    RECORD.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    write()
