"""The prompt of a command, which comes from a flag, a file or standard input."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial

from triforce_core.cli.generate.prompts_file import Task, check_messages, read_tasks
from triforce_core.cli.terminal.reading import read_stdin, read_text
from triforce_core.model.tokenizing.tokenizer import Tokenizer, check_text
from triforce_core.requests.answer.reasoning import variables
from triforce_offload.errors import UsageError


def tasks_of(args: argparse.Namespace, tokenizer: Tokenizer, prompt: str | None) -> list[Task]:
    """Return the tasks of a command: one prompt, a list of messages, or all prompts of a file.

    Raises UsageError.
    """
    rendered = partial(tokenizer.chat, variables=variables(args.reasoning))
    if args.prompts_file is not None:
        to_messages = partial(as_messages, args) if in_template(args) else None
        return read_tasks(args.prompts_file, tokenizer, rendered, to_messages, _system(args))
    if args.messages is not None:
        return [Task(0, rendered(_system(args) + read_messages(args.messages)), "")]
    if in_template(args):
        return [Task(0, rendered(as_messages(args, prompt)), "")]
    return [Task(0, tokenizer.encode(prompt), "")]


def in_template(args: argparse.Namespace) -> bool:
    """Return whether the prompt is rendered with the model's chat template."""
    return args.chat or args.system is not None


def as_messages(args: argparse.Namespace, prompt: str) -> list[dict[str, str]]:
    """Return a prompt as a conversation."""
    return [*_system(args), {"role": "user", "content": prompt}]


def _system(args: argparse.Namespace) -> list[dict[str, str]]:
    return [{"role": "system", "content": args.system}] if args.system else []


def read_messages(path: str) -> list[dict[str, str]]:
    """Read a conversation from a JSON file. Raises UsageError."""
    try:
        return check_messages(json.loads(read_text(path)))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read messages from {path}: {reason}") from error


def read_prompt(args: argparse.Namespace) -> str:
    """Return the prompt from the arguments, a file or standard input. Raises UsageError.

    A byte order mark and a final newline are removed from a file or a pipe.
    """
    if args.prompt is not None:
        prompt = args.prompt
    elif args.prompt_file not in (None, "-"):
        try:
            prompt = read_text(args.prompt_file).removesuffix("\n")
        except UnicodeDecodeError as error:
            where = f"{args.prompt_file} is not UTF-8 text (byte {error.start})"
            raise UsageError(f"the prompt of {where}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot read the prompt from {args.prompt_file}: {reason}") from error
    elif sys.stdin is None or sys.stdin.isatty():
        raise UsageError(f"no prompt: give --prompt, --prompt-file or standard input{_saved(args)}")
    else:
        prompt = read_stdin()
    if not prompt:
        raise UsageError(f"the prompt is empty{_saved(args)}")
    check_text(prompt, "prompt")
    return prompt


def _saved(args: argparse.Namespace) -> str:
    """Return what a run with a saved context needs, for an error about its prompt."""
    return "; --load-context needs one that begins with the saved text" * bool(args.load_context)
