"""A run of `triforce generate`: load the model, stream the text, report the statistics."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from triforce_core.cli.generate.prompt import in_template
from triforce_core.cli.generate.prompts_file import Answers, Task
from triforce_core.cli.terminal.ending import exit_code
from triforce_core.cli.terminal.output import ERROR, WARNING, TextOutput, say
from triforce_core.cli.terminal.progress import ProgressBars
from triforce_core.cli.terminal.report import LEVEL_LEGEND, colored, print_run, takes_colors
from triforce_core.cli.terminal.signals import Stop, ending
from triforce_core.engine import Engine
from triforce_core.loading.devices import open_device
from triforce_core.loading.open_model import OpenModel
from triforce_core.params import SamplingParams
from triforce_core.plan.plan import Plan
from triforce_core.requests.guiding import guide_of
from triforce_core.requests.run_all import run_all
from triforce_core.requests.stream import Completion, Piece
from triforce_core.settings import EngineConfig
from triforce_offload.files import Output
from triforce_offload.memory.device import device_name

# A run whose speed differs from its plan's prediction by more than this factor warns.
_FAR = 2.0


class Run:
    """One run of the command, and its output."""

    def __init__(
        self, args: argparse.Namespace, bars: ProgressBars, stop: Stop, plan: Plan | None
    ) -> None:
        """plan: the plan to run, or None"""
        self._args = args
        self._bars = bars
        self._stop = stop
        self._plan = plan

    def texts(
        self,
        model: OpenModel,
        tasks: list[Task],
        params: SamplingParams,
        config: EngineConfig,
        answers: Answers | None,
    ) -> int:
        """Generate text for one prompt, or answers to all prompts of a file. Return the exit code.

        answers: the output file for many prompts
        """
        args = self._args
        if self._plan is not None:
            device = device_name(open_device(config.machine.device))
            self._plan.check(model.name, model.checkpoint.config, device)
        if args.color_levels and not args.quiet and takes_colors(sys.stderr):
            say(LEVEL_LEGEND)
        # A grammar with an error is reported before the model is loaded, which may take minutes.
        guide_of(params, model.tokenizer, model.checkpoint.config)
        with ExitStack() as stack:
            engine = stack.enter_context(
                Engine.from_pretrained(model, config, progress=self._bars.update)
            )
            model.close()
            if not args.quiet:
                say(f"plan: {engine.plan_line}")
                self._say_if_continued(engine)
            if args.load_context:
                loaded = engine.load_context(args.load_context)
                if not args.quiet:
                    say(f"{loaded.tokens} tokens of context loaded{_unused(engine, tasks)}")
            if answers is not None:
                code = self._answer(engine, tasks, answers, params)
            else:
                code = self._text(engine, tasks[0], params)
            if args.save_context and engine.context_tokens:
                # The text is complete, so an interrupt now is meant for the file, which may take
                # long to write.
                with ending():
                    engine.save_context(args.save_context)
        return code

    def _say_if_continued(self, engine: Engine) -> None:
        """Warn about a bare prompt: an instruct model that continues one looks broken."""
        args = self._args
        bare = not in_template(args) and args.messages is None and args.prompts_file is None
        if bare and engine.tokenizer.has_chat_template:
            say(
                "triforce: the model has a chat template, and a bare prompt is continued as plain "
                "text; --chat asks for an answer"
            )

    def _text(self, engine: Engine, task: Task, params: SamplingParams) -> int:
        """Write the text of a prompt as it is generated. Return the exit code."""
        args, bars, stop = self._args, self._bars, self._stop
        if not args.load_context:
            bars.prompt(len(task.token_ids))
        stream = engine.stream(task.token_ids, _with_room(params, task, engine))
        output = TextOutput()
        stop.end = stream.interrupt
        colors = args.color_levels and takes_colors(sys.stdout)
        try:
            for piece in stream.pieces():
                # The bars give way to the text at its first piece.
                with suppress(OSError):
                    bars.stop()
                if args.json:
                    shown = json.dumps({"text": piece.text, "origin": piece.origin}) + "\n"
                else:
                    shown = colored(piece) if colors else piece.text
                if not output.write(shown):
                    stream.interrupt()
        finally:
            stop.ended()
            with suppress(OSError):
                bars.stop()
            if stream.ended:
                self._report(stream.result, output)
                _say_if_cut(params, stream.result)
                self._say_if_planned_otherwise(engine, stream.result)
        if stop.number is not None and stream.result.finish_reason == "interrupted":
            return exit_code(stop.number)
        return output.code

    def _answer(
        self, engine: Engine, tasks: list[Task], answers: Answers, params: SamplingParams
    ) -> int:
        """Answer the prompts that have no answer yet. Return the exit code."""
        bars, stop, quiet = self._bars, self._stop, self._args.quiet
        if answers.done and not quiet:
            say(f"{len(answers.done)} of {len(tasks)} prompts are answered already")
        errors: list[BaseException] = []

        def receive(task: Task, item: Piece | Completion | BaseException) -> None:
            with suppress(OSError):
                bars.stop()
            if isinstance(item, BaseException):
                errors.append(item)
            elif isinstance(item, Completion) and item.finish_reason != "interrupted":
                # An interrupted answer is not saved; the next run generates it again.
                answers.add(task, item)
                if not quiet:
                    say(f"{len(answers.done)} of {len(tasks)} prompts answered")

        stop.end = engine.interrupt
        left = [task for task in tasks if task.index not in answers.done]
        run_all(
            engine,
            [
                (task.token_ids, _with_room(params, task, engine), partial(receive, task))
                for task in left
            ],
            lambda: stop.number is None and not errors,
        )
        stop.ended()
        if errors:
            raise errors[0]
        return 0 if stop.number is None else exit_code(stop.number)

    def _report(self, result: Completion, output: TextOutput) -> None:
        """Report what follows the text. Raises OutputError if the statistics cannot be written."""
        args = self._args
        if args.json:
            about = {"finish_reason": result.finish_reason, "stats": result.stats}
            output.write(json.dumps(about) + "\n")
        elif result.text and not result.text.endswith("\n"):
            output.write("\n")
        kept = "--stats FILE would have kept it"
        if args.stats is not None:
            # Write the statistics first: standard error may fail just as standard output did.
            stats = json.dumps(result.stats, indent=2, ensure_ascii=False) + "\n"
            Output(args.stats, "stats").write(stats)
            kept = "what was there is lost" if args.stats == "-" else f"{args.stats} has it whole"
        if output.why:
            say(f"triforce: {output.why}; {kept}", ERROR)
        elif output.escaped:
            say(
                f"triforce: standard output is {sys.stdout.encoding}, which lacks characters of "
                f"the text: they were written as escapes; {kept}",
                WARNING,
            )
        if not args.quiet:
            with suppress(OSError):
                print_run(result.stats)

    def _say_if_planned_otherwise(self, engine: Engine, result: Completion) -> None:
        """Warn about a run far off its plan, as when the rates were measured on a busy machine."""
        plan = self._plan
        predicted = plan and plan.predicted and plan.predicted.get("seconds_per_token")
        measured = result.stats["seconds_per_token"]
        if self._args.quiet or not predicted or not measured:
            return
        if engine.plan == plan.as_run(engine.plan) and not 1 / _FAR < measured / predicted < _FAR:
            say(
                f"triforce: the plan predicts {predicted:.3g} s a token, and {measured:.3g} were "
                "measured; if its rates were measured on a busy machine, `triforce env --probe` "
                "forgets them",
                WARNING,
            )


def _say_if_cut(params: SamplingParams, result: Completion) -> None:
    """Warn about a text that a grammar or a schema would have continued."""
    follows = params.grammar is not None or params.json_schema is not None
    if follows and result.finish_reason == "length":
        what = "grammar" if params.grammar is not None else "JSON schema"
        new = result.stats["new_tokens"]
        say(f"triforce: the text was cut after {new} tokens, before the {what} ended", WARNING)


def _with_room(params: SamplingParams, task: Task, engine: Engine) -> SamplingParams:
    """Limit the new tokens to the room left in the context."""
    room = engine.max_context - len(task.token_ids)
    return replace(params, max_new_tokens=min(params.max_new_tokens, room))


def _unused(engine: Engine, tasks: Sequence[Task]) -> str:
    """Say that a context was loaded with which no prompt begins."""
    tokens = engine.context_tokens
    shared = max(_alike(tokens, task.token_ids) for task in tasks)
    if 2 * shared >= len(tokens):
        return ""
    if not shared:
        return ", and none is reused: a prompt must begin with the saved text"
    return f", but the prompt begins with only the first {shared} of them"


def _alike(first: Sequence[int], second: Sequence[int]) -> int:
    """Return with how many tokens both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
