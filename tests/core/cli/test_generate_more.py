"""Conversations, stops, many prompts and saved contexts on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import GREEDY, run
from helpers import write_tokens_of_bytes

from bench.plot_trace import read_trace

TEXT = ("--prompt", "Hello there", *GREEDY, "--quiet")


def greedy(speaking: Path, capsys: pytest.CaptureFixture, *options: object) -> str:
    code, out, err = run(capsys, "generate", speaking, *TEXT, *options)
    assert code == 0, err
    return out.removesuffix("\n")


def test_a_stop_ends_the_text_before_it(speaking, capsys, tmp_path) -> None:
    whole = greedy(speaking, capsys)
    stop = whole[7:10]
    assert greedy(speaking, capsys, "--stop", stop) == whole[: whole.index(stop)]
    stats = tmp_path / "stats.json"
    cut = greedy(speaking, capsys, "--stop", "§", "--stop", stop, "--stats", stats)
    assert cut == whole[: whole.index(stop)]
    told = json.loads(stats.read_text())
    assert (told["finish_reason"], told["text"]) == ("stop", cut)
    assert told["new_tokens"] == whole.index(stop) + 3, "a token a character"
    assert greedy(speaking, capsys, "--stop", "§") == whole


def test_json_lines_hold_the_text_and_the_stats(speaking, capsys) -> None:
    whole = greedy(speaking, capsys)
    lines = [json.loads(line) for line in greedy(speaking, capsys, "--json").splitlines()]
    assert "".join(line["text"] for line in lines[:-1]) == whole
    assert {line["origin"] for line in lines[:-1]} <= {"accepted", "corrected", "bonus", "plain"}
    assert lines[-1]["finish_reason"] == lines[-1]["stats"]["finish_reason"] == "length"


def test_a_grammar_is_checked_before_the_model_is_loaded(
    speaking, capsys, tmp_path, monkeypatch
) -> None:
    loads = []
    monkeypatch.setattr("triforce_core.engine.Engine.from_pretrained", loads.append)
    file = tmp_path / "wrong.lark"
    file.write_text("start: (")
    code, out, err = run(capsys, "generate", speaking, *TEXT, "--grammar", file)
    assert (code, out, loads) == (2, "", [])
    assert "the grammar cannot be used" in err


def test_a_text_that_is_cut_before_its_grammar_ends_says_so(capsys, tmp_path) -> None:
    write_tokens_of_bytes(tmp_path)
    file = tmp_path / "digits.lark"
    file.write_text("start: /[0-9]{20}/")
    options = ("--prompt", "Hello there", "--device", "cpu", "--temperature", "0", "--quiet")
    options = ("generate", tmp_path, *options, "--grammar", file)
    code, out, err = run(capsys, *options, "-n", "8")
    assert (code, len(out.strip())) == (0, 8), err
    assert "the text was cut after 8 tokens, before the grammar ended" in err
    code, out, err = run(capsys, *options, "-n", "30")
    assert (code, len(out.strip()), err) == (0, 20, "")


def test_messages_and_a_system_prompt_go_into_the_template(speaking, capsys, tmp_path) -> None:
    file = tmp_path / "messages.json"
    file.write_text('[{"role": "user", "content": "Hi"}]')
    base = ("generate", speaking, *GREEDY, "--quiet")
    in_file = run(capsys, *base, "--messages", file)
    assert in_file[0] == 0
    assert in_file == run(capsys, *base, "--prompt", "Hi", "--chat")
    with_system = run(capsys, *base, "--prompt", "Hi", "--system", "Be short.")
    assert with_system[0] == 0
    assert with_system == run(capsys, *base, "--messages", file, "--system", "Be short.")
    assert with_system != in_file
    for content, said in (
        ("{", "cannot read messages from"),
        ("[]", "messages are a list of at least one"),
        ('[{"role": "user"}]', 'message 0 needs a "role" and its "content"'),
    ):
        file.write_text(content)
        code, _, err = run(capsys, *base, "--messages", file)
        assert (code, said in err) == (2, True), err


def test_many_prompts_are_answered_and_what_is_done_is_not_done_again(
    speaking, capsys, monkeypatch, tmp_path
) -> None:
    prompts, output = tmp_path / "prompts", tmp_path / "answers.jsonl"
    lines = ["Hello there", "", '{"prompt": "Hi", "id": "b"}', "Good day"]
    lines += ['{"messages": [{"role": "user", "content": "Hi"}], "id": 4}']
    prompts.write_text("\n".join(lines) + "\n")
    command = ("generate", speaking, "--prompts-file", prompts, "--output", output, *GREEDY)
    code, out, err = run(capsys, *command)
    assert (code, out) == (0, ""), err
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer.get("id") for answer in answers] == [None, "b", None, 4]
    assert answers[0]["text"] == greedy(speaking, capsys)
    whole = output.read_bytes()
    # Cut in the middle of the third, as a crash leaves it.
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    output.write_bytes(whole[: ends[1] + 20])
    code, _, err = run(capsys, *command)
    assert code == 0
    assert "2 of 4 prompts are answered already" in err
    again = [json.loads(line) for line in output.read_text().splitlines()]
    assert [a["text"] for a in again] == [a["text"] for a in answers]
    before = output.read_bytes()
    with monkeypatch.context() as patched:
        # Nothing is left to be computed, so nothing is loaded.
        patched.setattr("triforce_core.engine.Engine.from_pretrained", None)
        code, _, err = run(capsys, *command)
    assert (code, "all 4 prompts are answered already" in err) == (0, True)
    assert output.read_bytes() == before
    # Other prompts have nothing to do with these answers.
    prompts.write_text("Something else\n")
    code, _, err = run(capsys, *command)
    assert code == 2
    assert "line 1, is no answer to these prompts" in err
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no prompt"),
        ('{"prompt": 3}', 'line 1: its "prompt" is no text'),
        ('fine\n{"prompt": "x", "extra": 1}', "line 2: has 'extra'"),
        ("{", "line 1: begins as JSON and is none"),
        ('{"id": 1}', 'line 1: needs either a "prompt" or "messages"'),
        (r'{"id": ["\ud800"], "prompt": "Hi"}', "line 1: the id is not UTF-8 text"),
    ],
)
def test_prompts_that_cannot_be_read_are_named(
    speaking, capsys, tmp_path, content: str, said: str
) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text(content)
    command = ("generate", speaking, "--prompts-file", prompts, "--output", tmp_path / "answers")
    code, _, err = run(capsys, *command)
    assert code == 2
    assert said in err
    assert not (tmp_path / "answers").exists()


def test_a_prompt_that_is_too_long_is_named_by_its_line(speaking, capsys, tmp_path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("Hi\n\n" + "x" * 600 + "\nHello\n")
    command = ("generate", speaking, "--prompts-file", prompts, "--output", tmp_path / "answers")
    code, _, err = run(capsys, *command)
    assert code == 2
    assert f"{prompts}, line 3: 600 prompt tokens" in " ".join(err.split())
    assert not (tmp_path / "answers").exists()


def test_what_is_no_file_of_answers_is_left_as_it_is(speaking, capsys, tmp_path) -> None:
    prompts, notes = tmp_path / "prompts", tmp_path / "notes"
    prompts.write_text("Hello")
    notes.write_text("my only notes")
    base = ("generate", speaking, "--prompts-file", prompts, *GREEDY)
    for output, said in ((notes, "ends in what is no answer"), (prompts, "answers")):
        before = output.read_text()
        code, _, err = run(capsys, *base, "--output", output)
        assert (code, said in err) == (2, True), err
        assert output.read_text() == before


def test_a_prompts_file_and_its_output_go_together(speaking, capsys, tmp_path) -> None:
    for options, said in (
        (("--prompts-file", "x"), "go together"),
        (("--prompt", "x", "--output", "y"), "go together"),
        (("--prompts-file", "x", "--output", "y", "--json"), "no --json or --stats"),
        (("--prompts-file", "x", "--prompt", "y"), "not allowed with"),
    ):
        code, _, err = run(capsys, "generate", speaking, *options)
        assert (code, said in err) == (2, True), err


def test_a_saved_context_spares_reading(speaking, capsys, tmp_path) -> None:
    context, stats = tmp_path / "context", tmp_path / "stats.json"
    prompt = "A rather long beginning of a text that is read only once."
    base = ("generate", speaking, *GREEDY, "--quiet")
    first = run(capsys, *base, "--prompt", prompt, "--save-context", context)
    assert first[0] == 0
    again = run(
        capsys, *base, "--prompt", prompt, "--load-context", context, "--stats", stats, "-c", 200
    )
    assert again[:2] == first[:2]
    assert json.loads(stats.read_text())["reused_tokens"] == len(prompt) - 1
    code, _, err = run(capsys, *base, "--prompt", prompt, "--load-context", tmp_path / "none")
    assert code == 2
    assert "cannot read a context from" in err
    code, _, err = run(
        capsys, *base, "--prompt", prompt, "--load-context", context, "--save-context", context
    )
    assert code == 2, "what is read is not written over"
    # Another question about the same beginning, which is shorter than what was saved.
    other = prompt[:30] + " And so?"
    code, _, err = run(
        capsys, *base, "--prompt", other, "-n", 2, "--load-context", context, "--stats", stats
    )
    assert code == 0, err
    assert json.loads(stats.read_text())["reused_tokens"] == 30
    options = (*base[:-1], "-n", 2, "--load-context", context)
    none = "and none is reused: a prompt must begin with the saved text"
    assert none in run(capsys, *options, "-p", "Zebra")[2]
    assert none not in run(capsys, *options, "-p", prompt)[2]


def test_several_prompts_of_a_file_at_once_have_the_answers_they_have_alone(
    speaking, capsys, tmp_path
) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("\n".join(f"text {i} " * (i + 1) for i in range(7)))
    told = {}
    for count in (1, 3):
        output = tmp_path / f"answers{count}"
        command = ("generate", speaking, "--prompts-file", prompts, "--output", output, *GREEDY)
        trace = tmp_path / f"trace{count}"
        code, _, err = run(capsys, *command, "--sequences", count, "--trace", trace)
        assert read_trace(trace)["compute"]
        assert (code, "7 of 7 prompts answered" in err) == (0, True)
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        told[count] = {line["index"]: line["text"] for line in lines}
    assert len(told[1]) == 7
    assert told[1] == told[3]
    code, _, err = run(capsys, "generate", speaking, "-p", "x", "--sequences", 2)
    assert (code, "--sequences is for" in err) == (2, True)
