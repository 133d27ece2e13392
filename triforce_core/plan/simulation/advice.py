"""The bottleneck of a plan, and suggestions to make it faster.

Settings that are "auto" are not suggested, because the planner has already chosen the best.
"""

from __future__ import annotations

from triforce_core.plan.simulation.candidates import Candidate
from triforce_core.settings import AUTO, DENSE, EXACT, STORED
from triforce_offload.units import format_bytes


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
        return f"drafting: {share} drafts; {_cheaper_drafts(chosen)} would help"
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
    rate = hardware.stream_bytes_per_second / 1e9
    return f"the link: {waits} at {rate:.1f} GB/s; {_fewer_bytes(chosen)} would help"


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
        remedies += [] if known else ["a CPU that computes too (--host-bandwidth and --host-flops)"]
    remedies.append("more device memory")
    return " or ".join(remedies)


def _cheaper_drafts(chosen: Candidate) -> str:
    """Return changes that make draft tokens cheaper."""
    case, plan = chosen.case, chosen.plan
    remedies = []
    if plan.budget and case.method.draft_weights == EXACT:
        remedies.append("drafting from fewer bits (--draft-weights auto)")
    if plan.budget and case.method.draft_kv == EXACT:
        remedies.append("a retrieval cache in 8 bits (--draft-kv auto)")
    if case.draft_config is None:
        remedies.append("a small draft model (--draft MODEL)")
    return " or ".join([*remedies, "faster device memory"])
