"""Z1 of what people keep: damaged contexts, plans, settings and answers end in one typed error."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import mutants
import pytest
from helpers import BLOCK, PLACEMENTS, random_ids

from offload.errors import TriforceError, UsageError
from triforce_core import Engine, SamplingParams
from triforce_core.cli.main import _parser
from triforce_core.cli.prompts_file import Answers, Task
from triforce_core.cli.settings_file import kept_flags
from triforce_core.planner.plan import Plan

MUTANTS = int(os.environ.get("TRIFORCE_MUTANTS", "2000"))
# Of the mutants of a file are taken, and are refused.
LEAST = MUTANTS / 20
SETTINGS = b"""\
device-memory = "22GiB"
temperature = 0.7
stop = ["a", "b"]
no-pin = true
[chat]
ctx-size = 4096
system = "Be brief."
[plan]
gpu = "rtx4090"
"""


def attempt(
    sound: bytes,
    damage: Callable[[bytes, random.Random], bytes],
    path: Path,
    read: Callable[[], object],
    count: int = MUTANTS,
) -> tuple[int, int]:
    """How many mutants of a file were read, and how many refused. Anything else is raised."""
    taken = refused = 0
    for seed in range(count):
        path.write_bytes(damage(sound, random.Random(seed)))
        try:
            read()
            taken += 1
        except TriforceError:
            refused += 1
    return taken, refused


@pytest.mark.slow
def test_contexts(tiny, tmp_path) -> None:
    path, _ = tiny("llama")
    file, damaged = tmp_path / "sound", tmp_path / "damaged"
    options = {"device": "cpu", "max_context": 100, "block_tokens": BLOCK, "budget": 32}
    with Engine.from_pretrained(path, placement=PLACEMENTS["kv-in-part"], **options) as engine:
        expected = engine.generate(random_ids(50), SamplingParams(3, temperature=0))
        engine.save_context(file, {"conversation": json.dumps([{"role": "user"}])})

        def read() -> None:
            # Of the header, which comes first, or of the numbers alone.
            loaded = engine.load_context(damaged)
            assert loaded.tokens == len(engine.context_tokens) > 0

        taken, refused = attempt(file.read_bytes(), mutants.damage_bytes, damaged, read)
        found = engine.generate(random_ids(50), SamplingParams(3, temperature=0), reuse=False)
    assert found.token_ids == expected.token_ids
    assert min(taken, refused) > LEAST


def test_plans(tiny, tmp_path) -> None:
    path, _ = tiny("llama")
    file = tmp_path / "plan.json"
    with Engine.from_pretrained(path, device="cpu", max_context=100) as engine:
        engine.plan.write(file)
    damaged, again = tmp_path / "damaged", tmp_path / "again"

    def read() -> None:
        plan = Plan.read(damaged)
        plan.write(again)
        assert Plan.read(again).as_dict() == plan.as_dict()

    taken, refused = attempt(file.read_bytes(), mutants.damage_json, damaged, read)
    assert min(taken, refused) > LEAST


def test_settings(tmp_path) -> None:
    path = tmp_path / "settings.toml"
    _, commands = _parser()

    def read() -> None:
        for command in ("generate", "chat", "plan"):
            flags = kept_flags(command, commands, {"TRIFORCE_SETTINGS": str(path)})
            assert all(flag.startswith("--") for flag in flags)
            with suppress(SystemExit):
                commands[command].parse_args([*flags, "model"])

    path.write_bytes(SETTINGS)
    read()
    taken, refused = attempt(SETTINGS, mutants.damage_bytes, path, read)
    assert min(taken, refused) > LEAST


def test_answers_that_an_earlier_run_wrote(tmp_path) -> None:
    """What is no answer is never written over."""
    path = tmp_path / "answers"
    tasks = [Task(i, [1], f"{i:016x}") for i in range(4)]
    lines = [json.dumps({"index": t.index, "of": t.digest, "text": "ü\n"}) for t in tasks]
    sound = ("\n".join(lines) + "\n").encode()
    before = b""

    def read() -> None:
        nonlocal before
        before = path.read_bytes()
        try:
            Answers(str(path), tasks).close()
        except UsageError:
            assert path.read_bytes() == before
            raise
        kept = path.read_bytes()
        assert before.startswith(kept)
        assert b"\n" not in before[len(kept) :]

    taken, refused = attempt(sound, mutants.damage_bytes, path, read)
    assert min(taken, refused) > LEAST
