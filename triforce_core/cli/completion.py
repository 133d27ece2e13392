"""`triforce completion`: print a shell script that completes commands, options and files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script. parser: the parser of the whole command line"""
    for action in _actions(parser):
        named = str(action.metavar or "")
        if any(kind in named for kind in ("FILE", "MODEL")):
            action.complete = shtab.FILE
    return shtab.complete(parser, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
