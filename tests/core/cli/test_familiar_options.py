"""Options that people know from elsewhere mean here what they mean there, and help is plain."""

from __future__ import annotations

import json

import pytest
from command import GREEDY, run
from helpers import add_tokenizer, make_model

from triforce_core.cli.main import _parser


@pytest.mark.parametrize("flag", ["-c", "--ctx-size", "--context"])
def test_a_context_has_the_same_names_in_every_command(flag: str) -> None:
    commands = _parser()[1]
    for name in ("generate", "chat", "serve", "plan", "bench"):
        # A bench has no model, a plan calls it so.
        model = [] if name == "bench" else ["x"]
        known = vars(commands[name].parse_args([*model, flag, "300"]))
        assert known.get("max_context", known.get("context")) == 300, name


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        (("-ngl", "99"), "--device-memory limits them"),
        (("--cpu-moe",), "--host-compute sets their share"),
        (("-ncmoe", "20"), "--host-compute sets their share"),
        (("--moe-expert-cache", "48"), "the expert_slots of a plan (--plan) set its size"),
        (("--no-mmap",), "weights are read into memory"),
        # These would be read as values of -s, -c, -m, -h and -p.
        (("-sys", "hi"), "(here it is --system)"),
        (("-ctk", "q8_0"), "(here it is --kv)"),
        (("-md", "x.gguf"), "(here it is --draft)"),
        (("-hf", "a/b"), "(here it is the hub id as MODEL)"),
        (("-ps",), "unrecognized arguments: -ps"),
        (("--max-model-len", "9"), "(here it is --ctx-size)"),
        (("--draft-max", "8"), "(here it is --draft-tokens)"),
    ],
)
def test_options_without_a_counterpart_name_what_takes_their_place(
    capsys, options: tuple[str, ...], instead: str
) -> None:
    code, _, err = run(capsys, "generate", "x", "-p", "Hello", *options)
    assert (code, options[0] in err, instead in err) == (2, True, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-n", "100"), "unrecognized arguments: -n (here it is max_tokens in a request)"),
        (("--temperature", "0"), "(here it is temperature in a request)"),
        (("--top-k=3",), "(here it is top_k in a request)"),
        (
            ("--alias", "a", "--max-model-len", "9"),
            "(here --alias is --name, --max-model-len is --ctx-size)",
        ),
    ],
)
def test_a_server_says_what_requests_set(capsys, options: tuple[str, ...], said: str) -> None:
    code, _, err = run(capsys, "serve", "x", *options)
    assert (code, said in err) == (2, True), err


def test_names_of_llama_cpp_do_the_same(speaking, capsys, tmp_path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Hello")
    ours = run(capsys, "generate", speaking, "--prompt-file", file, *GREEDY, "--max-new-tokens", 9)
    options = ("--temp", 0, "--n-predict", 9, "-t", 1)
    theirs = run(capsys, "generate", speaking, "-f", file, *GREEDY, *options)
    assert theirs[:2] == ours[:2]
    commands = _parser()[1]
    assert commands["serve"].parse_args(["x", "-np", "4"]).sequences == 4


@pytest.mark.parametrize(
    ("command", "said"),
    [
        # What follows an unknown option may be its value.
        ("generate --gpu rtx4090 x.gguf -p hi", "arguments: --gpu (here it is --device, such as"),
        # --gpu-layers is itself refused.
        ("generate x --gpu-layer 3", "unrecognized arguments: --gpu-layer; see"),
        ("generate x hi", "arguments: hi (-p TEXT gives a prompt, triforce run MODEL TEXT answers"),
        ("run x -p hi", "unrecognized arguments: -p (here it is the text after MODEL)"),
        ("run x hi there", "arguments: there (quotes keep the words of a message together)"),
        ("chat x hi", "arguments: hi (it is triforce run MODEL TEXT, for one answer)"),
        ("chat x --prompt hi", "(here it is triforce run MODEL TEXT, for one answer)"),
        ("serve x --sweep gpus", "--sweep (it is an option of triforce plan)"),
        ("generate x --frobnicate -5", "unrecognized arguments: --frobnicate; see"),
    ],
)
def test_an_unknown_option_is_named_alone_with_what_to_type(capsys, command, said: str) -> None:
    code, _, err = run(capsys, *command.split())
    assert (code, said in err) == (2, True), err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("text", "number"), [("128K", 131072), ("32k", 32768), ("300", 300)])
def test_numbers_of_tokens_may_end_in_k(text: str, number: int) -> None:
    commands = _parser()[1]
    for name in ("generate", "run", "chat", "plan", "bench"):
        model = [] if name == "bench" else ["x"]
        options = ["-c", text, "--budget", text]
        if name in ("generate", "run", "chat"):
            options += ["-n", text]
        known = vars(commands[name].parse_args([*model, *options]))
        assert known.get("max_context", known.get("context")) == number, name
        assert known["budget"] == number, name
        assert known.get("max_new_tokens", number) == number, name


def test_each_help_shows_its_own_defaults() -> None:
    def shown(name: str) -> str:
        return " ".join(_parser()[1][name].format_help().split())

    for name, new, context in (
        ("generate", 256, "prompt and new tokens"),
        ("chat", 2048, "32768, or the model's positions if fewer"),
        ("run", 2048, "32768, or the model's positions if fewer"),
    ):
        assert f"at most N tokens (default: {new});" in shown(name)
        assert f"is planned for (default: {context})" in shown(name)
    assert "is planned for (default: 32768, or" in shown("serve")


def test_all_help_is_to_be_had_at_once(capsys) -> None:
    code, out, _ = run(capsys, "--help-all")
    assert code == 0
    for name, command in _parser()[1].items():
        assert command.format_help(everything=True) in out, name
    assert run(capsys, "list", "--help-all")[0] == 0


def test_new_tokens_of_minus_one_fill_the_context(speaking, capsys, tmp_path) -> None:
    file = tmp_path / "stats.json"
    options = ("-p", "Hello", *GREEDY, "-n", "-1", "-c", "40", "--stats", file)
    assert run(capsys, "generate", speaking, *options)[0] == 0
    stats = json.loads(file.read_text())
    assert stats["prompt_tokens"] + stats["new_tokens"] == 40
    assert stats["finish_reason"] == "length"
    # Without --ctx-size the context is what the model has.
    options = ("-p", "Hello" * 99, *GREEDY, "-n", "-1", "--stats", file)
    assert run(capsys, "generate", speaking, *options)[0] == 0
    stats = json.loads(file.read_text())
    assert stats["prompt_tokens"] + stats["new_tokens"] == 512
    code, _, err = run(capsys, "generate", speaking, "-p", "Hello", *GREEDY, "-n", "-2")
    assert (code, "-2 is neither 1 or more nor -1, until the text ends" in err) == (2, True)


def test_every_prompt_of_a_file_fills_its_own_context(speaking, capsys, tmp_path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("Hello\nHello there\n")
    options = ("--prompts-file", prompts, "--output", output, *GREEDY, "-n", "-1", "-c", "40")
    assert run(capsys, "generate", speaking, *options)[0] == 0
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [each["prompt_tokens"] + each["new_tokens"] for each in answers] == [40, 40]
    assert answers[0]["prompt_tokens"] < answers[1]["prompt_tokens"]


def test_a_seed_of_minus_one_is_drawn(speaking, capsys, tmp_path) -> None:
    seeds = set()
    for number in range(2):
        file = tmp_path / f"{number}.json"
        options = ("-p", "Hello", "-n", "2", "-s", "-1", "--device", "cpu", "--stats", file)
        assert run(capsys, "generate", speaking, *options)[0] == 0
        seeds.add(json.loads(file.read_text())["seed"])
    assert len(seeds) == 2
    assert min(seeds) >= 0


def test_a_bare_prompt_of_a_model_with_a_chat_template_is_said_to_be_continued(
    speaking, capsys, tmp_path
) -> None:
    hint = "--chat asks for an answer"
    command = ("generate", speaking, "-p", "Hello", *GREEDY)
    assert run(capsys, *command)[2].count(hint) == 1
    for options in (("--chat",), ("--system", "Briefly"), ("--quiet",)):
        code, _, err = run(capsys, *command, *options)
        assert (code, hint in err) == (0, False)
    make_model("llama", tmp_path)
    add_tokenizer(tmp_path, chat=False)
    assert hint not in run(capsys, "generate", tmp_path, "-p", "Hello", *GREEDY)[2]


def test_help_shows_no_default_that_is_empty(capsys) -> None:
    for name, command in _parser()[1].items():
        # Lines may end within it.
        assert "(default: ())" not in " ".join(command.format_help().split()), name
