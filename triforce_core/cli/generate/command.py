"""`triforce generate`: check the arguments, the prompt and the model's header before slow steps."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from triforce_core.cli.generate.prompt import read_prompt, tasks_of
from triforce_core.cli.generate.prompts_file import Answers
from triforce_core.cli.options import (
    UNTIL_FULL,
    check_ctx_size,
    engine_config,
    given,
    sampling_params,
)
from triforce_core.cli.ranks import followed, of_world
from triforce_core.cli.terminal.output import WARNING, announce, say
from triforce_core.cli.terminal.progress import ProgressBars
from triforce_core.cli.terminal.reading import saved_tokens
from triforce_core.cli.terminal.signals import Stop
from triforce_core.loading.open_model import OpenModel
from triforce_core.model.found.names import resolve
from triforce_core.params import check_context
from triforce_core.plan.plan import Plan
from triforce_core.settings import EngineConfig, MethodSettings
from triforce_offload.errors import UsageError
from triforce_offload.files import Output, check_outputs


def generate(args: argparse.Namespace) -> int:
    """Stream the text to stdout and report on stderr. Return the exit code.

    Errors that the prompt or a header shows are raised here, before torch is imported.
    """
    if (code := followed(quiet=args.quiet)) is not None:
        return code
    params = sampling_params(args)
    plan = _planned(args)
    config = of_world(engine_config(args, plan and plan.config(EngineConfig())))
    if plan is not None:
        plan.check_gpus(config.machine.gpus)
    _check_outputs(args, config)
    kept = saved_tokens(args.load_context) if args.load_context else 0
    # Read the prompt before the model is opened, so that a missing prompt is reported immediately.
    one = args.messages is None and args.prompts_file is None
    prompt = read_prompt(args) if one else None
    _say_what_has_no_effect(args, config)
    if config.method.drafts and config.method.draft_model is not None:
        resolve(config.method.draft_model, announce)
    with ExitStack() as stack:
        bars = ProgressBars(show=not args.quiet)
        slowly = None if args.quiet else _say_that_it_ends
        # Listen for signals before the bars hide the cursor.
        stop = stack.enter_context(Stop(bars.give_back, slowly).listening())
        stack.enter_context(bars)
        model = stack.enter_context(OpenModel.at(args.model, announce=announce))
        if model.tokenizer is None:
            raise UsageError(f"{model.checkpoint.path} has no tokenizer")
        tokenizer = model.tokenizer
        tasks = tasks_of(args, tokenizer, prompt)
        longest = max(tasks, key=lambda task: len(task.token_ids))
        token_ids = longest.token_ids
        positions = model.checkpoint.config.positions
        until_full = params.max_new_tokens == UNTIL_FULL
        new = 1 if until_full else params.max_new_tokens
        which = f"{args.prompts_file}, line {longest.line}: " if longest.line else ""
        check_context(len(token_ids), new, positions, "the model has", which)
        asked = given(args, EngineConfig).get("max_context")
        check_ctx_size(asked, positions)
        if asked is not None:
            check_context(len(token_ids), new, asked, "--ctx-size gives", which)
        needed = min(max(len(token_ids) + new, kept), positions)
        if until_full:
            needed = positions
        config = replace(config, max_context=asked or needed)
        answers = None
        if args.output is not None:
            answers = Answers(args.output, tasks)
            stack.callback(answers.close)
            if len(answers.done) == len(tasks):
                if not args.quiet:
                    say(f"all {len(tasks)} prompts are answered already")
                return 0
        # Import this late, because importing torch takes longer than all of the above.
        from triforce_core.cli.generate.run import Run

        return Run(args, bars, stop, plan).texts(model, tasks, params, config, answers)


def _say_that_it_ends() -> None:
    say("triforce: ending after this pass; once more to end at once")


def _check_outputs(args: argparse.Namespace, config: EngineConfig) -> None:
    """Raise UsageError for outputs that cannot be written, before anything is loaded."""
    if args.save_context is not None:
        Output(args.save_context, "context").check_file()
    if (args.prompts_file is None) != (args.output is None):
        raise UsageError("--prompts-file and --output go together")
    if args.prompts_file is None and config.sequences > 1:
        raise UsageError("--sequences is for the prompts of --prompts-file")
    if args.prompts_file is not None and (args.json or args.stats is not None):
        raise UsageError("--output holds the answers to --prompts-file: no --json or --stats")
    outputs = {
        **{"stats": args.stats, "trace": config.trace},
        **{"context": args.save_context, "answers": args.output},
    }
    named = (
        *(args.prompt_file, args.messages, args.prompts_file, args.load_context),
        *(args.plan, args.model, config.method.draft_model),
    )
    read = [path for path in named if path not in (None, "-") and Path(path).exists()]
    check_outputs((Output(path, what) for what, path in outputs.items() if path is not None), read)
    if sys.stdout is None and args.stats is None and args.output is None:
        raise UsageError("standard output is closed: the text would go nowhere (--stats keeps it)")


def _say_what_has_no_effect(args: argparse.Namespace, config: EngineConfig) -> None:
    names = config.method.without_effect(given(args, MethodSettings))
    if names and not args.quiet:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        method = config.method
        why = "" if method.has_drafter else " and --draft none"
        say(f"triforce: no effect with --method {method.method}{why}: {flags}", WARNING)


def _planned(args: argparse.Namespace) -> Plan | None:
    """Return the plan of --plan, or None without one. Raises UsageError."""
    blocks = args.resident_kv_blocks
    if args.plan is None:
        if blocks is not None:
            raise UsageError("--resident-kv-blocks changes a plan; give one with --plan")
        return None
    plan = Plan.read(args.plan)
    if blocks is not None:
        plan = replace(plan, placement=plan.placement.with_resident_blocks(blocks))
    return plan
