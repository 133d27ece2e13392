"""The bottleneck of a plan, and suggestions to make it faster.

Settings that are "auto" are not suggested, because the planner has already chosen the best.
"""

from __future__ import annotations

from triforce_core.plan.simulation.candidates import Candidate
from triforce_core.settings import AUTO, DENSE, EXACT, STORED
from triforce_offload.units import format_bytes

# What a desktop of 2024 with two channels of DDR5-6000 measures.
_USUAL_CPU = (
    "a CPU that computes too (plan with --host-bandwidth 60GB/s --host-flops 1TFLOP/s, say)"
)


def bottleneck(chosen: Candidate) -> str:
    """Return a sentence that names the longest part of a round and what would help."""
    cost = chosen.round
    wait = max(0.0, cost.pass_seconds - cost.compute_seconds)
    parts = {"wait": wait, "draft": cost.draft_seconds, "compute": cost.compute_seconds}
    what = max(parts, key=parts.__getitem__)
    share = f"{parts[what] / cost.seconds:.0%} of a round of {cost.seconds:.3g} s"
    if what == "wait":
        return _of_the_link(chosen, share)
    if what == "draft":
        return f"drafting: {share} drafts; {_cheaper_drafts(chosen)}"
    if 2 * (cost.processor_seconds + cost.attention_seconds) > cost.compute_seconds:
        return (
            f"the CPU: {share} is computing, most of it by the CPU; more device memory "
            "or faster host memory would help"
        )
    return f"compute: {share} computes what has arrived; a faster GPU would help"


def _of_the_link(chosen: Candidate, share: str) -> str:
    hardware, cost = chosen.case.hardware, chosen.round
    waits = f"{share} waits for {format_bytes(cost.link_bytes)} to cross"
    if cost.disk_bytes:
        rate = (hardware.disk_bytes_per_second or 0.0) / 1e9
        return (
            f"the disk: {waits}, of which {format_bytes(cost.disk_bytes)} are read at {rate:.1f} "
            "GB/s; more host memory would help"
        )
    rate = hardware.stream_bytes_per_second
    # Several GPUs share the host's memory.
    slow = rate < min((hardware.link_bytes_per_second, *hardware.other_links))
    what, remedies = ("host memory", "faster host memory or ") if slow else ("the link", "")
    remedies += _fewer_bytes(chosen)
    return f"{what}: {waits} at {rate / 1e9:.1f} GB/s; {remedies} would help"


def _fewer_bytes(chosen: Candidate) -> str:
    """Return changes with which fewer bytes cross the link in a pass, most effective first."""
    case = chosen.case
    weights = chosen.memory.weights_link_bytes
    remedies = []
    if weights * 2 > chosen.round.link_bytes:
        if "weights" not in case.auto and case.weights == DENSE and case.dtype.name == "bfloat16":
            remedies.append("weights split (--weights split)")
        format_wanted = "fewer bits" if case.weights == STORED else "a Q4_K_M file, say"
        remedies.append(f"a smaller format of the weights ({format_wanted})")
    elif "kv" not in case.auto and case.kv == DENSE and case.dtype.name == "bfloat16":
        remedies.append("KV split (--kv split)")
    if "draft_tokens" in case.fixed:
        remedies.append("longer drafts")
    if case.host_compute == AUTO and not case.hardware.emulated:
        known = chosen.round.processor.known
        remedies += [] if known else [_USUAL_CPU]
    remedies.append("more device memory")
    return " or ".join(remedies)


def _cheaper_drafts(chosen: Candidate) -> str:
    """Return changes that make draft tokens cheaper. A draft model also takes memory, so it may not
    help.
    """
    case, plan = chosen.case, chosen.plan
    remedies = []
    if plan.budget and case.method.draft_weights == EXACT:
        remedies.append("drafting from fewer bits (--draft-weights auto)")
    if plan.budget and case.method.draft_kv == EXACT:
        remedies.append("a retrieval cache in 8 bits (--draft-kv auto)")
    would = f"{' or '.join([*remedies, 'faster device memory'])} would help"
    if case.draft_config is None:
        would += ", and a head (--draft eagle3, say) or a small draft model may"
    return would
