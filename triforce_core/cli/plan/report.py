"""How `triforce plan` presents a plan: the speed, the placement and the bottleneck."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triforce_core.cli.plan.run_command import on_lines
from triforce_core.cli.terminal.console import Printer, Row
from triforce_core.model.known.shapes import read_model
from triforce_core.plan.reasons import HEAD_LEFT_OUT, no_retrieval
from triforce_core.plan.simulation.alternatives import (
    faster_by_copies,
    faster_by_head,
    faster_on_one_gpu,
    faster_when_dense,
    faster_with_fewer_sequences,
    together,
)
from triforce_core.plan.simulation.candidates import Candidate
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.prediction import Prediction, links
from triforce_core.settings import ASSISTANT
from triforce_offload.units import format_bytes


def print_plan(
    case: Case,
    model: str,
    prediction: Prediction,
    chosen: Candidate,
    compared: Prediction | None,
    command: str,
    *,
    leaves_head_out: bool = False,
) -> None:
    """Print the tables of a plan to standard output.

    command: the command that runs the plan
    leaves_head_out: whether the model has an MTP head that does not draft
    """
    console = Printer()
    hardware = case.hardware
    cards = f"{hardware.gpus} x {hardware.name}" if hardware.gpus > 1 else hardware.name
    together = f"{case.sequences} sequences of " if case.sequences > 1 else ""
    console.print(
        f"SIMULATED: {model} ({_kept(case)}), {together}{case.context} tokens of context, "
        f"on {cards}; {links(hardware)}"
    )
    if hardware.source.startswith("measured"):
        console.print(f"Rates {hardware.source}; `triforce env --probe` measures them again.")
    console.table(("SIMULATED", "", ""), _figures(prediction, case))
    console.table(("what", "where", "size"), _places(prediction, hardware.gpus))
    console.print(f"Bottleneck: {prediction.bottleneck}.")
    line = chosen.plan.line(len(case.config.layers), chosen.memory.kv.blocks)
    if not chosen.plan.budget and chosen.plan.method.drafts and "method" not in case.fixed:
        line += f"; {no_retrieval(case.method, chosen.memory)}"
    if leaves_head_out:
        line += f"; {HEAD_LEFT_OUT}"
    console.print(f"Plan: {line}.")
    for text in on_lines("Run it: ", command, console.width):
        # A path that is longer than a line stays whole, so that the command can be copied.
        console.print(text, soft_wrap=True)
    if case.sequences == 1:
        console.print("It takes the prompt from standard input, or from --prompt-file FILE.")
    _say_if_beyond(console, model, case.context)
    for text in _faster(chosen):
        console.print(text)
    if compared:
        ratio = compared.seconds_per_token / prediction.seconds_per_token
        console.print(
            f"{compared.method}: {1 / compared.seconds_per_token:.2f} tokens/s "
            f"({compared.seconds_per_token:.3f} s/token); this plan is {ratio:.2f} times as fast."
        )


def _faster(chosen: Candidate) -> Iterator[str]:
    """Yield sentences about changes that make the plan faster."""
    if copies := faster_by_copies(chosen):
        nbytes = format_bytes(copies.memory.device_parts["draft_copies"])
        yield (
            f"Faster: add --draft-weights int4 for {_speed(copies)}; its copies of all layers take "
            f"{nbytes} of the device."
        )
    if head := faster_by_head(chosen):
        kind = "assistant" if head.case.draft == ASSISTANT else "EAGLE-3 head"
        yield (
            f"Faster: with an {kind}, if there is one for this model, {_speed(head)} at an "
            f"acceptance of {head.case.curve.inner}, assumed; see it with --draft "
            f"{head.case.draft}."
        )
    if dense := faster_when_dense(chosen):
        nbytes = format_bytes(dense.memory.requirements.weights_bytes)
        yield (
            f"Faster: add --weights dense for {_speed(dense)}; weights then take {nbytes} of the "
            "device."
        )
    if alone := faster_on_one_gpu(chosen):
        yield f"Faster: one of these GPUs alone gives {_speed(alone)}."
    if fewer := faster_with_fewer_sequences(chosen):
        count, all_of_them = fewer.case.sequences, chosen.case.sequences
        few = f"{count} sequences at a time give" if count > 1 else "one sequence at a time gives"
        yield (
            f"Faster: {few} {together(fewer):.1f} tokens/s together, {all_of_them} give "
            f"{together(chosen):.1f}."
        )


def _speed(chosen: Candidate) -> str:
    seconds = chosen.seconds_per_token
    return f"{1 / seconds:.1f} tokens/s ({seconds:.4f} s/token)"


def _kept(case: Case) -> str:
    """Return in what weights are kept."""
    return "as stored" if case.pieces else case.dtype.name


def _say_if_beyond(console: Printer, model: str, context: int) -> None:
    """Print a note if a context is longer than the published files allow."""
    if (published := read_model(model).published) and context > published:
        console.print(
            f"The published files declare {published:,} positions. For more, config.json needs the "
            "rope scaling (YaRN) that the authors describe."
        )


def print_sweep(case: Case, model: str, kind: str, rows: list[dict[str, Any]]) -> None:
    """Print a table of a sweep to standard output. What all rows share stands above the table."""
    console = Printer()
    places = {"context": "context", "GPUs": "gpus", "link": "link"}
    varied = {
        title: name for title, name in places.items() if len({row[name] for row in rows}) > 1
    } or {"context": "context"}
    shared = {
        "context": f", {rows[0]['context']} tokens of context",
        "GPUs": f", {rows[0]['gpus']} GPUs" if rows[0]["gpus"] > 1 else "",
        "link": f", {rows[0]['link']}",
    }
    about = "".join(text for title, text in shared.items() if title not in varied)
    if case.sequences > 1:
        about += f", the speed of one of {case.sequences} sequences"
    by = "number of GPUs" if kind == "gpus" else kind
    console.print(f"SIMULATED: {model} ({_kept(case)}) on {case.hardware.name}{about}; by {by}")
    titles = (
        *("tokens per second", "first token, s", "s a token", "s a pass", "tokens a pass"),
        *("draft", "budget"),
    )
    console.table(
        (*varied, *titles),
        [(*(str(row[name]) for name in varied.values()), *_swept(row)) for row in rows],
        keys=len(varied),
    )
    for row in rows:
        if "refused" in row:
            gpus = f"{row['gpus']} GPU{'s' if row['gpus'] > 1 else ''}"
            console.print(f"{row['context']} tokens, {gpus}, {row['link']}: {row['refused']}")
    _say_if_beyond(console, model, max(row["context"] for row in rows))


def _swept(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the figures of a row of a sweep."""
    if "refused" in row:
        return ("no plan", *[""] * 6)
    return (
        f"{1 / row['seconds_per_token']:.1f}",
        f"{row['seconds_to_first_token']:.1f}",
        f"{row['seconds_per_token']:.4f}",
        f"{row['seconds_per_pass']:.3f}",
        f"{row['tokens_per_pass']:.1f}",
        str(row["draft_tokens"]),
        str(row["budget"] or "none"),
    )


def _together(p: Prediction, sequences: int) -> list[Row]:
    """Return the speed of several sequences."""
    if sequences == 1:
        return []
    rate = sequences * p.tokens_per_second
    return [("all sequences", f"{rate:.1f} tokens/s", f"{sequences} of them, in one pass")]


def _places(prediction: Prediction, gpus: int) -> list[Row]:
    memory, placement = prediction.memory, prediction.placement
    each = " of each GPU" if gpus > 1 else ""
    layers, resident = placement["layers"], placement["resident_weight_layers"]
    in_files = placement["file_layers"]
    by_processor = placement["processor_layers"]
    streamed = layers - resident - in_files - by_processor
    apart = placement["expert_layers"]
    away = "experts" if apart == layers - resident else "weights or experts" if apart else "weights"
    blocks, kept = placement["kv_blocks"], placement["resident_kv_blocks"]
    attended = placement["processor_kv_blocks"]
    drafting = "drafting"
    if placement["budget"]:
        drafting += f", with a retrieval cache of {placement['budget']} tokens"
    bits = placement["copy_bits"]
    rows: list[Row] = [
        (what, where, format_bytes(memory[size]))
        for what, where, size in (
            (_weights_on_device(placement), "device", "weights_bytes"),
            (f"{away} of {streamed} layers", "host, streamed", "streamed_weights_bytes"),
            (f"weights of {in_files} layers", "disk, streamed", "file_weights_bytes"),
            (f"{away} of {by_processor} layers", "host, computed there", "processor_bytes"),
            (
                f"{placement['expert_slots']} experts of each of these, used last",
                *("device", "expert_pools_bytes"),
            ),
            (_kv_on_device(placement), "device", "resident_kv_bytes"),
            (f"KV: {blocks - kept - attended} blocks", "host, streamed", "streamed_kv_bytes"),
            (f"KV: {attended} blocks", "host, computed there", "processor_kv_bytes"),
            ("KV of layers with a window", "device", "windows_bytes"),
            ("states of recurrent layers", "device", "states_bytes"),
            (
                f"copies of {placement['copied_layers']} layers in {bits} bits",
                *("device", "copy_bytes"),
            ),
            (drafting, "device", "drafting_bytes"),
            ("slots for what streams", "device", "slots_bytes"),
            ("workspace of the prefill", "device", "workspace_bytes"),
        )
        if memory[size]
    ]
    available = format_bytes(memory["device_available_bytes"])
    return [
        *rows,
        None,
        (f"device{each}, of {available}", "", format_bytes(memory["device_bytes"])),
        ("host", "", format_bytes(memory["host_bytes"])),
    ]


def _weights_on_device(placement: dict[str, Any]) -> str:
    layers, resident = placement["layers"], placement["resident_weight_layers"]
    some = f"{resident} of {layers}" if resident < layers else f"all {layers}"
    parts = [f"{some} layers"] if resident else []
    parts += ["embedding"] if placement["embedding_resident"] else []
    return f"weights of {', '.join(parts)} and output" if parts else "weights of the output"


def _kv_on_device(placement: dict[str, Any]) -> str:
    blocks, kept = placement["kv_blocks"], placement["resident_kv_blocks"]
    if not blocks:
        return "KV of all tokens"
    some = f"{kept} of {blocks} blocks" if kept < blocks else f"all {blocks} blocks"
    if reclaimed := placement["reclaimed_kv_blocks"]:
        some += f" ({reclaimed} of them in memory that only the prefill needs)"
    return f"KV: {some} and the newest tokens"


def _figures(p: Prediction, case: Case) -> list[Row]:
    given = f"{p.seconds_per_token:.4f} s a token; {p.tokens_per_pass:.2f} tokens a pass"
    if p.acceptance:
        given += f" at an acceptance of {p.acceptance:.3f}" + (", assumed" * p.acceptance_assumed)
    crossing = f"{format_bytes(p.bytes_per_pass)} over the link"
    if p.prefetched_bytes:
        crossing += f", of which {format_bytes(p.prefetched_bytes)} cross during drafting"
    # The share is at the mean rate of link and disk, and may come out slightly above 1.
    busy = min(1.0, p.floor_share)
    rows: list[Row] = [
        (
            "speed of one" if case.sequences > 1 else "speed",
            f"{p.tokens_per_second:.1f} tokens/s",
            given,
        ),
        *_together(p, case.sequences),
        (
            "time to first token",
            f"{p.seconds_to_first_token:.{1 if p.seconds_to_first_token >= 0.1 else 3}f} s",
            f"prefill of {case.context - case.new_tokens} tokens",
        ),
        None,
        ("pass", f"{p.seconds_per_pass:.4f} s", f"the link is busy for {busy:.0%} of it"),
        ("  transfers", f"{p.floor_seconds_per_pass:.4f} s", crossing),
        ("  compute", f"{p.compute_seconds:.4f} s", "overlaps the transfers"),
        ("  waiting", f"{p.wait_seconds:.4f} s", "for the link"),
    ]
    if p.draft_seconds:
        step = f"a retrieval step takes {p.retrieval_step_seconds * 1e3:.1f} ms"
        if p.drafter_step_seconds:
            step += f", a token of the drafter {p.drafter_step_seconds * 1e3:.1f} ms"
        rows.append(("drafting", f"{p.draft_seconds:.4f} s", step))
    if p.refresh_seconds:
        rows.append(("refresh", f"{p.refresh_seconds:.4f} s", "of the retrieval cache"))
    return rows
