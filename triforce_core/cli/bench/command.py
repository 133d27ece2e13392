"""`triforce bench`: run the tests and print a table or JSON on standard output."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from triforce_core.bench.bench import Bench
from triforce_core.bench.rows import Row
from triforce_core.bench.settings import TESTS, BenchSettings
from triforce_core.cli.options import given
from triforce_core.cli.terminal.console import Printer
from triforce_core.cli.terminal.output import say
from triforce_core.cli.terminal.signals import raising
from triforce_core.machine_settings import MachineSettings
from triforce_core.model.known.shapes import for_timing, read_shape
from triforce_core.requests.stats import bits_per_number
from triforce_core.settings import NO_DRAFTER, EngineConfig
from triforce_offload.machine.hardware import provenance
from triforce_offload.units import format_bytes

# What a reader looks for first: tokens per second, and the time to the first token.
_FIRST = ("decode", "prefill")


def bench(args: argparse.Namespace) -> int:
    """Run the tests, report each one on stderr as it ends, and print all. Return the exit code."""
    fields = given(args, BenchSettings)
    tests = TESTS if args.tests == "all" else tuple(args.tests.split(","))
    settings = BenchSettings(**fields | {"tests": tests})
    config = for_timing(read_shape(settings.shape))
    draft = None if settings.draft_shape == NO_DRAFTER else read_shape(settings.draft_shape)
    machine = MachineSettings(**given(args, MachineSettings))
    # The dtype and the formats of weights and KV.
    engine = EngineConfig(machine, **given(args, EngineConfig))
    rows: list[Row] = []
    with ExitStack() as stack:
        running = Bench(settings, config, draft, engine, stack)
        about = describe(running)
        try:
            with raising(), running.runtime.memory.typed_errors():
                for row in running.rows():
                    say(f"{row.test}: {row.what}: {row.median:.6f} s")
                    rows.append(row)
        finally:
            # After a failed test or an interrupt, the results of the other tests are still shown.
            about["memory"]["device_peak_bytes"] = running.runtime.memory.peak_bytes
            if rows:
                show(about, rows, args.output)
    return 0


def show(about: dict[str, Any], rows: Sequence[Row], output: str) -> None:
    if output == "json":
        print(json.dumps(about | {"rows": [row.as_dict() for row in rows]}, indent=2), flush=True)
    else:
        print_rows(about, rows)


def describe(running: Bench) -> dict[str, Any]:
    """Return what was run, the hardware and the placement."""
    runtime, settings = running.runtime, running.settings
    plan, placement, link = runtime.plan, runtime.plan.placement, runtime.link
    slots = placement.kv_slots + placement.staging_slots
    streaming = slots * plan.kv.shape.block_bytes + placement.weight_slots * plan.slot_bytes
    return {
        **provenance(shlex.join(["triforce", *sys.argv[1:]])),
        "shape": settings.shape,
        "weights": "random",
        "dtype": str(running.dtype).removeprefix("torch."),
        "bits_per_number": bits_per_number(running.models),
        "context": settings.context,
        "link": {
            "emulated": link.emulated,
            "bandwidth_gb_per_s": link.bandwidth and link.bandwidth / 1e9,
            "copy_bytes": link.copy_bytes,
        },
        "memory": {
            "device_budget_bytes": runtime.memory.limit_bytes,
            "streaming_bytes": streaming,
            "host_pinned_bytes": runtime.host.pinned_bytes,
            "host_pageable_bytes": runtime.host.pageable_bytes,
        },
        "placement": {
            "layers": len(plan.layers),
            "streamed_weight_layers": len(placement.streamed_layers),
            "kv_blocks": plan.kv.blocks,
            "resident_kv_blocks": plan.kv.resident,
            "block_tokens": plan.kv.shape.block_tokens,
            "block_bytes": plan.kv.shape.block_bytes,
        },
    }


def print_rows(about: dict[str, Any], rows: Sequence[Row]) -> None:
    """Print tables in Markdown, of figures and of floors, the rate of decoding first.

    A ratio is the median divided by the floor.
    """
    printer, link, placement = Printer(), about["link"], about["placement"]
    kind = "EMULATED link" if link["emulated"] else "PCIe"
    speed = link["bandwidth_gb_per_s"]
    resident = placement["layers"] - placement["streamed_weight_layers"]
    printer.print(
        f"{kind}{f' {speed:.2f} GB/s' if speed else ''}; {about['shape']}, random {about['dtype']} "
        f"weights, {about['context']} tokens of context, "
        f"{about['hardware']['gpu'] or about['hardware']['processor']}, torch "
        f"{about['versions']['torch']}; "
        f"{resident} of {placement['layers']} layers and {placement['resident_kv_blocks']} of "
        f"{placement['kv_blocks']} KV blocks resident, "
        f"{format_bytes(about['memory']['streaming_bytes'])} of slots\n"
    )
    # A stable sort: other tests stay in the order in which they ran.
    rows = sorted(rows, key=lambda row: _FIRST.index(row.test) if row.test in _FIRST else 2)
    printer.markdown(
        ("test", "what", "rate", "median, s", "spread"), [_figures(row) for row in rows]
    )
    if floors := [_floor(row) for row in rows if row.floor_seconds]:
        printer.print()
        printer.markdown(("test", "what", "floor, s", "ratio", "bound by"), floors)


def _figures(row: Row) -> tuple[str, ...]:
    spread = (max(row.seconds) - min(row.seconds)) / row.median
    rate = f"{row.amount / row.median:.4g} {row.unit}"
    runs = f"{len(row.seconds)} run{'s' if len(row.seconds) > 1 else ''}"
    return row.test, row.what, rate, f"{row.median:.6f}", f"{spread:.0%} of {runs}"


def _floor(row: Row) -> tuple[str, ...]:
    least = row.floor_seconds or 0.0
    return row.test, row.what, f"{least:.6f}", f"{row.median / least:.3f}", row.floor
