"""Predictions for a plan, in figures and in a sentence. Everything here is simulated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from triforce_core.plan.simulation.advice import bottleneck
from triforce_core.plan.simulation.candidates import Candidate
from triforce_core.plan.simulation.case import Case
from triforce_offload.machine.profiles import Hardware


@dataclass(frozen=True)
class Prediction:
    """Predicted figures, in seconds unless their names say otherwise. They are those of one GPU;
    all GPUs do the same at once.

    seconds_per_round: duration of refresh, draft and pass, which yield tokens_per_pass tokens
    seconds_per_pass: duration of a verify pass
    compute_seconds, wait_seconds: the parts of a pass that compute and that wait for the link
    acceptance_assumed: whether the acceptance was neither measured nor given
    floor_seconds_per_pass: bytes_per_pass divided by the link's rate, plus additional time to read
        disk_bytes_per_pass of them from files
    prefetched_bytes: those of bytes_per_pass that cross while drafting
    """

    method: str
    seconds_per_token: float
    seconds_per_round: float
    seconds_per_pass: float
    draft_seconds: float
    refresh_seconds: float
    tokens_per_pass: float
    bytes_per_pass: int
    prefetched_bytes: int
    disk_bytes_per_pass: int
    floor_seconds_per_pass: float
    compute_seconds: float
    wait_seconds: float
    retrieval_step_seconds: float
    drafter_step_seconds: float
    prefill_seconds: float
    acceptance: float
    acceptance_assumed: bool
    inner_acceptance: float
    bottleneck: str
    placement: dict[str, Any]
    memory: dict[str, Any]

    @property
    def floor_share(self) -> float:
        """Share of a pass in which its bytes cross the link, without the prefetched ones."""
        waited_for = 1 - self.prefetched_bytes / max(1, self.bytes_per_pass)
        return self.floor_seconds_per_pass * waited_for / self.seconds_per_pass

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.seconds_per_token

    @property
    def seconds_to_first_token(self) -> float:
        """The duration of the prefill, which draws the first token."""
        return self.prefill_seconds

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "tokens_per_second": self.tokens_per_second,
            "seconds_to_first_token": self.seconds_to_first_token,
            "floor_share": self.floor_share,
            "simulated": True,
        }


def predict(chosen: Candidate) -> Prediction:
    """Return the figures of a plan from the simulation of a round in the middle of decoding."""
    case, cost, plan = chosen.case, chosen.round, chosen.plan
    whole, passed = cost.seconds, cost.pass_seconds
    wait = max(0.0, passed - cost.compute_seconds)
    outer = case.acceptance(plan) if plan.budget else case.curve.inner
    return Prediction(
        method=plan.method.method,
        seconds_per_token=chosen.seconds_per_token,
        seconds_per_round=whole,
        seconds_per_pass=passed,
        draft_seconds=cost.draft_seconds,
        refresh_seconds=cost.refresh_seconds,
        tokens_per_pass=chosen.tokens_per_pass,
        bytes_per_pass=cost.link_bytes,
        prefetched_bytes=cost.prefetched_bytes,
        disk_bytes_per_pass=cost.disk_bytes,
        floor_seconds_per_pass=cost.link_seconds,
        compute_seconds=cost.compute_seconds,
        wait_seconds=wait,
        retrieval_step_seconds=chosen.step_seconds,
        drafter_step_seconds=chosen.drafter_seconds,
        prefill_seconds=chosen.prefill_seconds,
        acceptance=outer if plan.method.drafts else 0.0,
        acceptance_assumed=case.curve.assumed,
        inner_acceptance=case.curve.inner if plan.budget else 0.0,
        bottleneck=bottleneck(chosen),
        placement=_placement(chosen),
        memory=_memory(chosen),
    )


def _placement(chosen: Candidate) -> dict[str, Any]:
    memory, placement = chosen.memory, chosen.plan.placement
    return {
        **memory.layer_counts,
        "copy_bits": chosen.plan.method.bits_of_copies if placement.copied_layers else None,
        "embedding_resident": placement.embedding_resident,
        "block_tokens": memory.kv.shape.block_tokens,
        "kv_blocks": memory.kv.blocks,
        "resident_kv_blocks": placement.resident_kv_blocks + placement.reclaimed_kv_blocks,
        "reclaimed_kv_blocks": placement.reclaimed_kv_blocks,
        "processor_kv_blocks": memory.kv.by_processor,
        "budget": chosen.plan.budget,
    }


def _memory(chosen: Candidate) -> dict[str, Any]:
    """Return the bytes of each part of memory; those on the device add up to device_bytes."""
    memory, parts = chosen.memory, chosen.memory.device_parts
    return {
        "device_bytes": chosen.device_bytes,
        "device_available_bytes": chosen.case.hardware.memory_bytes,
        "host_bytes": chosen.host_bytes,
        "weights_bytes": parts["weights"],
        "expert_pools_bytes": parts["expert_pools"],
        "resident_kv_bytes": parts["kv"],
        "windows_bytes": parts["windows"],
        "states_bytes": parts["states"],
        "copy_bytes": parts["draft_copies"],
        "drafting_bytes": parts["drafting"],
        "slots_bytes": parts["slots"],
        "workspace_bytes": parts["workspace"] + chosen.case.library_bytes,
        "reclaimed_kv_bytes": memory.kv.reclaimed_bytes,
        "streamed_weights_bytes": memory.weights_link_bytes - memory.weights_file_bytes,
        "file_weights_bytes": memory.weights_file_bytes,
        "processor_bytes": memory.processor_bytes,
        "streamed_kv_bytes": memory.kv.link_bytes,
        "processor_kv_bytes": memory.kv.by_processor * memory.kv.shape.block_bytes,
    }


def links(hardware: Hardware) -> str:
    """Return a description of the links. If several links are unequal, the slowest one counts."""
    rate = hardware.stream_bytes_per_second / 1e9
    kind = "EMULATED link" if hardware.emulated else hardware.link
    if hardware.gpus == 1:
        width = "" if hardware.link_full else ", narrower than the card's own"
        return f"{kind}, {rate:.1f} GB/s{width}"
    width = "full width" if hardware.link_full else "not full width (an x8/x8 board?)"
    rates = (hardware.link_bytes_per_second, *hardware.other_links[: hardware.gpus - 1])
    slowest = min(rates)
    # Measured rates of equal links differ slightly.
    if slowest < 0.9 * max(rates):
        return f"{kind}, unequal: each waits for the slowest, {rate:.1f} GB/s"
    shared = " as host memory allows" if rate * 1e9 < slowest else ""
    return f"{hardware.gpus} x {kind}, {width}, {rate:.1f} GB/s each{shared}"


def case_dict(case: Case, model: str) -> dict[str, Any]:
    """Return a case as a dict."""
    hardware = case.hardware
    return {
        "model": model,
        "dtype": case.dtype.name,
        "context": case.context,
        "new_tokens": case.new_tokens,
        "sequences": case.sequences,
        "hardware": {
            "name": hardware.name,
            "source": hardware.source,
            "gpus": hardware.gpus,
            "link": hardware.link,
            "link_full_width": hardware.link_full,
            "link_gb_per_s": hardware.stream_bytes_per_second / 1e9,
            "memory_gb_per_s": hardware.memory_bytes_per_second / 1e9,
            "tflops": hardware.flops_per_second / 1e12,
            "emulated": hardware.emulated,
        },
    }
