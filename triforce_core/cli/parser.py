"""An argument parser with one-line errors that suggest the closest known name."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from triforce_core.cli.terminal.output import ERROR, say

_UNKNOWN = re.compile(r"unrecognized arguments: (.+)")
# A word that is an option, and no negative number.
_FLAG = re.compile(r"--?[a-zA-Z]")
# argparse expands abbreviations of one-dash options even with allow_abbrev=False.
_AMBIGUOUS = re.compile(r"ambiguous option: (\S+) could match .*")
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.+)\)")
# What argparse says of a value that its type cannot read.
_INVALID = re.compile(r"invalid (\w+) value: ('.*')")


# The name of a setting, and what is wrong with it: it must be something, or its value is named.
_SETTING = re.compile(r"(\w+) (must .*|['\d].*)", re.DOTALL)


# Options of llama.cpp and vLLM whose counterparts have other names.
_ELSEWHERE = {
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), "triforce chat"),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "the hub id as MODEL"),
    **dict.fromkeys(("-md", "--model-draft", "--speculative-model"), "--draft"),
    **dict.fromkeys(("--draft-max", "--draft-n", "--num-speculative-tokens"), "--draft-tokens"),
    **dict.fromkeys(("-sys", "--system-prompt"), "--system"),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), "--kv"),
    **dict.fromkeys(("-mg", "--main-gpu"), "--device cuda:N"),
    **dict.fromkeys(("-tp", "--tensor-parallel-size", "-ts", "--tensor-split"), "--gpus"),
    "--max-model-len": "--ctx-size",
    "--gpu-memory-utilization": "--device-memory, a size",
    "--max-num-seqs": "--sequences",
    "--alias": "--name",
    "--gpu": "--device, such as cuda:0; triforce plan names cards",
}
# These begin with the letter of another option, as whose value the rest would be read.
_MISREAD = [flag for flag in _ELSEWHERE if not flag.startswith("--") and len(flag) > 2] + ["-ps"]


# A parser, or a group of its options.
Options = argparse._ActionsContainer


def for_experts(action: argparse.Action) -> None:
    """Leave an option out of `--help`; `--help-all` shows it."""
    action.for_experts = True  # type: ignore[attr-defined]


class Parser(argparse.ArgumentParser):
    """A parser that ends with one line on stderr and exit code 2. Abbreviations are errors.

    elsewhere: options of other programs and commands, and what stands for each here
    beyond: what a user may have meant by an argument too many; None if nothing comes to mind
    others: the commands that have an option, by its flags; only errors name them
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})
        self.elsewhere = dict(_ELSEWHERE)
        self.beyond: str | None = None
        self.others: dict[str, list[str]] = {}

    def format_help(self, *, everything: bool = False) -> str:
        """Return the help.

        everything: whether to include options for experts, and the help of each command
        """
        if everything and self._subparsers is not None:
            commands = self._subparsers._group_actions[0].choices or {}
            texts = [command.format_help(everything=True) for command in commands.values()]
            return "\n".join([super().format_help(), *texts])
        rare = [action for action in self._actions if getattr(action, "for_experts", False)]
        if everything or not rare:
            return super().format_help()
        texts = [action.help for action in rare]
        for action in rare:
            action.help = argparse.SUPPRESS
        try:
            return f"{super().format_help()}\n{self.prog} --help-all lists {len(rare)} more.\n"
        finally:
            for action, text in zip(rare, texts, strict=True):
                action.help = text

    def error(self, message: str) -> NoReturn:
        if invalid := _INVALID.search(message):
            kind = "a number" if invalid[1] in ("float", "share") else "a whole number"
            message = f"{message[: invalid.start()]}{invalid[2]} is not {kind}"
        message = _AMBIGUOUS.sub(r"unrecognized arguments: \1", message)
        say(f"{self.prog}: {message}{self._meant(message)}; see {self.prog} --help", ERROR)
        self.exit(2)

    def as_typed(self, message: str, argv: Sequence[str]) -> str:
        """Return an error that begins with a setting's name with its option there, in the form that
        the command line has.
        """
        setting = _SETTING.match(message)
        name, rest = setting.groups() if setting else ("", message)
        for action in self._actions:
            if action.dest == name and action.option_strings:
                given = {each.partition("=")[0] for each in argv}
                typed = [flag for flag in action.option_strings if flag in given]
                return f"{(typed or action.option_strings)[0]} {rest}"
        return message

    def parse_known_args(self, args=None, namespace=None):
        """Parse arguments as argparse does, after those of other programs that it would misread."""
        if self._subparsers is None:
            for word in args or ():
                if word == "--":
                    break
                if word in _MISREAD:
                    self.error(f"unrecognized arguments: {word}")
        return super().parse_known_args(args, namespace)

    def parse_args(self, args=None, namespace=None):
        """Parse arguments as argparse does. Each command reports its own unknown arguments."""
        parsed, unknown = self.parse_known_args(args, namespace)
        *before, word = unknown or [""]
        if before == ["--"] or (not before and word and not word.startswith("-")):
            # argparse leaves an optional positional argument unread if an option comes before it.
            unknown = [] if _taken(parsed, word) else unknown
        if unknown:
            command = getattr(parsed, "parser", self)
            # What follows an unknown option may be its value.
            flags = [word.partition("=")[0] for word in unknown if _FLAG.match(word)]
            command.error(f"unrecognized arguments: {' '.join(flags or unknown)}")
        return parsed

    def _meant(self, message: str) -> str:
        if choice := _CHOICE.search(message):
            known = [name.strip(" '") for name in choice[2].split(",")]
            return _nearest(choice[1], known)
        if unknown := _UNKNOWN.search(message):
            return self._instead(unknown[1].split(" "))
        return ""

    def _instead(self, words: Sequence[str]) -> str:
        """Return what may have been meant by arguments that are not known."""
        known = [word for word in words if word in self.elsewhere]
        if len(known) > 1:
            return f" (here {', '.join(f'{flag} is {self.elsewhere[flag]}' for flag in known)})"
        if known:
            return f" (here it is {self.elsewhere[known[0]]})"
        flag = next((word for word in words if word != "--"), "")
        if not flag.startswith("-"):
            return f" ({self.beyond})" if self.beyond else ""
        flags = [
            name
            for name, action in self._option_string_actions.items()
            if name.startswith("--") and not isinstance(action, Explained)
        ]
        # An abbreviation is not expanded; the error names the flags it may stand for.
        begun = [name for name in flags if flag.startswith("--") and name.startswith(flag)]
        meant = f" (did you mean {' or '.join(begun)}?)" if begun else _nearest(flag, flags)
        commands = " and ".join(self.others.get(flag, []))
        return meant or (f" (it is an option of triforce {commands})" if commands else "")


class HelpAll(argparse.Action):
    """Print the help, with options for experts, and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help(everything=True), end="")
        parser.exit()


class Explained(argparse.Action):
    """An option of another program that is rejected with an explanation, its `const`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string}: {self.const}")


def _taken(parsed: argparse.Namespace, word: str) -> bool:
    """Give a word to the optional argument of a command, if it has one that is not given. Return
    whether it took the word.
    """
    actions = getattr(getattr(parsed, "parser", None), "_actions", ())
    for action in actions:
        optional = action.nargs == "?" and not action.option_strings
        if optional and getattr(parsed, action.dest) is None:
            setattr(parsed, action.dest, word)
            return True
    return False


def _nearest(name: str, known: list[str]) -> str:
    # Dashes would make any two flags alike.
    bare = {each.lstrip("-"): each for each in known}
    close = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=0.6)
    return f" (did you mean {bare[close[0]]}?)" if close else ""
