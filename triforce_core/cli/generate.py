"""`triforce generate`: from arguments to streamed text."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from offload.errors import UsageError
from offload.files import write_whole
from triforce_core.cli.codes import INTERRUPTED
from triforce_core.cli.options import engine_config, given
from triforce_core.cli.prompt import read_prompt
from triforce_core.cli.report import LEVEL_LEGEND, ProgressBars, colored, print_run
from triforce_core.engine import Engine, check_context
from triforce_core.loading import OpenModel
from triforce_core.params import SamplingParams
from triforce_core.planner.plan import Plan
from triforce_core.settings import EngineConfig
from triforce_core.stream import Completion


def generate(args: argparse.Namespace) -> int:
    """Loads the model, streams the text to stdout and reports on stderr. Returns the exit code."""
    prompt = read_prompt(args)
    params = SamplingParams(**given(args, SamplingParams))
    config = engine_config(args, _planned(args))
    with OpenModel.at(args.model) as model:
        if model.tokenizer is None:
            raise UsageError(f"{model.checkpoint.path} has no tokenizer")
        token_ids = model.tokenizer.encode(prompt, chat=args.chat)
        new = params.max_new_tokens
        check_context(len(token_ids), new, model.checkpoint.config.positions, "the model has")
        if args.color_levels and not args.quiet:
            print(LEVEL_LEGEND, file=sys.stderr)
        with ProgressBars(show=not args.quiet) as bars:
            engine = Engine.from_pretrained(
                model, replace(config, max_context=len(token_ids) + new), progress=bars.update
            )
            model.close()
            with engine, _interruptible(engine, bars):
                return _stream(engine, token_ids, params, bars, args)


def _stream(
    engine: Engine,
    token_ids: list[int],
    params: SamplingParams,
    bars: ProgressBars,
    args: argparse.Namespace,
) -> int:
    if not args.quiet:
        print(f"plan: {engine.plan_line}", file=sys.stderr)
    stream = engine.stream(token_ids, params)
    try:
        for piece in stream.pieces():
            # The text owns the terminal from its first piece on.
            bars.stop()
            sys.stdout.write(colored(piece) if args.color_levels else piece.text)
            sys.stdout.flush()
    finally:
        bars.stop()
        if stream.ended:
            _report(stream.result, args)
    return INTERRUPTED if stream.result.finish_reason == "interrupted" else 0


def _planned(args: argparse.Namespace) -> EngineConfig | None:
    """What the plan of a file says, if one is given. Raises UsageError."""
    blocks = args.resident_kv_blocks
    if args.plan is None:
        if blocks is not None:
            raise UsageError("--resident-kv-blocks changes a plan; give one with --plan")
        return None
    plan = Plan.read(args.plan)
    if blocks is not None:
        plan = replace(plan, placement=plan.placement.with_resident_blocks(blocks))
    return plan.config(EngineConfig())


def _report(result: Completion, args: argparse.Namespace) -> None:
    """What follows the text. Raises UsageError if the stats cannot be written."""
    if result.text and not result.text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    if args.stats:
        stats = json.dumps(result.stats, indent=2, ensure_ascii=False) + "\n"
        write_whole(args.stats, stats, "stats")
    if not args.quiet:
        print_run(result.stats)


@contextmanager
def _interruptible(engine: Engine, bars: ProgressBars) -> Iterator[None]:
    """The first interrupt ends the request within one pass, a second one the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        engine.interrupt()
        signal.signal(signal.SIGINT, leave)

    def leave(*_: object) -> None:
        # Gives the terminal its cursor back.
        bars.stop()
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
