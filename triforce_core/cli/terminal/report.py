"""How a run appears in a terminal: coloured text, and a table on stderr."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from triforce_core.cli.terminal.output import logs_json, say
from triforce_core.requests.stats import LEAST_EXAMINED
from triforce_core.requests.stream import Piece
from triforce_offload.units import format_bytes

_COLORS = {"accepted": "32", "corrected": "31", "bonus": "36"}
_RESET = "\x1b[0m"


def takes_colors(stream: TextIO | None) -> bool:
    """Return whether to colour a stream: a terminal, unless NO_COLOR or FORCE_COLOR decides."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def colored(piece: Piece) -> str:
    """Return a piece of text in the terminal colour of its origin."""
    color = _COLORS.get(piece.origin)
    return f"\x1b[{color}m{piece.text}{_RESET}" if color else piece.text


LEVEL_LEGEND = " ".join(
    (
        colored(Piece("accepted from a draft,", "accepted")),
        colored(Piece("corrected by the target,", "corrected")),
        colored(Piece("bonus after a whole draft", "bonus")),
    )
)


def print_run(stats: dict[str, Any]) -> None:
    """Print a table of what was resident, what streamed, the times and the use of the link.

    With JSON logging, write all statistics instead.
    """
    if logs_json():
        say("the run has ended", stats=stats)
        return
    memory, seconds = stats["memory"], stats["seconds"]
    table = Table(show_header=False, title_justify="left")
    add = table.add_row
    add("model", f"{Path(stats['model']).name} ({stats['dtype']}, {stats['device']})")
    add("weights", _weights(stats["placement"]))
    add("KV cache", _kv_cache(stats["placement"]))
    add(
        "memory",
        f"device {format_bytes(memory['device_peak_bytes'])} at most, of "
        f"{format_bytes(memory['device_budget_bytes'])}; host {format_bytes(memory['host_bytes'])}",
    )
    add(
        "seconds",
        f"load {seconds['load']:.2f}, prefill {seconds['prefill']:.2f} ({_prefilled(stats)}), "
        f"decode {seconds['decode']:.2f} "
        f"({stats['new_tokens']} tokens, {stats['finish_reason']})",
    )
    if per_token := stats["seconds_per_token"]:
        add(
            "decode",
            f"{1 / per_token:.2f} tokens/s, {per_token:.4f} s/token, "
            f"{stats['passes']} passes of {stats['tokens_per_pass']:.2f} tokens",
        )
    add("levels", _levels(stats))
    for dropped in stats["dropped"]:
        add("dropped", _dropped(dropped))
    add("seed", str(stats["seed"]))
    if crossed := _link(stats):
        add("link", crossed)
    for rank, other in enumerate(stats.get("ranks", [])):
        if rank:
            add(
                f"rank {rank}",
                f"{format_bytes(other['bytes_to_device'])} over its link; device "
                f"{format_bytes(other['device_peak_bytes'])} at most, of "
                f"{format_bytes(other['device_budget_bytes'])}",
            )
    Console(stderr=True).print(table)


def _weights(placement: dict[str, Any]) -> str:
    resident, layers = placement["resident_weight_layers"], placement["layers"]
    text = f"{resident} of {layers} layers resident, {layers - resident} streamed"
    if split := placement["split_layers"]:
        text += f", {split} of them by their low bits alone"
    if in_files := placement["file_layers"]:
        text += f", {in_files} of them read from disk in each pass"
    return text


def _kv_cache(placement: dict[str, Any]) -> str:
    blocks, resident = placement["kv_blocks"], placement["resident_kv_blocks"]
    if not blocks:
        return "all of it on the device"
    return (
        f"{resident} of {blocks} blocks resident, {blocks - resident} streamed "
        f"({placement['block_tokens']} tokens each; newer tokens on the device)"
    )


def _link(stats: dict[str, Any]) -> str:
    """Describe the traffic over the link during decoding. An idle emulated link gives ""."""
    link = stats["link"]
    kind = "EMULATED on this machine's memory" if link["emulated"] else "PCIe"
    if not link["floor_seconds_per_pass"]:
        return "" if link["emulated"] else f"{kind}: nothing crossed it while decoding"
    share = link["floor_seconds_per_pass"] * stats["passes"] / stats["seconds"]["decode"]
    return (
        f"{kind}: {format_bytes(link['bytes_to_device'])} to the device at "
        f"{link['bandwidth_gb_per_s']:.2f} GB/s, {share:.0%} of it used while decoding"
    )


def _prefilled(stats: dict[str, Any]) -> str:
    """Describe how many prompt tokens were prefilled and how many were reused."""
    reused = stats["reused_tokens"]
    read = f"{stats['prompt_tokens'] - reused} tokens"
    return f"{read}, {reused} more reused" if reused else read


def accepted_drafts(stats: dict[str, Any], level: str = "target") -> str | None:
    """Describe the draft tokens that a level accepted: a share, a count if few, None if none."""
    share = stats["acceptance"][level]
    prefix = "" if level == "target" else "inner_"
    examined = stats["draft_tokens"][f"{prefix}examined"]
    if share is None or not examined:
        return None
    if examined < LEAST_EXAMINED:
        return f"{round(share * examined)} of {examined} draft tokens"
    return f"{share:.1%} of draft tokens"


def _levels(stats: dict[str, Any]) -> str:
    """Describe the levels, their draft lengths and their acceptance."""
    drafted, cache = stats["draft_tokens"], stats["retrieval"]
    said = " > ".join(stats["levels"])
    if cache:
        said += f" ({cache['policy']}, {cache['budget_tokens']} tokens)"
    for level, mean in (("target", drafted["mean"]), ("retrieval", drafted["inner_mean"])):
        if accepted := accepted_drafts(stats, level):
            said += f"; {level} accepts {accepted}, in drafts of {mean:.1f}"
    if drafted["trees"]:
        said += f"; {drafted['trees']} of them branched"
    return said


def _dropped(dropped: dict[str, Any]) -> str:
    """Describe a level that was dropped during the run, and the reason."""
    names = {"model": "the drafter", "mtp": "the MTP head", "retrieval": "the retrieval model"}
    what = names[dropped["level"]]
    return (
        f"{what}: its {dropped['drafts']} drafts took {dropped['seconds']:.2f} s, and "
        f"{dropped['plain_seconds']:.2f} s without them; its {format_bytes(dropped['nbytes'])} "
        "hold KV if any streams"
    )
