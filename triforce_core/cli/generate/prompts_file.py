"""Prompts from a file, and a file of answers, which also records the prompts already answered."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triforce_core.cli.terminal.reading import read_text
from triforce_core.model.tokenizing.tokenizer import Tokenizer, check_text
from triforce_offload.errors import OutputError, UsageError

if TYPE_CHECKING:
    from triforce_core.requests.stream import Completion


@dataclass(frozen=True)
class Task:
    """One prompt.

    index: its position among the prompts, from 0
    digest: a hash of its line
    name: its "id", if it has one
    line: its line in the file, from 1; 0 if it is of no file
    """

    index: int
    token_ids: list[int]
    digest: str
    name: Any = None
    line: int = 0


def read_tasks(
    path: str,
    tokenizer: Tokenizer,
    rendered: Callable[[list[dict[str, str]]], list[int]],
    to_messages: Callable[[str], list[dict[str, str]]] | None,
    before: list[dict[str, str]],
) -> list[Task]:
    """Read the prompts of a file, one per line. Empty lines are skipped.

    A line is text, or a JSON object with a "prompt" or "messages", and optionally an "id".
    rendered: returns the tokens of a conversation in the chat template
    to_messages: turns a prompt into a conversation for the chat template; None for plain text
    before: messages that precede those of a line
    Raises UsageError, naming the line.
    """
    try:
        lines = read_text(path).split("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read prompts from {path}: {reason}") from error
    tasks = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                task = _task(len(tasks), line, tokenizer, rendered, to_messages, before)
                tasks.append(replace(task, line=number))
            except UsageError as error:
                raise UsageError(f"{path}, line {number}: {error}") from error
    if not tasks:
        raise UsageError(f"{path} holds no prompt")
    return tasks


def _task(
    index: int,
    line: str,
    tokenizer: Tokenizer,
    rendered: Callable[[list[dict[str, str]]], list[int]],
    to_messages: Callable[[str], list[dict[str, str]]] | None,
    before: list[dict[str, str]],
) -> Task:
    digest = hashlib.sha256(line.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    prompt: Any = line
    name = None
    if line.lstrip().startswith("{"):
        try:
            given = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"begins as JSON and is none: {error}") from error
        if unknown := sorted(given.keys() - {"prompt", "messages", "id"}):
            raise UsageError(f'has {unknown[0]!r}; known are "prompt", "messages" and "id"')
        name, messages = given.get("id"), given.get("messages")
        check_text(json.dumps(name, ensure_ascii=False), "id")
        if (messages is None) == ("prompt" not in given):
            raise UsageError('needs either a "prompt" or "messages"')
        if messages is not None:
            return Task(index, rendered(before + check_messages(messages)), digest, name)
        prompt = given["prompt"]
        if not isinstance(prompt, str) or not prompt:
            raise UsageError('its "prompt" is no text')
    check_text(prompt, "prompt")
    ids = rendered(to_messages(prompt)) if to_messages else tokenizer.encode(prompt)
    return Task(index, ids, digest, name)


def check_messages(messages: object) -> list[dict[str, str]]:
    """Check messages that were parsed from JSON. Raises UsageError."""
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages are a list of at least one")
    for number, message in enumerate(messages):
        whole = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not whole or not isinstance(message.get("content"), str):
            raise UsageError(f'message {number} needs a "role" and its "content", both texts')
    return messages


# How the line of an answer begins.
_BEGINNING = b'{"index": '


class Answers:
    """The file of answers, one per line, flushed to disk after each answer.

    done: the indices of the prompts that have an answer
    """

    def __init__(self, path: str, tasks: list[Task]) -> None:
        """Open the file and continue after the answers of an earlier run with the same prompts.

        A last line that an earlier run left incomplete is removed. Raises UsageError for any other
        content.
        """
        self._path = Path(path)
        self.done: set[int] = set()
        if self._path.exists() and not self._path.is_file():
            raise UsageError(f"cannot write the answers to {path}: it is no file")
        try:
            held = self._path.read_bytes() if self._path.exists() else b""
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        whole = held[: held.rfind(b"\n") + 1]
        begun = held[len(whole) :]
        if begun and not (begun.startswith(_BEGINNING) or _BEGINNING.startswith(begun)):
            raise UsageError(f"{path} ends in what is no answer: name another --output")
        for number, line in enumerate(whole.splitlines(), start=1):
            self.done.add(_answered(path, number, line, tasks))
        try:
            self._file = open(self._path, "r+b" if held else "wb")  # noqa: SIM115
            self._file.truncate(len(whole))
            self._file.seek(len(whole))
        except OSError as error:
            raise UsageError(f"cannot write the answers to {path}: {error.strerror}") from error

    def add(self, task: Task, completion: Completion) -> None:
        """Append an answer. Raises OutputError."""
        stats = completion.stats
        line: dict[str, Any] = {"index": task.index, "of": task.digest}
        if task.name is not None:
            line["id"] = task.name
        line |= {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "prompt_tokens": stats["prompt_tokens"],
            "new_tokens": stats["new_tokens"],
            "seed": stats["seed"],
            "seconds_per_token": stats["seconds_per_token"],
        }
        try:
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            reason = error.strerror or error
            raise OutputError(f"cannot write the answers to {self._path}: {reason}") from error
        self.done.add(task.index)

    def close(self) -> None:
        self._file.close()


def _answered(path: str, number: int, line: bytes, tasks: list[Task]) -> int:
    """Return the index of the prompt that a line of an earlier run answers. Raises UsageError."""
    try:
        answer = json.loads(line)
        index, digest = answer["index"], answer["of"]
        known = tasks[index].digest if type(index) is int and index >= 0 else None
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        known, digest = None, ""
    if known != digest:
        raise UsageError(
            f"{path}, line {number}, is no answer to these prompts: name another --output"
        )
    return index
