"""The rows of README.md's table "How fast": which plan or which record each figure comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache

from checks.planned_tables import (
    CARD,
    COMPARED,
    CPU,
    GIB,
    PLAIN,
    SECONDS,
    TWO,
    Cell,
    Read,
    figure,
    numbers,
    sections,
)
from frame import ROOT, Figures, result_path

README = ROOT / "README.md"
_K8, _K32, _K128 = (("--context", str(tokens)) for tokens in (8192, 32768, 131072))
_QWEN = "qwen3.8-27b:Q4_K_M"
_LLAMA, _DFLASH = "llama3.1-70b:Q4_K_M", ("--draft", "dflash:Q4_K_M")
_LONG = ("llama2-7b-128k", *_K128, *PLAIN)
_HOST = figure("memory.host_bytes", GIB)
_EXPERTS = figure("memory.processor_bytes", GIB)

Planned = tuple[tuple[str, ...], Read]
# Figures of a row's result, in order, by how the row begins; all plans are for an RTX 4090.
SIMULATED: dict[str, tuple[Planned, ...]] = {
    "Llama-2-7B at 128K": ((_LONG, SECONDS), (_LONG, COMPARED)),
    "Qwen3.8-27B in bfloat16": tuple(
        (("qwen3.8-27b", *_K32, *more), SECONDS) for more in ((), CPU, TWO)
    ),
    "Llama-3.1-70B": tuple(
        ((_LLAMA, *_K8, *CPU, *draft), SECONDS) for draft in ((), ("--draft", "eagle3"))
    ),
    "Qwen3.8-27B as Q4_K_M": tuple(
        ((_QWEN, *context, *draft), SECONDS) for draft in ((), _DFLASH) for context in (_K8, _K128)
    ),
    "gpt-oss-120b": tuple(
        (("gpt-oss-120b", *_K32, *more), SECONDS) for more in (CPU, (*TWO, *CPU), ())
    ),
    "Qwen3.8-Flash-Next": tuple(
        (("qwen3.8-flash-next:NVFP4", *_K32, *more), SECONDS) for more in (CPU, ())
    ),
    "Qwen3.5-35B-A3B": tuple(
        (("qwen3.5-35b-a3b", *_K32, *more), SECONDS) for more in (CPU, ())
    ),
}  # fmt: skip
# Figures that stand where the row says what is planned.
SAID: dict[str, tuple[str, tuple[str, ...], Read]] = {
    "Qwen3.8-Flash-Next": (
        r"(\d+) GiB of experts", ("qwen3.8-flash-next:NVFP4", *_K32, *CPU), _EXPERTS,
    ),
    "Qwen3.5-35B-A3B": (r"(\d+) GiB of host", ("qwen3.5-35b-a3b", *_K32, *CPU), _HOST),
    "SmolLM2-135M, 6,000": (
        r"a pass as long as drafting (\d+)\)",
        ("llama2-7b-128k", *_K128),
        lambda plan: [plan["seconds_per_pass"] / plan["retrieval_step_seconds"]],
    ),
}  # fmt: skip


def rows() -> list[dict[str, str]]:
    """Return the rows of the table."""
    return dict(sections(README.read_text("utf-8")))["How fast"][0]


def of(row: dict[str, str], figures: dict[str, object]) -> str | None:
    """Return how a row begins, if it has an entry in `figures`."""
    return next((name for name in figures if row["what"].startswith(name)), None)


def readme_cells() -> Iterator[Cell]:
    """Yield the simulated figures of README.md. Raises ValueError for a row of which it is not
    known what is planned.
    """
    for row in rows():
        place = f"{README.name}, {row['what']}: "
        if (name := of(row, SAID)) is not None:
            pattern, arguments, read = SAID[name]
            said = re.search(pattern, row["what"])
            yield Cell(f"{place}what", said[1] if said else "", (*arguments, *CARD), read)
        if row["kind"] != "simulated":
            continue
        known, printed = SIMULATED.get(of(row, SIMULATED) or "", ()), numbers(row["result"])
        if len(known) != len(printed):
            raise ValueError(f"{place}figures {printed}, of which {len(known)} are known")
        for index, (text, (arguments, read)) in enumerate(zip(printed, known, strict=True)):
            yield Cell(f"{place}result {index + 1}", text, (*arguments, *CARD), read)


@cache
def record(name: str) -> Figures:
    """Return a record of benchmarks/results."""
    return json.loads(result_path(name).read_text("utf-8"))


def compared(name: str, *systems: str) -> list[float]:
    """Return the seconds per token of some systems of a comparison."""
    return [record(name)["systems"][system]["median_token_seconds"] for system in systems]


def timed(name: str, test: str, what: str, figure: str = "median_seconds") -> float:
    """Return the seconds of a row that `gpu_check.sh` measured."""
    (row,) = (
        row for row in record(name)["rows"] if row["test"] == test and row["what"].startswith(what)
    )
    return row[figure]


def speed_ups() -> list[float]:
    """Return the medians of two machines, and the least and greatest of single prompts."""
    medians, single = [], []
    for name in ("bench_triforce", "bench_triforce_100"):
        methods = record(name)["pass_to_retrieval_step"]["100"]
        medians.append(methods["triforce"]["speed_up"])
        plain, ours = (methods[each]["runs"] for each in ("autoregressive", "triforce"))
        single += [
            slow["seconds_per_token"] / fast["seconds_per_token"]
            for slow, fast in zip(plain, ours, strict=True)
        ]
    return [*medians, min(single), max(single)]


_H200, _H100 = "gpu_h200_llama2_7b_128k", "gpu_h100_qwen35_9b_8k"
_STORED = ("ours, speculative, as stored", "ours, autoregressive, as stored")
_OTHERS = ("llama.cpp, plain", "transformers, plain")
# Figures of rows that were measured, in the order in which they are printed.
MEASURED: dict[str, Callable[[], list[float]]] = {
    "SmolLM2-135M, 6,000": speed_ups,
    "the same model, half of it": lambda: compared(
        "compare",
        "ours, triforce, streamed", "accelerate, cpu_offload", "deepspeed, ZeRO-3 offloaded",
    ),
    "the same model from its 4-bit file": lambda: compared("compare", *_STORED, *_OTHERS),
    "Gemma 3 270M": lambda: compared("compare_gemma", *_STORED, *_OTHERS),
    "Llama-2-7B's shape": lambda: [
        timed(_H200, "pass", "25 tokens"),
        timed(_H200, "pass", "25 tokens", "floor_seconds"),
        1e3 * timed(_H200, "retrieval", "one token"),
    ],
    "Qwen3.5-9B's shape": lambda: [
        timed(_H100, "pass", "1 token"),
        timed(_H100, "pass", "1 token", "floor_seconds"),
        timed(_H100, "pass", "25 tokens"),
        1e3 * timed(_H100, "retrieval", "one token"),
    ],
}  # fmt: skip
