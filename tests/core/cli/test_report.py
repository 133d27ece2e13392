"""The table of a run: figures that mean what they seem to."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from command import GREEDY, least_memory, run
from test_tables import RUN

from triforce_core.cli.terminal.report import accepted_drafts, print_run

RESIDENT = ("--device-memory", "100MiB")


def drafted(share: float | None, examined: int) -> dict:
    return {
        "acceptance": {"target": share, "retrieval": None},
        "draft_tokens": {"examined": examined, "inner_examined": 0},
    }


@pytest.mark.parametrize(
    ("share", "examined", "said"),
    [
        (None, 0, None),
        (0.0, 1, "0 of 1 draft tokens"),
        (2 / 3, 3, "2 of 3 draft tokens"),
        (0.0, 20, "0.0% of draft tokens"),
        (0.974, 1000, "97.4% of draft tokens"),
    ],
)
def test_a_share_of_few_draft_tokens_is_a_count(share, examined, said) -> None:
    assert accepted_drafts(drafted(share, examined)) == said
    assert accepted_drafts(drafted(share, examined), "retrieval") is None


def test_an_emulated_link_is_told_of_where_something_crossed_it(
    speaking: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ("generate", speaking, "-p", "Hello " * 40, *GREEDY)
    streaming = (*least_memory(*command), "--link-bandwidth", "1GB/s")
    for memory, crossed in ((RESIDENT, False), (streaming, True)):
        code, _, err = run(capsys, *command, *memory)
        assert code == 0
        assert ("EMULATED" in err) is crossed
        assert "nothing crossed" not in err


def test_reused_tokens_are_not_counted_as_prefilled(speaking, capsys, tmp_path) -> None:
    file = tmp_path / "context"
    options = (speaking, *GREEDY, "-c", "100")
    code, _, err = run(capsys, "generate", *options, "-p", "Hello", "--save-context", file)
    assert (code, "(5 tokens)" in err) == (0, True), err
    again = ("-p", "Hello there", "--load-context", file)
    code, _, err = run(capsys, "generate", *options, *again)
    assert (code, "(6 tokens, 5 more reused)" in err) == (0, True), err


def test_an_interrupt_before_the_first_token_is_reported(capsys) -> None:
    stats = RUN | {"new_tokens": 0, "seconds_per_token": None, "finish_reason": "interrupted"}
    print_run(stats)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "98797 tokens; interrupted after 98.70 s, before the first new token" in said
    assert "time to first token" not in said


def test_one_token_and_one_pass_are_singular(speaking, capsys) -> None:
    """Where all KV is resident the plan counts no blocks of it."""
    options = ("--temperature", "0", "-n", "2", *RESIDENT)
    code, _, err = run(capsys, "generate", speaking, "-p", "H", *options)
    said = " ".join(err.replace("│", " ").split())
    assert code == 0
    assert "s of prefill (1 token)" in said
    assert ", 1 pass of 1.00 tokens; stopped at the limit of tokens" in said
    assert "layers' weights resident, all KV resident, " in said


def test_a_saved_context_without_a_prompt_says_what_it_needs(
    speaking, capsys, tmp_path, monkeypatch
) -> None:
    file = tmp_path / "context"
    options = (speaking, *GREEDY, "-c", "100")
    assert run(capsys, "generate", *options, "-p", "Hello", "--save-context", file)[0] == 0
    monkeypatch.setattr("sys.stdin", StringIO(""))
    code, _, err = run(capsys, "generate", *options, "--load-context", file)
    said = "the prompt is empty; --load-context needs one that begins with the saved text"
    assert (code, said in err) == (2, True), err
