"""Z1: damaged checkpoints end in a typed error or in a model that loads, and cost little."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mutants
import pytest

MUTANTS = int(os.environ.get("TRIFORCE_MUTANTS", "500"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    mutants.make_sound(root)
    return root


@pytest.mark.timeout(600)
@pytest.mark.one_in(12)
@pytest.mark.parametrize("count", [10, pytest.param(MUTANTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", mutants.TARGETS)
def test_damaged_checkpoints_end_in_typed_errors(sound, tmp_path, target: str, count: int) -> None:
    root = Path(shutil.copytree(sound, tmp_path / "work"))
    process = subprocess.run(
        [sys.executable, mutants.__file__, str(root), target, "0", str(count)],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    *lines, done = process.stdout.strip().splitlines() or [""]
    faults = [line for line in lines if line.startswith("FAULT")]
    assert process.returncode == 0, f"{faults}\n{process.stderr[-2000:]}"
    assert faults == []
    assert done.startswith("done")
    assert int(done.split()[1]) < count, "some mutants must be refused"
