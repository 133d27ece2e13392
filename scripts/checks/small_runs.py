"""Runs of a tiny model that are interrupted or killed, each in a fork of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from checks.tests_folder import use_tests
from frame import Figures


@contextmanager
def tiny_model() -> Iterator[tuple[Path, Path]]:
    """Yield a folder and the path of a model in it. The model's KV streams in the runs."""
    use_tests()
    from helpers import add_tokenizer, make_model

    with TemporaryDirectory() as folder:
        model = Path(folder, "model")
        make_model("llama", model)
        add_tokenizer(model)
        yield Path(folder), model


def forks(model: Path, folder: Path, moments: list[Figures]) -> list[Figures]:
    """Run the model once for each moment. moments: when each run is interrupted or killed"""
    import interrupted_runs

    done = subprocess.run(
        [sys.executable, interrupted_runs.__file__, str(model), str(folder)],
        input=json.dumps(moments),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
