"""`gpu_check.sh`, from its first line to its JSON, on tiny shapes and a simulated GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_gpu import REAL

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(REAL, reason="simulates a GPU, and there is one")
@pytest.mark.parametrize(
    "mode",
    ["", "SPLIT", "LARGE", "RECURRENT", "EXPERTS", "SAME_BITS", "GRAPHS", "PROCESSOR"],
)
def test_every_part_of_the_check_ends_well(tmp_path: Path, mode: str) -> None:
    result = tmp_path / "result.json"
    variables = {"SIMULATED_GPU": "1", "PYTHON": sys.executable} | ({mode: "1"} if mode else {})
    done = subprocess.run(
        ["bash", SCRIPT, result], env=os.environ | variables, capture_output=True, text=True
    )
    parts = json.loads(result.read_text())["parts"]
    failed = {name: part for name, part in parts.items() if part["exit_code"]}
    assert not failed, done.stderr[-4000:]
    assert done.returncode == 0
    figures = {name: part["output"] for name, part in parts.items()}
    assert all("rows" in figures[name] for name in figures if name.startswith(("llama", "qwen")))
