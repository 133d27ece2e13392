"""The prompt of a command, from its one source."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from offload.errors import UsageError
from triforce_core.model.tokenizer import check_text


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt that was given, or a file's, or standard input's. Raises UsageError.

    A byte order mark is no part of a file's or a pipe's text, nor is the newline that ends it.
    """
    if args.prompt is not None:
        prompt = args.prompt
    elif args.prompt_file not in (None, "-"):
        try:
            prompt = Path(args.prompt_file).read_text(encoding="utf-8-sig").removesuffix("\n")
        except UnicodeDecodeError as error:
            where = f"{args.prompt_file} is not UTF-8 text (byte {error.start})"
            raise UsageError(f"the prompt of {where}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot read the prompt from {args.prompt_file}: {reason}") from error
    elif sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no prompt: give --prompt, --prompt-file or standard input")
    else:
        try:
            prompt = sys.stdin.read().removeprefix("\ufeff").removesuffix("\n")
        except ValueError as error:
            raise UsageError(f"standard input is no text: {error}") from error
    if not prompt:
        raise UsageError("the prompt is empty")
    check_text(prompt, "prompt")
    return prompt
