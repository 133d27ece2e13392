"""Changes of a plan's settings that make it faster, and that a run does not make unasked."""

from __future__ import annotations

from dataclasses import replace

from triforce_core.model.checkpoints.drafters.found import typical_head
from triforce_core.plan.simulation.acceptance_curve import drafter_acceptance
from triforce_core.plan.simulation.candidates import Candidate
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.search import choose, choose_in_format, with_best_lengths
from triforce_core.settings import ASSISTANT, AUTO, EAGLE3, INT4
from triforce_offload.errors import TriforceError

# What is advised takes this share of the seconds at most.
_LEAST_GAIN = 0.9


def faster_by_copies(plain: Candidate) -> Candidate | None:
    """Return the plan in which draft copies of all layers draft, if it is a tenth faster at least.

    A run makes such copies only if it is asked to: they take memory and time to load.
    """
    case = plain.case
    if case.method.draft_weights != AUTO or not case.hardware.asynchronous:
        return None
    method = replace(case.method, draft_weights=INT4, copy_bits=AUTO)
    best = _in_format(replace(case, method=method))
    return best if best and best.plan.placement.copied_layers and _pays(best, plain) else None


def faster_by_head(plain: Candidate) -> Candidate | None:
    """Return the plan in which a head of the usual shape drafts, an assistant for Gemma 4 and an
    EAGLE-3 head for others, if it is a tenth faster at least.

    Such heads are in files of their own, and a run does not look for them.
    """
    case = plain.case
    if case.draft != AUTO or case.draft_config is not None or case.hardware.emulated:
        return None
    for kind in (ASSISTANT, EAGLE3):
        try:
            head = typical_head(kind, case.config).config
        except TriforceError:
            continue
        curve = replace(case.curve, inner=drafter_acceptance(head))
        with_head = replace(case, draft=kind, draft_config=head, curve=curve)
        if best := _chosen(with_head):
            return best if _pays(best, plain) else None
    return None


def faster_when_dense(plain: Candidate) -> Candidate | None:
    """Return the plan in which quantised weights become dense, if it is a tenth faster at least.

    Some cards read dense weights faster than they compute with blocks. A run keeps the blocks
    unless it is asked not to.
    """
    case = replace(plain.case, pieces=None)
    quantised = "weights" in plain.case.auto and plain.case.pieces and not plain.case.split
    if not quantised or plain.memory.streams or case.layouts.nbytes > case.hardware.memory_bytes:
        return None
    best = _in_format(case)
    return best if best and _pays(best, plain) else None


def faster_on_one_gpu(plain: Candidate) -> Candidate | None:
    """Return the plan for one of several GPUs, if it is a tenth faster at least: each layer of a
    small model waits for two sums over all GPUs.
    """
    hardware = plain.case.hardware
    if hardware.gpus == 1 or hardware.emulated or plain.case.fixed:
        return None
    alone = _chosen(replace(plain.case, hardware=replace(hardware, gpus=1, other_links=())))
    return alone if alone and _pays(alone, plain) else None


def faster_with_fewer_sequences(plain: Candidate) -> Candidate | None:
    """Return the plan for half as many sequences, a quarter and so on that yields most tokens a
    second, of all sequences together, if it yields a tenth more at least.
    """
    best, count = plain, plain.case.sequences
    while (count := count // 2) and not plain.case.fixed:
        fewer = _chosen(replace(plain.case, sequences=count))
        if fewer is None or together(fewer) <= together(best):
            break
        best = fewer
    return best if together(plain) <= _LEAST_GAIN * together(best) else None


def together(chosen: Candidate) -> float:
    """Return the tokens a second of all sequences."""
    return chosen.case.sequences / chosen.seconds_per_token


def _pays(other: Candidate, plain: Candidate) -> bool:
    return other.seconds_per_token <= _LEAST_GAIN * plain.seconds_per_token


def _in_format(case: Case) -> Candidate | None:
    """Return the fastest plan in the formats of a case, None if there is none."""
    try:
        return with_best_lengths(choose_in_format(case))
    except TriforceError:
        return None


def _chosen(case: Case) -> Candidate | None:
    """Return the fastest plan, None if there is none."""
    try:
        return choose(case)
    except TriforceError:
        return None
