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
from typing import Any

from offload.errors import UsageError
from offload.files import write_whole
from triforce_core.cli.codes import INTERRUPTED
from triforce_core.cli.report import LEVEL_LEGEND, ProgressBars, colored, print_run
from triforce_core.engine import Engine, check_context
from triforce_core.model.checkpoint import open_checkpoint, resolve
from triforce_core.model.tokenizer import load_tokenizer
from triforce_core.params import SamplingParams
from triforce_core.planner.plan import Plan
from triforce_core.settings import AUTO
from triforce_core.stream import Completion


def generate(args: argparse.Namespace, prompt: str) -> int:
    """Loads the model, streams the text to stdout and reports on stderr. Returns the exit code."""
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
    )
    plan = _plan(args)
    path = resolve(args.model)
    checkpoint = open_checkpoint(path)
    positions = checkpoint.config.positions
    checkpoint.close()
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        raise UsageError(f"{path} has no tokenizer")
    token_ids = tokenizer.encode(prompt, chat=args.chat)
    check_context(len(token_ids), args.max_new_tokens, positions, "the model has")
    if args.color_levels and not args.quiet:
        print(LEVEL_LEGEND, file=sys.stderr)
    with ProgressBars(show=not args.quiet) as bars:
        engine = Engine.from_pretrained(
            path,
            device=args.device,
            device_memory=args.device_memory,
            link_bandwidth=args.link_bandwidth,
            dtype=args.dtype,
            method=_or(args.method, "triforce"),
            draft=_or(args.draft, AUTO),
            draft_tokens=_or(args.draft_tokens, AUTO),
            inner_draft_tokens=_or(args.inner_draft_tokens, AUTO),
            budget=args.budget,
            chunk_size=args.chunk_size,
            retrieval=args.retrieval,
            accept=args.accept,
            plan=plan,
            max_context=len(token_ids) + args.max_new_tokens,
            pin=not args.no_pin,
            cuda_graphs=not args.no_graphs,
            trace=args.trace,
            tokenizer=tokenizer,
            progress=bars.update,
        )
        with engine, _interruptible(engine, bars):
            if not args.quiet:
                print(f"plan: {engine.plan_line}", file=sys.stderr)
            stream = engine.stream(token_ids, params)
            try:
                for piece in stream.pieces():
                    bars.stop()  # the text owns the terminal from its first piece on
                    sys.stdout.write(colored(piece) if args.color_levels else piece.text)
                    sys.stdout.flush()
            finally:
                bars.stop()
                if stream.ended:
                    _report(stream.result, args)
    return INTERRUPTED if stream.result.finish_reason == "interrupted" else 0


def _plan(args: argparse.Namespace) -> Plan | None:
    """The plan of a file, with what flags say instead. Raises UsageError."""
    changes = {name: getattr(args, name) for name in _PLAN_FLAGS}
    changes = {name: value for name, value in changes.items() if value is not None}
    if args.plan is None:
        if args.resident_kv_blocks is not None:
            raise UsageError("--resident-kv-blocks changes a plan; give one with --plan")
        return None
    return replace(Plan.read(args.plan), **changes)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


_PLAN_FLAGS = (
    "method",
    "draft",
    "draft_tokens",
    "inner_draft_tokens",
    "budget",
    "resident_kv_blocks",
)


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
        bars.stop()  # gives the terminal its cursor back
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
