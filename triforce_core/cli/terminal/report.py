"""How a run appears in a terminal: coloured text, and a table on stderr."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TextIO

from triforce_core.cli.terminal.console import Printer
from triforce_core.cli.terminal.output import logs_json, say
from triforce_core.requests.stats import LEAST_EXAMINED
from triforce_core.requests.stream import Piece
from triforce_offload.units import format_bytes

_COLORS = {"accepted": "32", "corrected": "33", "bonus": "36"}
_RESET = "\x1b[0m"
# How a text ended, by its finish_reason.
ENDS = {
    "stop": "the text ended",
    "length": "stopped at the limit of tokens",
    "interrupted": "interrupted",
    "error": "stopped by an error",
}


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
    """Print a table: the speed, then what was resident, what streamed and the use of the link.

    With JSON logging, write all statistics instead.
    """
    if logs_json():
        say("the run has ended", stats=stats)
        return
    memory, seconds = stats["memory"], stats["seconds"]
    rows = [
        *_speed(stats),
        (
            "model",
            f"{Path(stats['model']).name} ({stats['dtype']}, {stats['device']}), loaded in "
            f"{seconds['load']:.2f} s",
        ),
        ("weights", _weights(stats["placement"])),
        ("KV cache", _kv_cache(stats["placement"])),
        (
            "memory",
            f"device: at most {format_bytes(memory['device_peak_bytes'])} of "
            f"{format_bytes(memory['device_budget_bytes'])}; host: "
            f"{format_bytes(memory['host_bytes'])}",
        ),
        ("drafting", _levels(stats)),
        ("seed", str(stats["seed"])),
    ]
    if pools := stats["experts"]:
        rows.append(("experts", _pools(pools)))
    if crossed := _link(stats):
        rows.append(("link", crossed))
    for rank, other in enumerate(stats.get("ranks", [])):
        if rank:
            text = (
                f"{format_bytes(other['bytes_to_device'])} over its link; device: at most "
                f"{format_bytes(other['device_peak_bytes'])} of "
                f"{format_bytes(other['device_budget_bytes'])}"
            )
            rows.append((f"rank {rank}", text))
    Printer(stderr=True).table(("", ""), rows)


def _speed(stats: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows that a reader looks for first."""
    seconds, rows = stats["seconds"], []
    passes = ""
    if per_token := stats["seconds_per_token"]:
        rows.append(("speed", f"{1 / per_token:.2f} tokens/s ({per_token:.4f} s a token)"))
        passes = f", {_count(stats['passes'], 'pass')} of {stats['tokens_per_pass']:.2f} tokens"
    ended = ENDS.get(stats["finish_reason"], stats["finish_reason"])
    if not stats["new_tokens"] and stats["finish_reason"] in ("interrupted", "error"):
        prompt = _count(stats["prompt_tokens"], "token")
        said = f"{ended} after {seconds['prefill']:.2f} s, before the first new token"
        return [("prompt", f"{prompt}; {said}")]
    return [
        *rows,
        ("time to first token", f"{seconds['prefill']:.2f} s of prefill ({_prefilled(stats)})"),
        ("new tokens", f"{stats['new_tokens']} in {seconds['decode']:.2f} s{passes}; {ended}"),
    ]


def _weights(placement: dict[str, Any]) -> str:
    resident, layers = placement["resident_weight_layers"], placement["layers"]
    by_processor = placement["processor_layers"]
    text = f"{resident} of {layers} layers resident, {layers - resident - by_processor} streamed"
    if by_processor:
        text += f", {by_processor} computed by the CPU"
    if split := placement["split_layers"]:
        text += f"; of {split} layers only the low bits stream"
    if apart := placement["expert_layers"]:
        text += f"; of {apart} layers all but the experts are resident"
    if in_files := placement["file_layers"]:
        text += f"; {in_files} layers are read from disk in each pass"
    return text


def _pools(pools: dict[str, Any]) -> str:
    text = f"{pools['slots']} of each layer also on the device"
    if chosen := pools["found"] + pools["missing"]:
        text += f", which had {pools['found'] / chosen:.0%} of those that tokens chose"
    return text


def _kv_cache(placement: dict[str, Any]) -> str:
    blocks, resident = placement["kv_blocks"], placement["resident_kv_blocks"]
    if not blocks:
        return "all on the device"
    attended = placement["processor_kv_blocks"]
    by_processor = f", {attended} left to the CPU" if attended else ""
    return (
        f"{resident} of {blocks} blocks resident, {blocks - resident - attended} streamed"
        f"{by_processor}; {placement['block_tokens']} tokens a block, and the newest tokens on the "
        "device"
    )


def _link(stats: dict[str, Any]) -> str:
    """Describe the traffic over the link during decoding. An idle emulated link gives ""."""
    link = stats["link"]
    kind = "EMULATED on this machine's memory" if link["emulated"] else "PCIe"
    if not link["floor_seconds_per_pass"]:
        return "" if link["emulated"] else f"{kind}: nothing crossed it during decoding"
    share = link["floor_seconds_per_pass"] * stats["passes"] / stats["seconds"]["decode"]
    return (
        f"{kind}: {format_bytes(link['bytes_to_device'])} to the device at "
        f"{link['bandwidth_gb_per_s']:.2f} GB/s; busy for {share:.0%} of decoding"
    )


def _prefilled(stats: dict[str, Any]) -> str:
    """Describe how many prompt tokens were prefilled and how many were reused."""
    reused = stats["reused_tokens"]
    prefilled = _count(stats["prompt_tokens"] - reused, "token")
    return f"{prefilled}, {reused} more reused" if reused else prefilled


def _count(number: int, what: str) -> str:
    """Return a number of things: 1 pass, 2 passes."""
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number} {what}{ending}"


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
    text = " > ".join(stats["levels"])
    if cache:
        text += f"; retrieval cache of {cache['budget_tokens']} tokens"
    for level, mean in (("target", drafted["mean"]), ("retrieval", drafted["inner_mean"])):
        if accepted := accepted_drafts(stats, level):
            text += f"; {level} accepts {accepted}, in drafts of {mean:.1f}"
    if drafted["trees"]:
        siblings = _count(drafted["from_siblings"], "token")
        text += f"; {_count(drafted['trees'], 'draft')} branched, {siblings} of younger branches"
    return text
