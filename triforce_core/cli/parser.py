"""An argument parser that says what is wrong in one line, and what may have been meant."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn

from triforce_core.cli.output import ERROR, say

_UNKNOWN = re.compile(r"unrecognized arguments: (.+)")
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.+)\)")


class Parser(argparse.ArgumentParser):
    """Mistakes end with one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: {message}{self._meant(message)}; see {self.prog} --help", ERROR)
        self.exit(2)

    def parse_args(self, args=None, namespace=None):
        """As argparse does; what a command does not know is said by that command."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = getattr(parsed, "parser", self)
            command.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed

    def _meant(self, message: str) -> str:
        if choice := _CHOICE.search(message):
            known = [name.strip(" '") for name in choice[2].split(",")]
            return _nearest(choice[1], known)
        if unknown := _UNKNOWN.search(message):
            flag = unknown[1].split("=")[0].partition(" ")[0]
            flags = [name for name in self._option_string_actions if name.startswith("--")]
            return _nearest(flag, flags)
        return ""


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
