"""`triforce plan`: turn arguments into a plan and print its predicted figures."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from triforce_core.cli.plan.arguments import DEFAULT_CONTEXT, EXAMPLE_GPUS
from triforce_core.cli.plan.plot import check as check_plot
from triforce_core.cli.plan.plot import plot
from triforce_core.cli.plan.report import print_plan, print_sweep
from triforce_core.cli.plan.run_command import run_command
from triforce_core.cli.plan.sweep import sweep
from triforce_core.cli.plan.trace import trace_of
from triforce_core.cli.terminal.output import WARNING, say
from triforce_core.model.checkpoints.drafters.dflash import PADDING
from triforce_core.model.checkpoints.drafters.found import head_at, planned_head, typical_head
from triforce_core.model.checkpoints.mtp import mtp_config, publishes_head
from triforce_core.model.config import ModelConfig
from triforce_core.model.found.hub import cached
from triforce_core.model.found.names import local, without_site
from triforce_core.model.known.shapes import Shape, read_model
from triforce_core.model.parts.kept import kv_shape
from triforce_core.model.sharing.share import Pieces
from triforce_core.model.tensors import matrices
from triforce_core.plan.formats import SPLITS, element_type, splits_blocks
from triforce_core.plan.plan import Plan
from triforce_core.plan.simulation.acceptance_curve import (
    AcceptanceCurve,
    drafter_acceptance,
)
from triforce_core.plan.simulation.candidates import Candidate
from triforce_core.plan.simulation.case import Case
from triforce_core.plan.simulation.prediction import case_dict, predict
from triforce_core.plan.simulation.search import choose
from triforce_core.plan.sizes import choose_block_tokens
from triforce_core.settings import (
    AUTO,
    DEFAULT_BUDGET,
    DENSE,
    MOST_DRAFT_TOKENS,
    MTP,
    NGRAM,
    NO_DRAFTER,
    SPLIT,
    SPLIT_EXPERTS,
    STORED,
    EngineConfig,
    MethodSettings,
    of_usual_shape,
)
from triforce_offload.errors import UsageError
from triforce_offload.files import Output, check_outputs
from triforce_offload.kv.sizes import COPY_BYTES
from triforce_offload.link.trace import write_spans
from triforce_offload.machine.profiles import Hardware, named, with_link
from triforce_offload.units import format_bytes, parse_bandwidth, parse_bytes, parse_flops
from triforce_offload.weights.formats import DTYPES, Dtype

# Tables show sizes in GiB with two decimals: a size that was read there may be larger by so much.
_ROUNDED = 1 << 23


def plan(args: argparse.Namespace) -> int:
    """Make a plan and print it. Return the exit code.

    Raises UsageError, DoesNotFitError and others.
    """
    given = {"plot": args.plot, "trace": args.trace, "plan": args.save}
    read = [path for path in (args.stats, args.model, args.draft) if path and Path(path).exists()]
    check_outputs((Output(path, what) for what, path in given.items() if path), read)
    if args.plot:
        check_plot()
    if args.compare and (args.sweep or args.plot):
        raise UsageError("--compare is for one plan: leave out --sweep and --plot")
    if args.sequences > 1 and (args.save or args.plan):
        raise UsageError("--save and --plan are for plans of one sequence: leave out --sequences")
    case = _case(args)
    if args.sweep or args.plot:
        return _sweep(args, case)
    chosen = _of_file(args, case) if args.plan else choose(case)
    prediction = predict(chosen)
    compared = None
    if args.compare:
        compared = predict(choose(replace(chosen.case, fixed={"method": args.compare})))
    if args.save:
        made = chosen.plan.named(args.model, case.config, case.hardware.name)
        replace(made, predicted=prediction.as_dict()).write(args.save)
    if args.trace:
        write_spans([trace_of(chosen)], Path(args.trace), {"simulated": True, "model": args.model})
    if args.json:
        whole = case_dict(case, args.model) | prediction.as_dict()
        whole["plan"] = chosen.plan.as_dict()
        if compared:
            whole["compared"] = compared.as_dict()
            whole["speed_up"] = compared.seconds_per_token / prediction.seconds_per_token
        print(json.dumps(whole, indent=2))
    else:
        command = run_command(chosen, args)
        drafts = chosen.plan.method.drafts
        left_out = drafts and "draft" in case.auto and chosen.case.draft != MTP
        shown = chosen.case, args.model, prediction, chosen, compared, command
        print_plan(*shown, leaves_head_out=left_out)
    return 0


def _case(args: argparse.Namespace) -> Case:
    """Return the planning case for the arguments and the plan file, if one is given."""
    shape = read_model(args.model)
    config = shape.config
    if args.weights == STORED and shape.pieces is None:
        raise UsageError(f"--weights stored is for quantised models; {args.model} is not quantised")
    dtype = DTYPES[element_type(args.dtype, shape.dtype, gpu=True)]
    planned = Plan.read(args.plan) if args.plan else None
    if planned:
        # A plan for another device is accepted here: planning needs no device.
        planned.check(args.model, config, (planned.made_for or {}).get("device", ""))
    context = args.context
    if context is None:
        most = min(DEFAULT_CONTEXT, shape.published or config.positions)
        context = planned.context_tokens if planned else most
    draft = args.draft if args.draft is not None else planned.method.draft if planned else AUTO
    may_head = shape.has_head and publishes_head(config)
    has_head = draft == AUTO and may_head
    if has_head:
        draft = MTP
    if draft == MTP and not may_head:
        raise UsageError(f"--draft mtp: {args.model} has no MTP head that is known")
    if of_usual_shape(draft) and args.save:
        raise UsageError("--save needs the head that a run takes: give --draft its directory")
    draft_config, own_pieces = _drafter(draft, config)
    method = planned.method if planned else MethodSettings()
    names = ("draft_weights", "copy_bits", "draft_kv")
    asked = {name: getattr(args, name) for name in names}
    method = replace(method, **{name: value for name, value in asked.items() if value})
    weights = planned.weights if args.weights == AUTO and planned else args.weights
    kv = planned.kv if args.kv == AUTO and planned else args.kv
    autos = {"weights": weights == AUTO, "kv": kv == AUTO, "draft": has_head}
    case = Case(
        config=config,
        hardware=_hardware(args, config, dtype.itemsize, planned.gpus if planned else 1),
        context=context,
        new_tokens=args.new_tokens,
        dtype=dtype,
        curve=_curve(args, draft_config, context - args.new_tokens // 2),
        draft=draft,
        draft_config=draft_config,
        pieces=None if _dequantises(weights, shape, dtype) else shape.pieces,
        stored_drafter=shape.head_pieces if draft == MTP else own_pieces,
        split=weights if weights in SPLITS else None,
        split_kv=kv == SPLIT,
        auto=frozenset(name for name, is_auto in autos.items() if is_auto),
        method=method,
        host_compute=_host_compute(args),
        sequences=args.sequences,
    )
    if case.hardware.emulated:
        case = replace(case, dtype=DTYPES["float32"], block_bytes=COPY_BYTES)
    case.check()
    fixed = _fixed(args)
    case = replace(case, fixed=fixed)
    if args.resident_kv is not None:
        tokens = planned.block_tokens if planned else _block_tokens(case)
        fixed["resident_kv_blocks"] = _resident_blocks(args.resident_kv, context // tokens)
    return case


def _dequantises(weights: str, shape: Shape, dtype: Dtype) -> bool:
    """Return whether weights in a format are no longer those of a quantised file."""
    if weights == SPLIT:
        return not splits_blocks(shape.config, dtype, shape.pieces)
    return weights in (DENSE, SPLIT_EXPERTS)


def _host_compute(args: argparse.Namespace) -> float | str:
    """Return what the processor may compute, as an engine takes it. Raises UsageError."""
    if args.host_flops is not None and args.host_bandwidth is None and args.gpu is not None:
        raise UsageError("--host-flops needs --host-bandwidth, the rate at which weights are read")
    if args.host_bandwidth and args.host_flops is None and args.gpu is not None:
        say(
            "the CPU computes nothing in this plan; to let it, give the rate of its products too: "
            "--host-flops 1.5TFLOP/s, say",
            WARNING,
        )
    return EngineConfig().changed(host_compute=args.host_compute).host_compute


def _drafter(draft: str | Path, config: ModelConfig) -> tuple[ModelConfig | None, Pieces | None]:
    """Return the shape of the draft model or of the head, None without one, and the pieces of a
    head's matrices if its files are there. Raises UsageError or CheckpointError.
    """
    if draft in (AUTO, NGRAM, NO_DRAFTER):
        return None, None
    if draft == MTP:
        return mtp_config(config), None
    if of_usual_shape(draft):
        return typical_head(str(draft), config)
    path = local(draft) or cached(without_site(str(draft)))
    if path is not None and (raw := head_at(path)) is not None:
        return planned_head(path, raw, config)
    try:
        shape = read_model(str(draft))
    except UsageError as error:
        if str(draft).count("/") != 1:
            raise
        raise UsageError(
            f"{error}. If it is a head on the hub, download it first; --draft dflash, --draft "
            "eagle3 and --draft assistant plan one of the usual shape"
        ) from error
    found = shape.config
    if abs(found.vocab - config.vocab) > PADDING:
        raise UsageError(
            f"--draft {draft} has {found.vocab} tokens in its vocabulary and the model "
            f"{config.vocab}: a draft model needs the same tokens"
        )
    return found, shape.pieces


def _fixed(args: argparse.Namespace) -> dict[str, object]:
    """Return the values of a plan that flags fix. Raises UsageError."""
    fixed: dict[str, object] = {}
    for name, least, most in (
        ("draft_tokens", 1, MOST_DRAFT_TOKENS),
        ("inner_draft_tokens", 1, MOST_DRAFT_TOKENS),
        ("budget", 2 * MethodSettings.chunk_size, 1 << 30),
    ):
        value = getattr(args, name)
        if value is None:
            continue
        if not least <= value <= most:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} must be {least} to {most}, got {value}")
        fixed[name] = value
    if args.method:
        fixed["method"] = args.method
    return fixed


def _hardware(args: argparse.Namespace, config: ModelConfig, itemsize: int, gpus: int) -> Hardware:
    """Return the hardware to plan for. gpus: the number of GPUs without --gpus"""
    if args.gpu is None:
        from triforce_offload.machine.probe import this_machine

        hardware = this_machine(args.link_bandwidth, EXAMPLE_GPUS, matrices(config))
    else:
        hardware = named(args.gpu, itemsize)
        if args.link_bandwidth:
            rate = parse_bandwidth(args.link_bandwidth)
            hardware = replace(hardware, link_bytes_per_second=rate)
    if args.link:
        if args.link_bandwidth:
            raise UsageError("--link and --link-bandwidth both set the link; give one of them")
        slot = with_link(hardware, args.link)
        if set(args.link.split(",")) != set(slot.link.split(" and ")):
            card = f"a card for {hardware.link}: a slot of {args.link} gives it {slot.link}"
            print(f"{hardware.name} is {card}.", file=sys.stderr)
        hardware = slot
    count = args.gpus or gpus
    if len(hardware.other_links) not in (0, count - 1) and args.link:
        slots = 1 + len(hardware.other_links)
        cards = f"{count} GPU{'s' if count > 1 else ''}"
        raise UsageError(f"--link names {slots} slots, and the plan is for {cards}")
    changed: dict[str, object] = {"gpus": count}
    if hardware.emulated:
        # Emulated devices share the host's memory.
        changed["memory_bytes"] = hardware.memory_bytes // count
    if args.device_memory:
        memory = parse_bytes(args.device_memory)
        if args.gpu is not None and 0 < memory - hardware.memory_bytes < _ROUNDED:
            memory = hardware.memory_bytes
        changed["memory_bytes"] = memory
        if args.gpu is not None and memory > hardware.memory_bytes:
            raise UsageError(
                f"--device-memory {args.device_memory} is more than the "
                f"{format_bytes(hardware.memory_bytes)} of --gpu {args.gpu}"
            )
    if args.host_memory:
        changed["host_memory_bytes"] = parse_bytes(args.host_memory)
    if args.host_bandwidth:
        changed["host_bytes_per_second"] = parse_bandwidth(args.host_bandwidth)
    if args.host_flops is not None:
        changed["host_flops_per_second"] = parse_flops(args.host_flops)
    if args.disk_bandwidth:
        changed["disk_bytes_per_second"] = parse_bandwidth(args.disk_bandwidth)
    return replace(hardware, **changed)


def _curve(
    args: argparse.Namespace, draft_config: ModelConfig | None, context: int
) -> AcceptanceCurve:
    """Return the acceptance: from flags, else from a run's statistics, else the defaults.

    context: the context length in tokens
    """
    curve = AcceptanceCurve()
    if args.stats:
        # A measured acceptance is assumed to hold at the planned context length.
        measured = AcceptanceCurve.measured(args.stats)
        if measured == curve:
            say(f"{args.stats} holds no acceptance of drafts: it is assumed", WARNING)
        curve = replace(measured, context=context)
    if draft_config is not None and not args.stats:
        curve = replace(curve, inner=drafter_acceptance(draft_config))
    if args.acceptance is not None:
        # The given acceptance holds for --budget, or else for the engine's default budget.
        budget = args.budget if args.budget else DEFAULT_BUDGET
        curve = replace(curve, outer=args.acceptance, budget=budget, context=context, assumed=False)
    if args.inner_acceptance is not None:
        curve = replace(curve, inner=args.inner_acceptance, assumed=False)
    return curve


def _block_tokens(case: Case) -> int:
    token_bytes = kv_shape(case.rank, 1, case.dtype).token_bytes
    return choose_block_tokens(token_bytes, case.context, case.block_bytes)


def _resident_blocks(text: str, layer_blocks: int) -> int:
    """Parse `--resident-kv`: a number of blocks, or of layers as in 9layers. Raises UsageError.

    layer_blocks: the number of blocks of one layer
    """
    digits = text.removesuffix("layers")
    if not digits.isdigit():
        raise UsageError(f"--resident-kv takes blocks, or layers like 9layers, got {text!r}")
    if digits == text:
        return int(digits)
    return int(digits) * layer_blocks


def _of_file(args: argparse.Namespace, case: Case) -> Candidate:
    """Return the plan of a file, with the changes that flags make."""
    planned = Plan.read(args.plan)
    fixed: dict[str, object] = asdict(planned.placement) | {
        "method": planned.method.method,
        "block_tokens": planned.block_tokens,
    }
    if planned.budget:
        fixed["budget"] = planned.budget
    for name in ("draft_tokens", "inner_draft_tokens"):
        if (length := getattr(planned.method, name)) != AUTO:
            fixed[name] = length
    if "resident_kv_blocks" in case.fixed:
        del fixed["reclaimed_kv_blocks"]
    if args.host_compute != AUTO:
        # Pools have the place of experts that are on the device without them.
        pools = planned.placement.expert_slots > 0
        changed = asdict(planned.placement) if pools else ("processor_layers", "processor_kv")
        for name in changed:
            fixed.pop(name, None)
    return choose(replace(case, fixed=fixed | case.fixed))


def _sweep(args: argparse.Namespace, case: Case) -> int:
    kind = args.sweep or "context"
    rows = sweep(case, kind, args.context)
    if args.plot:
        plot(rows, kind, args.model, Path(args.plot))
        say(f"written to {args.plot}")
    if args.json:
        print(json.dumps(case_dict(case, args.model) | {"sweep": kind, "rows": rows}, indent=2))
    else:
        print_sweep(case, args.model, kind, rows)
    return 0
