"""Hardware as a plan sees it: a card named in `data/gpus.toml`, or measured rates."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from triforce_offload.errors import UsageError

# Bytes of a named card that a plan leaves free: the CUDA context and libraries of a process (about
# 0.5 GiB), a display, and what an allocator loses between blocks. A card of 24 GiB keeps 22.5 GiB.
RESERVED_BYTES = 3 << 29
# A whole forward reaches this share of the peak rates of a card's memory and matrix units. Memory:
# Llama 3.1 8B decodes in 5.1 ms from a CUDA graph on an H100, .88 of 3350 GB/s. Matrices: prefill
# runs at 140 of the 165 TFLOP/s of an RTX 4090 (HeadInfer, arXiv 2502.12574), .85.
RATE_SHARE = 0.85
# `int32_tops` counts a multiply-add as two operations; a shift or a bitwise operation is one.
_OPERATIONS_COUNTED = 2
# Seconds that the host takes to launch one kernel from PyTorch; the driver takes 4 to 6 us of them.
LAUNCH_SECONDS = 10e-6
# Seconds between two kernels of a CUDA graph: 3.4 us for kernels of 2.9 us ("Getting Started with
# CUDA Graphs", NVIDIA technical blog).
GRAPH_LAUNCH_SECONDS = 0.5e-6
# Seconds of an all-reduce of a few bytes over two cards without peer-to-peer: two trips through
# host memory.
ALL_REDUCE_SECONDS = 40e-6
# A processor's kernels take as long to decode a number of a matrix as to multiply it with this many
# rows: up to 5 for bfloat16, Q4_K, Q8_0 and MXFP4 in several runs of `scripts/bench host_rows`.
PRODUCT_ROWS = 5
# Rows by the same measure for split bfloat16: 8 with many rows, 11 with one.
SPLIT_ROWS = 11
# Name of the device of a machine without a GPU.
EMULATED = "emulated device (CPU)"
_LINK = re.compile(r"pcie([345])x(1|2|4|8|16)")


@dataclass(frozen=True)
class Hardware:
    """Rates that are reached in practice, not peaks. All rates are per GPU.

    name: name of the card or machine
    source: where its figures come from
    memory_bytes: device memory that a plan may use
    memory_bytes_per_second: rate at which compute reads device memory
    flops_per_second: rate of matrix products
    integer_ops_per_second: shifts, additions and bitwise operations on 32-bit integers; None if
        unknown, or if the measured rates of products include them
    launch_seconds: host time per kernel or operation; the device computes meanwhile if
        `asynchronous`
    graph_launch_seconds: time per kernel of a recorded graph
    product_seconds_per_byte: seconds per byte of a matrix for each measured number of rows that it
        is multiplied with, in rising order; empty if not measured
    attend_bytes_per_second, attend_flops_per_second: measured rates of attention
    decode_seconds_per_number: time to decode one number of KV or of weights that are not dense, on
        a processor
    multiplies_stored: whether its kernels multiply by weights that are not dense, without decoding
        them first
    all_reduce_seconds: time of the smallest all-reduce over GPUs
    all_reduce_bytes_per_second: rate of a large all-reduce; None to use the link's rate
    link: name of the link, e.g. "pcie4x16"
    link_full: whether the link has all lanes of the card
    gpus: number of GPUs
    other_links: bytes per second of the links of GPUs after the first; empty if they equal the
        first
    host_memory_bytes, host_bytes_per_second: size and rate of host memory, which links and the
        processor share; None if unknown
    processor_bytes_per_second, host_flops_per_second: rate at which the processor's products read
        weights in host memory, and their rate with many rows; None if unknown. The first is that
        of host memory if only that is known
    disk_bytes_per_second: rate at which passes read from files; None if they may not
    """

    name: str
    source: str
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: float
    link: str
    link_bytes_per_second: float
    integer_ops_per_second: float | None = None
    product_seconds_per_byte: tuple[tuple[int, float], ...] = ()
    attend_bytes_per_second: float | None = None
    attend_flops_per_second: float | None = None
    decode_seconds_per_number: float = 0.0
    multiplies_stored: bool = False
    launch_seconds: float = LAUNCH_SECONDS
    graph_launch_seconds: float = GRAPH_LAUNCH_SECONDS
    asynchronous: bool = True
    gpus: int = 1
    all_reduce_seconds: float = ALL_REDUCE_SECONDS
    all_reduce_bytes_per_second: float | None = None
    link_full: bool = True
    other_links: tuple[float, ...] = ()
    host_memory_bytes: int | None = None
    host_bytes_per_second: float | None = None
    processor_bytes_per_second: float | None = None
    host_flops_per_second: float | None = None
    disk_bytes_per_second: float | None = None

    @property
    def stream_bytes_per_second(self) -> float:
        """Rate of each GPU's link while all GPUs stream. The GPUs share the rate of host memory and
        wait for the slowest link, since each has an equal share of the model.
        """
        slowest = min((self.link_bytes_per_second, *self.other_links[: self.gpus - 1]))
        if self.host_bytes_per_second is None:
            return slowest
        return min(slowest, self.host_bytes_per_second / self.gpus)

    @property
    def emulated(self) -> bool:
        return not self.asynchronous


def named(name: str, itemsize: int = 2) -> Hardware:
    """Return a card of `data/gpus.toml`. itemsize: bytes per number that it computes with

    Raises UsageError, with the closest names, for an unknown name.
    """
    table = _table()
    cards = gpu_names()
    name = next((card for card in cards if plain_name(card) == plain_name(name)), name)
    if name not in cards:
        raise UsageError(
            f"GPU {name!r} is not known; {nearest(name, cards)} (`triforce plan --help` names all)"
        )
    card = table[name]
    tflops = card["fp16_tflops" if itemsize <= 2 else "fp32_tflops"]
    return Hardware(
        name=name,
        source=card["source"],
        memory_bytes=(card["memory_mib"] << 20) - RESERVED_BYTES,
        memory_bytes_per_second=card["memory_gb_per_s"] * 1e9 * RATE_SHARE,
        flops_per_second=tflops * 1e12 * RATE_SHARE,
        integer_ops_per_second=integer_rate(name),
        link=card["link"],
        link_bytes_per_second=link_rate(card["link"]),
    )


def known(name: str, itemsize: int, link_bytes_per_second: float | None) -> Hardware | None:
    """Return the rates of a card by its name as the driver has it; None if it is not in the table.

    link_bytes_per_second: as measured on this machine; by the card's own link if None
    """
    card = next((card for card in gpu_names() if same_card(card, name)), None)
    if card is None:
        return None
    hardware = named(card, itemsize)
    rate = link_bytes_per_second or hardware.link_bytes_per_second
    return replace(hardware, link_bytes_per_second=rate)


def integer_rate(name: str) -> float | None:
    """Return Hardware.integer_ops_per_second of a card by its name, or by the name its driver
    reports; None if the table does not have it.
    """
    card = next((card for card in gpu_names() if same_card(card, name)), None)
    if card is None:
        return None
    return _table()[card]["int32_tops"] * 1e12 / _OPERATIONS_COUNTED * RATE_SHARE


def plain_name(card: str) -> str:
    """Return the common part of "RTX 4090", "rtx4090" and "NVIDIA GeForce RTX 4090"."""
    return re.sub(r"nvidia|geforce|generation|[\s_-]", "", card.lower())


def same_card(name: str, other: str) -> bool:
    """Return whether two names may be of one kind of card, e.g. "h100" and "NVIDIA H100 80GB HBM3".
    Memory size and slot do not matter; "Ti", "Super" and the like do.
    """
    kinds = sorted((re.sub(r"-\d+gb$", "", each.lower()) for each in (name, other)), key=len)
    short, long = map(plain_name, kinds)
    rest = long.removeprefix(short)
    return long.startswith(short) and re.fullmatch(r"(\d+gb|pcie|sxm|nvl|hbm).*|", rest) is not None


def gpu_names() -> tuple[str, ...]:
    return tuple(name for name in _table() if name != "link")


def with_link(hardware: Hardware, link: str) -> Hardware:
    """Return the card in a slot such as "pcie4x8": the link takes the lower generation and the
    fewer lanes of slot and card. A list gives each of several cards its own slot:
    "pcie4x16,pcie4x4".

    Raises UsageError.
    """
    card_generation, card_lanes = parse_link(hardware.link)
    reached = []
    for slot in link.split(","):
        generation, lanes = parse_link(slot)
        reached.append(f"pcie{min(generation, card_generation)}x{min(lanes, card_lanes)}")
    first, *others = reached
    return replace(
        hardware,
        link=" and ".join(dict.fromkeys(reached)),
        link_bytes_per_second=link_rate(first),
        link_full=set(reached) == {hardware.link},
        other_links=tuple(map(link_rate, others)),
    )


def link_rate(link: str) -> float:
    """Return bytes per second of pinned copies to the device over "pcie4x16". Raises UsageError."""
    generation, lanes = parse_link(link)
    figures = _table()["link"]
    return figures["lane_gb_per_s"][str(generation)] * lanes * 1e9 * figures["pinned_share"]


def parse_link(link: str) -> tuple[int, int]:
    """Return generation and lanes of "pcie4x16". Raises UsageError."""
    match = _LINK.fullmatch(link)
    if match is None:
        raise UsageError(
            f"{link!r} is not a link; write it like pcie4x16 (generation 3 to 5, lanes 1 to 16)"
        )
    return int(match[1]), int(match[2])


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a phrase with the known names that a user may have meant."""
    close = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.4)
    return f"nearest: {', '.join(close)}" if close else "nothing known is like it"


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("data").joinpath("gpus.toml").read_text("utf-8"))
