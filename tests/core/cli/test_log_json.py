"""`--log-json`: whatever goes to standard error is a JSON object a line."""

from __future__ import annotations

import json
import logging
import logging.config
import warnings
from datetime import datetime

import pytest

from triforce_core.cli.main import main
from triforce_core.cli.terminal.output import JSON_LOGGING, JsonLines, log_lines


@pytest.fixture(autouse=True)
def plain_again():
    yield
    log_lines(as_json=False)


def lines(capsys) -> list[dict]:
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    for line in said:
        datetime.fromisoformat(line["time"])
        assert line["level"] in ("info", "warning", "error")
        assert line["message"]
        assert not line["message"].startswith("triforce: ")
    return said


def test_a_run_is_told_in_json(capsys, speaking) -> None:
    options = ("--prompt", "a b c", "--device", "cpu", "-n", "8", "--seed", "1")
    assert main(["generate", str(speaking), *options, "--log-json"]) == 0
    said = lines(capsys)
    assert any(line["message"].startswith("plan: ") for line in said)
    assert said[-1]["stats"]["new_tokens"] <= 8
    assert said[-1]["stats"]["seed"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "{model}", "--prompt", "x", "--top-p", "7"), "--top-p"),
        (("generate", "{model}", "--promt", "x"), "unrecognized arguments"),
        (("generate", "/nowhere/at/all", "--prompt", "x"), "/nowhere/at/all"),
    ],
)
def test_what_is_refused_is_an_error_in_json(capsys, speaking, arguments, message: str) -> None:
    arguments = [str(argument).format(model=speaking) for argument in arguments]
    try:
        code = main([*arguments, "--log-json"])
    except SystemExit as ended:
        code = ended.code
    assert code
    (line,) = lines(capsys)
    assert line["level"] == "error"
    assert message in line["message"]


def test_warnings_are_lines_and_are_text_again_afterwards(capsys) -> None:
    log_lines(as_json=True)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        log_lines(as_json=True)
        warnings.warn("something is slow", RuntimeWarning, stacklevel=1)
    (line,) = lines(capsys)
    assert (line["level"], line["category"]) == ("warning", "RuntimeWarning")
    assert line["message"] == "something is slow"
    log_lines(as_json=False)
    assert main(["generate", "/nowhere/at/all", "--prompt", "x"])
    assert capsys.readouterr().err.startswith("triforce: ")


def test_records_of_loggers_are_lines_too() -> None:
    record = logging.LogRecord("uvicorn.error", logging.WARNING, "", 1, "port %d", (80,), None)
    line = json.loads(JsonLines().format(record))
    assert (line["level"], line["message"], line["logger"]) == (
        "warning",
        "port 80",
        "uvicorn.error",
    )
    logging.config.dictConfig({**JSON_LOGGING, "root": {}})
