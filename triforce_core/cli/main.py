"""The command line. Standard output carries generated text only; everything else goes to stderr."""

from __future__ import annotations

import argparse
import errno
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from triforce_core.cli.bench.arguments import add_bench_arguments
from triforce_core.cli.chat.arguments import add_chat_arguments
from triforce_core.cli.codes import INTERRUPTED, OUTPUT_FAILED, READER_GONE
from triforce_core.cli.generate.arguments import add_generate_arguments
from triforce_core.cli.parser import HelpAll, Parser
from triforce_core.cli.plan.arguments import add_plan_arguments
from triforce_core.cli.run.arguments import add_run_arguments
from triforce_core.cli.serve.arguments import add_serve_arguments
from triforce_core.cli.settings_file import with_kept
from triforce_core.cli.terminal.output import ERROR, WARNING, abandon_stdout, log_lines, say
from triforce_offload.errors import TriforceError, UsageError

FIRST_COMMANDS = """\
triforce runs language models whose context or weights do not fit on the GPU.
The text has exactly the distribution of the full model.

  triforce list                                   models on this machine
  triforce run qwen3-8b:Q4_K_M                    download one, and talk to it
  triforce plan llama3.1-8b --gpu rtx4090         what fits, and how fast it is
  triforce generate MODEL --prompt-file book.txt  text to standard output
  triforce serve MODEL                            a server, with a page to chat

triforce --help lists every command, and triforce COMMAND --help its options.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    The code is 0 for success, 1 for other errors, 2 for wrong usage, 3 if the model does not fit, 4
    for a bad checkpoint, 5 if the output cannot be written, 128 plus the number of a signal, or 141
    if the reader of the output has gone.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    # Errors in the arguments themselves are also logged in the format that they select.
    log_lines(as_json="--log-json" in argv)
    parser, commands = _parser()
    if not argv:
        print(FIRST_COMMANDS, end="")
        return 0
    try:
        args = parser.parse_args(with_kept(argv, commands))
    except UsageError as error:
        say(f"triforce: {error}", ERROR)
        return error.exit_code
    log_lines(as_json=args.log_json)
    try:
        code = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        say("interrupted", WARNING)
        return INTERRUPTED
    except BrokenPipeError:
        abandon_stdout()
        return READER_GONE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG):
            raise
        abandon_stdout()
        say(f"triforce: cannot write to standard output: {error.strerror}", ERROR)
        return OUTPUT_FAILED
    except TriforceError as error:
        if args.debug:
            traceback.print_exc()
        say(f"triforce: {args.parser.as_typed(str(error), argv)}", ERROR)
        return error.exit_code


def _generate(args: argparse.Namespace) -> int:
    from triforce_core.cli.generate.command import generate

    return generate(args)


def _run(args: argparse.Namespace) -> int:
    from triforce_core.cli.run.command import run

    return run(args)


def _list(args: argparse.Namespace) -> int:
    from triforce_core.cli.list.command import list_models

    return list_models(args)


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        nargs="*",
        metavar="FOLDER",
        help="also search these folders and the folders inside them",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def _chat(args: argparse.Namespace) -> int:
    from triforce_core.cli.chat.command import chat

    return chat(args)


def _serve(args: argparse.Namespace) -> int:
    from triforce_core.cli.serve.command import serve

    return serve(args)


def _verify(args: argparse.Namespace) -> int:
    from triforce_core.cli.verify.command import verify

    return verify(args)


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    from triforce_core.cli.verify.command import add_verify_arguments

    add_verify_arguments(parser)


def _env(args: argparse.Namespace) -> int:
    from triforce_core.cli.machine import print_machine

    print_machine(probe=args.probe)
    return 0


def _add_env_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--probe",
        action="store_true",
        help="measure again the rates that plans for this machine use",
    )


def _completion(args: argparse.Namespace) -> int:
    from triforce_core.cli.completion import completion

    print(completion(_parser()[0], args.shell))
    return 0


def _add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="shell that the script is for")


def _bench(args: argparse.Namespace) -> int:
    from triforce_core.cli.bench.command import bench

    return bench(args)


def _plan(args: argparse.Namespace) -> int:
    from triforce_core.cli.plan.command import plan

    return plan(args)


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser, and the parser of each command by name."""
    parser = Parser(
        prog="triforce",
        description="Lossless generation from models whose KV cache or weights do not fit the GPU.",
    )
    parser.add_argument(
        "--help-all", action=HelpAll, nargs=0, help="show the options of all commands and exit"
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {version('triforce-offload')}"
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show a traceback on errors")
    common.add_argument(
        "--log-json",
        action="store_true",
        help="write standard error as JSON lines with time, level and message",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, add_arguments, text in (
        ("list", _list, _add_list_arguments, "show the models on this machine"),
        ("run", _run, add_run_arguments, "talk to a model, or answer one message"),
        ("generate", _generate, add_generate_arguments, "generate text from a prompt"),
        ("chat", _chat, add_chat_arguments, "talk to a model, one line for each turn"),
        ("serve", _serve, add_serve_arguments, "serve a model to programs and to browsers"),
        (
            "bench",
            _bench,
            add_bench_arguments,
            "time the parts of a request, with random weights of any shape",
        ),
        (
            "plan",
            _plan,
            add_plan_arguments,
            "simulate what fits where and how fast it would be; needs no GPU",
        ),
        (
            "verify",
            _verify,
            _add_verify_arguments,
            "check a model on disk for errors: headers, hashes, numbers",
        ),
        ("env", _env, _add_env_arguments, "show the hardware and software of this machine"),
        (
            "completion",
            _completion,
            _add_completion_arguments,
            "print a script with which a shell completes commands, options and files",
        ),
    ):
        command = commands.add_parser(name, parents=[common], help=text, formatter_class=_Help)
        command.set_defaults(run=run, parser=command)
        add_arguments(command)
        _add_help(command)
    _tell_of_others(commands.choices)
    return parser, dict(commands.choices)


def _add_help(command: Parser) -> None:
    """Add what a command's help says of its own options."""
    if any(action.dest == "model" for action in command._actions):
        message = any(a.dest == "prompt" and not a.option_strings for a in command._actions)
        command.usage = f"%(prog)s MODEL {'[PROMPT] ' if message else ''}[options]"
    has_more = any(getattr(action, "for_experts", False) for action in command._actions)
    text = "show all options and exit" if has_more else argparse.SUPPRESS
    command.add_argument("--help-all", action=HelpAll, nargs=0, help=text)


def _tell_of_others(commands: Mapping[str, Parser]) -> None:
    """Tell each command which others have an option that it lacks."""
    for command in commands.values():
        for name, other in commands.items():
            for flag in other._option_string_actions.keys() - command._option_string_actions:
                command.others.setdefault(flag, []).append(name)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """A help formatter that omits defaults that are None or False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)
