"""How `triforce plan` presents a plan: the placement, the times and the bottleneck."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from triforce_core.cli.plan.run_command import run_command
from triforce_core.cli.terminal.console import Printer
from triforce_core.plan.simulation.candidates import Candidate
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.prediction import Prediction, links
from triforce_core.plan.simulation.search import faster_by_copies
from triforce_offload.units import format_bytes


def print_plan(
    case: Case,
    model: str,
    prediction: Prediction,
    chosen: Candidate,
    compared: Prediction | None,
    saved: str | None,
) -> None:
    """Print the tables of a plan to standard output.

    saved: the file of the plan, if it was saved
    """
    console = _console()
    hardware = case.hardware
    cards = f"{hardware.gpus} x {hardware.name}" if hardware.gpus > 1 else hardware.name
    kept = "as stored" if case.pieces else case.dtype.name
    console.print(
        f"SIMULATED: {model} ({kept}), {case.context} tokens of context, on {cards}; "
        f"{links(hardware)}",
        highlight=False,
        soft_wrap=True,
    )
    if hardware.source.startswith("measured"):
        console.print(
            f"Rates {hardware.source}; `triforce env --probe` lets them be measured again.",
            highlight=False,
            soft_wrap=True,
        )
    console.print(_places(prediction, hardware.gpus))
    console.print(_seconds(prediction))
    console.print(f"Bottleneck: {prediction.bottleneck}.", highlight=False, soft_wrap=True)
    line = chosen.plan.line(len(case.config.layers), chosen.memory.kv.blocks)
    if case.pieces and chosen.plan.placement.streamed_layers and not chosen.plan.budget:
        line += "; no retrieval model, since weights stream and copies in 4 bits do not pay"
    console.print(f"Plan: {line}.", highlight=False, soft_wrap=True)
    command = run_command(chosen, model, saved)
    console.print(f"Run it: {command}", highlight=False, soft_wrap=True)
    if faster := faster_by_copies(chosen):
        console.print(
            "Faster: add --draft-weights int4 for "
            f"{1 / faster.seconds_per_token:.1f} tokens/s ({faster.seconds_per_token:.4f} s/token)"
            f", with copies of all layers that take {_copies(faster)} of the device.",
            highlight=False,
            soft_wrap=True,
        )
    if compared:
        ratio = compared.seconds_per_token / prediction.seconds_per_token
        console.print(
            f"{compared.method}: {1 / compared.seconds_per_token:.2f} tokens/s "
            f"({compared.seconds_per_token:.3f} s/token); this plan is {ratio:.2f} times as fast.",
            highlight=False,
            soft_wrap=True,
        )


def _copies(chosen: Candidate) -> str:
    return format_bytes(chosen.memory.device_parts["int4_copies"])


def print_sweep(case: Case, model: str, kind: str, rows: list[dict[str, Any]]) -> None:
    table = Table(
        *("context", "GPUs", "link", "tokens/s", "s/token", "s/pass", "tokens/pass"),
        *("draft", "budget", "first, s"),
    )
    for row in rows:
        where = (str(row["context"]), str(row["gpus"]), row["link"])
        if "refused" in row:
            table.add_row(*where, "refused")
            continue
        table.add_row(
            *where,
            f"{1 / row['seconds_per_token']:.1f}",
            f"{row['seconds_per_token']:.4f}",
            f"{row['seconds_per_pass']:.3f}",
            f"{row['tokens_per_pass']:.1f}",
            str(row["draft_tokens"]),
            str(row["budget"] or "none"),
            f"{row['seconds_to_first_token']:.1f}",
        )
    console = _console()
    console.print(
        f"SIMULATED: {model} ({case.dtype.name}) on {case.hardware.name}, by {kind}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table)
    for row in rows:
        if "refused" in row:
            what = f"{row['context']} tokens, {row['gpus']} GPU, {row['link']}"
            console.print(f"{what}: {row['refused']}", highlight=False, soft_wrap=True)


def _console() -> Printer:
    """Return a console; without a terminal it is wide enough for the tables."""
    console = Printer()
    return console if console.is_terminal else Printer(width=110)


def _places(prediction: Prediction, gpus: int) -> Table:
    memory, placement = prediction.memory, prediction.placement
    table = Table("what", "where", "size", title_justify="left")
    each = " of each GPU" if gpus > 1 else ""
    layers, resident = placement["layers"], placement["resident_weight_layers"]
    in_files = placement["file_layers"]
    streamed = layers - resident - in_files
    blocks, kept = placement["kv_blocks"], placement["resident_kv_blocks"]
    lent = placement["reclaimed_kv_blocks"]
    workspace = "workspace"
    if lent:
        workspace += f" of the prompt, then KV, {lent} blocks"
    for what, where, size in (
        (f"weights, {resident} of {layers} layers and ends", "device", "weights_bytes"),
        (f"weights, {streamed} layers", "host, streamed", "streamed_weights_bytes"),
        (f"weights, {in_files} layers", "disk, streamed", "file_weights_bytes"),
        (f"KV, {kept - lent} of {blocks} blocks and the tail", "device", "resident_kv_bytes"),
        (f"KV, {blocks - kept} blocks", "host, streamed", "streamed_kv_bytes"),
        ("KV of layers with a window", "device", "windows_bytes"),
        ("states of recurrent layers", "device", "states_bytes"),
        (f"{placement['int4_layers']} layers in 4 bits", "device", "int4_bytes"),
        (f"what drafts, budget {placement['budget']}", "device", "drafting_bytes"),
        ("slots", "device", "slots_bytes"),
        (workspace, "device", "workspace_bytes"),
    ):
        if memory[size]:
            table.add_row(what, where, format_bytes(memory[size]))
    table.add_section()
    available = format_bytes(memory["device_available_bytes"])
    table.add_row(f"device{each}, of {available}", "", format_bytes(memory["device_bytes"]))
    table.add_row("host", "", format_bytes(memory["host_bytes"]))
    return table


def _seconds(prediction: Prediction) -> Table:
    p = prediction
    table = Table("SIMULATED", "seconds", "", title_justify="left")
    add = table.add_row
    crossing = f"{format_bytes(p.bytes_per_pass)} over the link"
    if p.prefetched_bytes:
        crossing += f", {format_bytes(p.prefetched_bytes)} of it while drafting"
    add("pass", f"{p.seconds_per_pass:.4f}", f"the link carries for {p.floor_share:.0%} of it")
    add("  its bytes", f"{p.floor_seconds_per_pass:.4f}", crossing)
    add("  its compute", f"{p.compute_seconds:.4f}", "while the link carries")
    add("  waiting for the link", f"{p.wait_seconds:.4f}", "")
    if p.draft_seconds:
        step = f"retrieval step {p.retrieval_step_seconds * 1e3:.1f} ms"
        if p.drafter_step_seconds:
            step += f", drafter {p.drafter_step_seconds * 1e3:.1f} ms a token"
        add("drafting", f"{p.draft_seconds:.4f}", step)
    if p.refresh_seconds:
        add("refresh of the retrieval cache", f"{p.refresh_seconds:.4f}", "")
    given = f"{p.tokens_per_pass:.2f} tokens a pass"
    if p.acceptance:
        given += f" at acceptance {p.acceptance:.3f}" + (", assumed" * p.acceptance_assumed)
    add("a token", f"{p.seconds_per_token:.4f}", f"{p.tokens_per_second:.1f} tokens/s, {given}")
    add("first token", f"{p.seconds_to_first_token:.1f}", "reading the prompt")
    return table
