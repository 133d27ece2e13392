"""User settings from a TOML file and TRIFORCE_* variables, inserted before the command's flags.

A key is a flag's long name without its dashes. A key at the top of the file applies to those of
`generate`, `run`, `chat` and `serve` that have the flag; a key in a table applies to the command of
that name.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triforce_offload.errors import UsageError

PREFIX = "TRIFORCE_"
FILE_VARIABLE = "TRIFORCE_SETTINGS"
# Variables that are not flags: the choice of kernels, the server's key, the leader's settings for
# its ranks and those of the tests.
_OTHERS = {
    *("TRIFORCE_KERNELS", "TRIFORCE_VECTORS", "TRIFORCE_API_KEY", FILE_VARIABLE),
    *("TRIFORCE_LEADER", "TRIFORCE_LEADER_ADDRESS"),
    *("TRIFORCE_DRAWS", "TRIFORCE_MUTANTS", "TRIFORCE_SCHEDULES"),
}
# The commands that keys at the top of the file apply to.
_COMMON = ("generate", "run", "chat", "serve")
# Flags that are given for each run and cannot be set.
_NOT_KEPT = {"--help", "--model", "--api-key"}


def kept_flags(
    command: str, parsers: Mapping[str, argparse.ArgumentParser], environ: Mapping[str, str]
) -> list[str]:
    """Return the flags that the settings give a command. Later ones take precedence.

    parsers: the parser of each command
    Raises UsageError for an unknown key; the error suggests the closest known key.
    """
    known = {name: _flags(parser) for name, parser in parsers.items()}
    return [
        *_of_file(command, known, environ),
        *_of_variables(command, known, environ),
    ]


def settings_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the settings file, which may not exist."""
    if given := environ.get(FILE_VARIABLE):
        return Path(given).expanduser()
    base = environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "triforce-offload" / "settings.toml"


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the actions of a parser by the names of their flags."""
    return {
        flag[2:]: action
        for flag, action in parser._option_string_actions.items()
        if flag.startswith("--") and flag not in _NOT_KEPT
    }


def _of_file(
    command: str, known: Mapping[str, dict[str, argparse.Action]], environ: Mapping[str, str]
) -> list[str]:
    path = settings_path(environ)
    if not path.is_file():
        if FILE_VARIABLE in environ:
            raise UsageError(f"{FILE_VARIABLE} names {path}, and there is no such file")
        return []
    try:
        settings = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read settings from {path}: {reason}") from error
    tables = {name: each for name, each in settings.items() if isinstance(each, dict)}
    for name in tables:
        if name not in known:
            raise UsageError(f"{path}: there is no command {name}{_nearest(name, known)}")
    common = {name: each for name, each in settings.items() if name not in tables}
    anywhere = {flag for name in _COMMON for flag in known[name]}
    for key in common:
        if f"--{_name(key)}" in _NOT_KEPT:
            raise UsageError(f"{path}: {key} cannot be set here; give it on the command line")
        if _name(key) not in anywhere:
            raise UsageError(f"{path}: there is no setting {key}{_nearest(key, anywhere)}")
    flags = []
    if command in _COMMON:
        own = {key: value for key, value in common.items() if _name(key) in known[command]}
        flags += _as_flags(own, known[command], str(path))
    return flags + _as_flags(tables.get(command, {}), known[command], f"{path}, [{command}]")


def _of_variables(
    command: str, known: Mapping[str, dict[str, argparse.Action]], environ: Mapping[str, str]
) -> list[str]:
    flags = []
    anywhere = {flag for each in known.values() for flag in each}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in _OTHERS:
            continue
        name = _name(variable.removeprefix(PREFIX).lower())
        if name not in anywhere:
            near = _nearest(name, anywhere, lambda n: PREFIX + n.upper().replace("-", "_"))
            raise UsageError(f"there is no setting {variable}{near}")
        if name in known[command]:
            flags += _as_flags({name: environ[variable]}, known[command], variable)
    return flags


def _as_flags(
    settings: Mapping[str, Any], known: Mapping[str, argparse.Action], where: str
) -> list[str]:
    flags: list[str] = []
    for key, value in settings.items():
        name = _name(key)
        if name not in known:
            raise UsageError(f"{where}: there is no setting {key}{_nearest(key, known)}")
        if known[name].nargs == 0:
            if value in (True, "1", "true"):
                flags.append(f"--{name}")
            elif value not in (False, "0", "false", ""):
                raise UsageError(f"{where}: {key} is true or false, not {value!r}")
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, (bool, dict, list)) or not _readable(known[name], str(each)):
                raise UsageError(f"{where}: {key} cannot be {each!r}")
            flags.append(f"--{name}={each}")
    return flags


def _readable(action: argparse.Action, value: str) -> bool:
    """Return whether an option takes a value."""
    try:
        made = action.type(value) if callable(action.type) else value
    except (argparse.ArgumentTypeError, TypeError, ValueError):
        return False
    return action.choices is None or made in action.choices


def _name(key: str) -> str:
    return key.replace("_", "-")


def _nearest(name: str, known: Any, shown: Any = str) -> str:
    close = difflib.get_close_matches(_name(name), list(known), n=1, cutoff=0.5)
    return f" (did you mean {shown(close[0])}?)" if close else ""


def with_kept(argv: list[str], parsers: Mapping[str, argparse.ArgumentParser]) -> list[str]:
    """Return the command line with flags from the settings after its command. Raises UsageError."""
    if not argv or argv[0] not in parsers or {"-h", "--help"} & set(argv):
        return argv
    return [argv[0], *kept_flags(argv[0], parsers, os.environ), *argv[1:]]
