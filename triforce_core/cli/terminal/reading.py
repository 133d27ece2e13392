"""Reading text files and the headers of saved contexts, without loading torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from triforce_offload.errors import UsageError

# A size that no context or list of prompts reaches; it stops reading from endless devices.
MOST_BYTES = 1 << 30


def read_text(path: str | Path) -> str:
    """Return the text of a file or pipe without a byte order mark, with newlines as line ends.

    Raises OSError, UnicodeDecodeError with the position of the invalid byte, or ValueError.
    """
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 30} GiB")
    text = data.decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_stdin() -> str:
    """Return all of standard input without a byte order mark and its last newline.

    Raises UsageError if it is closed or no text.
    """
    if sys.stdin is None:
        raise UsageError("standard input is closed, and there is no prompt")
    try:
        return sys.stdin.read().removeprefix("\ufeff").removesuffix("\n")
    except ValueError as error:
        raise UsageError(f"standard input is no text: {error}") from error


def saved_tokens(path: str) -> int:
    """Return the number of tokens of a saved context, read from its header. Raises UsageError."""
    try:
        with open(Path(path).expanduser(), "rb") as file:
            header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), 1 << 24)))
        return int(header["tokens"]["shape"][0])
    except OSError as error:
        raise UsageError(f"cannot read a context from {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError, RuntimeError) as error:
        raise UsageError(f"{path} holds no context") from error
