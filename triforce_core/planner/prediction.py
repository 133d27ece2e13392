"""What a plan is predicted to do, in figures and in a sentence. Everything here is simulated."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from offload.machine.profiles import Hardware
from offload.units import format_bytes
from triforce_core.planner.candidates import Candidate, Case
from triforce_core.planner.published import Published


@dataclass(frozen=True)
class Prediction:
    """Seconds unless named otherwise; of one GPU, all of which do the same at once.

    seconds_per_round: refresh, draft and pass, which give tokens_per_pass tokens
    seconds_per_pass: of a verifying pass; of it compute_seconds compute and wait_seconds wait for
        the link
    floor_seconds_per_pass: bytes_per_pass over the link's rate
    """

    method: str
    seconds_per_token: float
    seconds_per_round: float
    seconds_per_pass: float
    draft_seconds: float
    refresh_seconds: float
    tokens_per_pass: float
    bytes_per_pass: int
    floor_seconds_per_pass: float
    compute_seconds: float
    wait_seconds: float
    retrieval_step_seconds: float
    drafter_step_seconds: float
    prefill_seconds: float
    acceptance: float
    inner_acceptance: float
    bottleneck: str
    placement: dict[str, Any]
    memory: dict[str, Any]

    @property
    def floor_share(self) -> float:
        """Of the time of a pass, what its bytes need over the link."""
        return self.floor_seconds_per_pass / self.seconds_per_pass

    @property
    def seconds_to_first_token(self) -> float:
        """Prefill draws the first token."""
        return self.prefill_seconds

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "seconds_to_first_token": self.seconds_to_first_token,
            "floor_share": self.floor_share,
            "simulated": True,
        }


def predict(one: Candidate) -> Prediction:
    """The figures of a plan, by the simulation of a round in the middle of decoding."""
    case, turn, plan, demand = one.case, one.round, one.plan, one.demand
    whole = turn.simulate().seconds
    passed = whole - turn.draft_seconds - turn.refresh_seconds
    wait = max(0.0, passed - turn.compute_seconds)
    outer = case.acceptance(plan.budget) if plan.budget else case.curve.inner
    prefill = one.prefill_seconds
    layers, blocks = demand.layers, demand.kv_blocks
    resident = min(plan.resident_kv_blocks, blocks)
    return Prediction(
        method=plan.method,
        seconds_per_token=whole / one.tokens_per_pass,
        seconds_per_round=whole,
        seconds_per_pass=passed,
        draft_seconds=turn.draft_seconds,
        refresh_seconds=turn.refresh_seconds,
        tokens_per_pass=one.tokens_per_pass,
        bytes_per_pass=turn.link_bytes,
        floor_seconds_per_pass=turn.link_seconds,
        compute_seconds=turn.compute_seconds,
        wait_seconds=wait,
        retrieval_step_seconds=one.step_seconds,
        drafter_step_seconds=one.drafter_seconds,
        prefill_seconds=prefill,
        acceptance=0.0 if plan.method == "autoregressive" else outer,
        inner_acceptance=case.curve.inner if plan.budget else 0.0,
        bottleneck=_bottleneck(
            case.hardware, whole, wait, turn.draft_seconds, turn.compute_seconds, turn.link_bytes
        ),
        placement={
            "layers": layers,
            "resident_weight_layers": layers - len(plan.streamed_layers),
            "embedding_resident": plan.embedding_resident,
            "block_tokens": demand.kv.block_tokens,
            "kv_blocks": blocks,
            "resident_kv_blocks": resident,
            "budget": plan.budget,
        },
        memory={
            "device_bytes": one.device_bytes,
            "device_available_bytes": case.hardware.memory_bytes,
            "host_bytes": one.host_bytes,
            "weights_bytes": (layers - len(plan.streamed_layers)) * demand.layer_bytes
            + demand.head_bytes
            + (demand.embedding_bytes if plan.embedding_resident else 0),
            "resident_kv_bytes": resident * demand.kv.block_bytes
            + demand.kv.tail_bytes(demand.max_pass_tokens),
            "drafting_bytes": demand.drafting_bytes,
            "slots_bytes": plan.weight_slots * demand.layer_bytes
            + (plan.kv_slots + plan.staging_slots) * demand.kv.block_bytes,
            "workspace_bytes": demand.workspace_bytes,
            "streamed_weights_bytes": len(plan.streamed_layers) * demand.layer_bytes,
            "streamed_kv_bytes": (blocks - resident) * demand.kv.block_bytes,
        },
    )


def predict_published(one: Published) -> Prediction:
    """The same of the published code's own way."""
    case, whole = one.case, one.pass_seconds + one.draft_seconds
    layers = case.config.layers
    wait = max(0.0, one.pass_seconds - one.compute_seconds)
    return Prediction(
        method="triforce" if one.gamma else "autoregressive",
        seconds_per_token=one.seconds_per_token,
        seconds_per_round=whole,
        seconds_per_pass=one.pass_seconds,
        draft_seconds=one.draft_seconds,
        refresh_seconds=0.0,
        tokens_per_pass=one.tokens_per_pass,
        bytes_per_pass=one.link_bytes,
        floor_seconds_per_pass=one.link_seconds,
        compute_seconds=one.compute_seconds,
        wait_seconds=wait,
        retrieval_step_seconds=one.step_seconds if one.gamma else 0.0,
        drafter_step_seconds=one.drafter_seconds if one.gamma else 0.0,
        prefill_seconds=one.prefill_seconds,
        acceptance=case.curve.outer if one.gamma else 0.0,
        inner_acceptance=case.curve.inner if one.gamma else 0.0,
        bottleneck=_bottleneck(
            case.hardware, whole, wait, one.draft_seconds, one.compute_seconds, one.link_bytes
        ),
        placement={
            "layers": layers,
            "resident_weight_layers": layers,
            "embedding_resident": True,
            "resident_kv_layers": one.resident_layers,
            "budget": one.budget if one.gamma else 0,
        },
        memory={
            "device_bytes": one.device_bytes,
            "device_available_bytes": case.hardware.memory_bytes,
            "host_bytes": one.host_bytes,
        },
    )


def links(hardware: Hardware) -> str:
    """The links in words, and what two of them mean."""
    rate = hardware.stream_bytes_per_second / 1e9
    kind = "EMULATED link" if hardware.emulated else hardware.link
    if hardware.gpus == 1:
        width = "" if hardware.link_full else ", narrower than the card's own"
        return f"{kind}, {rate:.1f} GB/s{width}"
    width = "both full width" if hardware.link_full else "neither full width (an x8/x8 board?)"
    shared = " as host memory allows" if rate * 1e9 < hardware.link_bytes_per_second else ""
    return f"2 x {kind}, {width}, {rate:.1f} GB/s each{shared}"


def case_dict(case: Case, model: str) -> dict[str, Any]:
    """What was planned for."""
    hardware = case.hardware
    return {
        "model": model,
        "dtype": case.dtype.name,
        "context": case.context,
        "new_tokens": case.new_tokens,
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


def _bottleneck(
    hardware: Hardware, whole: float, wait: float, draft: float, compute: float, nbytes: int
) -> str:
    """What most of a round goes to, in a sentence."""
    what, seconds = max(
        (("wait", wait), ("draft", draft), ("compute", compute)), key=lambda pair: pair[1]
    )
    share = f"{seconds / whole:.0%} of a round of {whole:.3g} s"
    if what == "wait":
        rate = hardware.stream_bytes_per_second / 1e9
        return (
            f"the link: {share} waits for {format_bytes(nbytes)} to cross at {rate:.1f} GB/s; "
            "more resident KV, longer drafts or a wider link would help"
        )
    if what == "draft":
        return (
            f"drafting: {share} goes to it; a drafter that holds more often or faster device "
            "memory would help"
        )
    return f"compute: {share} computes what has arrived; a faster GPU would help"
