"""`triforce generate`: from arguments to streamed text."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace

from offload.errors import UsageError
from offload.files import Output, check_outputs
from offload.memory.device import device_name
from triforce_core.cli.options import engine_config, given
from triforce_core.cli.output import TextOutput, say
from triforce_core.cli.prompt import read_prompt
from triforce_core.cli.report import (
    LEVEL_LEGEND,
    ProgressBars,
    colored,
    print_run,
    takes_colors,
)
from triforce_core.cli.signals import Stop, exit_code
from triforce_core.engine import Engine, check_context
from triforce_core.loading import OpenModel, open_device
from triforce_core.params import SamplingParams
from triforce_core.planner.plan import Plan
from triforce_core.settings import EngineConfig, MethodSettings
from triforce_core.stream import Completion

# A run that differs from its plan by this factor says so.
_FAR = 2.0


def generate(args: argparse.Namespace) -> int:
    """Loads the model, streams the text to stdout and reports on stderr. Returns the exit code."""
    _check_outputs(args)
    prompt = read_prompt(args)
    params = SamplingParams(**given(args, SamplingParams))
    plan = _planned(args)
    config = engine_config(args, plan and plan.config(EngineConfig()))
    _say_what_has_no_effect(args, config)
    with ExitStack() as stack:
        bars = stack.enter_context(ProgressBars(show=not args.quiet))
        stop = stack.enter_context(Stop(bars.stop).listening())
        model = stack.enter_context(OpenModel.at(args.model))
        if model.tokenizer is None:
            raise UsageError(f"{model.checkpoint.path} has no tokenizer")
        if plan is not None:
            device = device_name(open_device(config.machine.device))
            plan.check(model.name, model.checkpoint.config, device)
        tokenizer = model.tokenizer
        token_ids = tokenizer.chat(prompt) if args.chat else tokenizer.encode(prompt)
        new = params.max_new_tokens
        check_context(len(token_ids), new, model.checkpoint.config.positions, "the model has")
        asked = given(args, EngineConfig).get("max_context")
        if asked is not None:
            check_context(len(token_ids), new, asked, "--ctx-size gives")
        if args.color_levels and not args.quiet and takes_colors(sys.stderr):
            say(LEVEL_LEGEND)
        config = replace(config, max_context=asked or len(token_ids) + new)
        engine = stack.enter_context(Engine.from_pretrained(model, config, progress=bars.update))
        model.close()
        return _stream(engine, token_ids, params, bars, stop, plan, args)


def _stream(
    engine: Engine,
    token_ids: list[int],
    params: SamplingParams,
    bars: ProgressBars,
    stop: Stop,
    plan: Plan | None,
    args: argparse.Namespace,
) -> int:
    if not args.quiet:
        say(f"plan: {engine.plan_line}")
    stream, output = engine.stream(token_ids, params), TextOutput()
    stop.end = stream.interrupt
    colors = args.color_levels and takes_colors(sys.stdout)
    try:
        for piece in stream.pieces():
            # The text owns the terminal from its first piece on.
            with suppress(OSError):
                bars.stop()
            if not output.write(colored(piece) if colors else piece.text):
                stream.interrupt()
    finally:
        with suppress(OSError):
            bars.stop()
        if stream.ended:
            _report(stream.result, output, args)
            _say_if_planned_otherwise(plan, engine, stream.result, args)
    if stop.number is not None and stream.result.finish_reason == "interrupted":
        return exit_code(stop.number)
    return output.code


def _check_outputs(args: argparse.Namespace) -> None:
    """Raises UsageError, before anything is loaded, for what could not be written."""
    outputs = {"stats": args.stats, "trace": given(args, EngineConfig).get("trace")}
    read = [path for path in (args.prompt_file, args.plan) if path not in (None, "-")]
    check_outputs((Output(path, what) for what, path in outputs.items() if path is not None), read)
    if sys.stdout is None and args.stats is None:
        raise UsageError("standard output is closed: the text would go nowhere (--stats keeps it)")


def _say_what_has_no_effect(args: argparse.Namespace, config: EngineConfig) -> None:
    names = config.method.without_effect(given(args, MethodSettings))
    if names and not args.quiet:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        say(f"triforce: no effect with --method {config.method.method}: {flags}")


def _say_if_planned_otherwise(
    plan: Plan | None, engine: Engine, result: Completion, args: argparse.Namespace
) -> None:
    """What a plan predicts by rates that a busy machine gave is far off."""
    predicted = plan and plan.predicted and plan.predicted.get("seconds_per_token")
    measured = result.stats["seconds_per_token"]
    if args.quiet or not predicted or not measured or engine.plan != plan.as_run(engine.plan):
        return
    if not 1 / _FAR < measured / predicted < _FAR:
        say(
            f"triforce: the plan predicts {predicted:.3g} s a token, and {measured:.3g} were "
            "measured; if its rates were measured on a busy machine, `triforce env --probe` "
            "forgets them"
        )


def _planned(args: argparse.Namespace) -> Plan | None:
    """The plan of a file, if one is given. Raises UsageError."""
    blocks = args.resident_kv_blocks
    if args.plan is None:
        if blocks is not None:
            raise UsageError("--resident-kv-blocks changes a plan; give one with --plan")
        return None
    plan = Plan.read(args.plan)
    if blocks is not None:
        plan = replace(plan, placement=plan.placement.with_resident_blocks(blocks))
    return plan


def _report(result: Completion, output: TextOutput, args: argparse.Namespace) -> None:
    """What follows the text. Raises OutputError if the stats cannot be written."""
    if result.text and not result.text.endswith("\n"):
        output.write("\n")
    kept = "--stats would have kept it"
    if args.stats is not None:
        # First of all: standard error may have gone the way of standard output.
        stats = json.dumps(result.stats, indent=2, ensure_ascii=False) + "\n"
        Output(args.stats, "stats").write(stats)
        kept = "what was there is lost" if args.stats == "-" else f"{args.stats} has it whole"
    if output.why:
        say(f"triforce: {output.why}; {kept}")
    elif output.escaped:
        say(
            f"triforce: standard output is {sys.stdout.encoding}, which lacks characters of the "
            f"text: they were written as escapes; {kept}"
        )
    if not args.quiet:
        with suppress(OSError):
            print_run(result.stats)
