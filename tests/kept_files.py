"""What people keep beside checkpoints: of each kind a sound file, how it is damaged, its reader.

Each takes a model with a tokenizer and a folder, and gives a Kept while it is open.
"""

from __future__ import annotations

import json
import random
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import mutants
from helpers import BLOCK, PLACEMENTS, random_ids

from triforce_core import Engine, SamplingParams
from triforce_core.cli.generate.prompt import read_messages
from triforce_core.cli.generate.prompts_file import Answers, Task, read_tasks
from triforce_core.cli.main import _parser
from triforce_core.cli.settings_file import kept_flags
from triforce_core.loading.open_model import OpenModel
from triforce_core.plan.plan import Plan
from triforce_offload.errors import TriforceError, UsageError

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


class Kept(NamedTuple):
    """read: reads a mutant, and holds what it gives against what must be so of it"""

    sound: bytes
    damage: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path], object]


class Outcome(NamedTuple):
    """Mutants that were read, and refused; what else came of some; processor time of all."""

    taken: int
    refused: int
    faults: list[str]
    seconds: float


def with_sums(whole: bytes) -> bytes:
    """A saved context whose checksums are made right, if it is one."""
    try:
        begin = 8 + int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8:begin])
        header.pop("__metadata__", None)
        places = {name: slice(*part["data_offsets"]) for name, part in header.items()}
        place = places.pop("checksums")
        data = whole[begin:]
        sums = [zlib.crc32(whole[8:begin]), *(zlib.crc32(data[it]) for it in places.values())]
        told = struct.pack(f"<{len(sums)}q", *sums)
        return whole[:begin] + data[: place.start] + told + data[place.stop :]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return whole


@contextmanager
def contexts(model: Path, folder: Path) -> Iterator[Kept]:
    """Whatever it is given, the engine's next request is right."""
    options = {"device": "cpu", "max_context": 100, "block_tokens": BLOCK, "budget": 32}
    prompt, params = random_ids(50), SamplingParams(3, temperature=0)
    with Engine.from_pretrained(model, placement=PLACEMENTS["kv-in-part"], **options) as engine:
        expected = engine.generate(prompt, params)
        engine.save_context(folder / "sound", {"conversation": json.dumps([{"role": "user"}])})

        sound = (folder / "sound").read_bytes()

        def damage(whole: bytes, choose: random.Random) -> bytes:
            damaged = mutants.damage_bytes(whole, choose)
            # Or nothing but checksums would be tried.
            return with_sums(damaged) if choose.random() < 0.5 else damaged

        def read(path: Path) -> None:
            loaded = engine.load_context(path)
            assert loaded.tokens == len(engine.context_tokens) > 0
            whole = path.read_bytes()
            assert whole == with_sums(whole), "what is not as it was written is taken over"

        yield Kept(sound, damage, read)
        found = engine.generate(prompt, params, reuse=False)
    assert found.token_ids == expected.token_ids


@contextmanager
def plans(model: Path, folder: Path) -> Iterator[Kept]:
    """What is read can be written, and read again as the same."""
    file, again = folder / "plan", folder / "again"
    with Engine.from_pretrained(model, device="cpu", max_context=100) as engine:
        engine.plan.write(file)

    def read(path: Path) -> None:
        plan = Plan.read(path)
        plan.write(again)
        assert Plan.read(again).as_dict() == plan.as_dict()

    yield Kept(file.read_bytes(), mutants.damage_json, read)


@contextmanager
def settings(model: Path, folder: Path) -> Iterator[Kept]:
    """What is read is flags."""
    _, commands = _parser()

    def read(path: Path) -> None:
        for command in ("generate", "chat", "plan"):
            flags = kept_flags(command, commands, {"TRIFORCE_SETTINGS": str(path)})
            assert all(flag.startswith("--") for flag in flags)
            with suppress(SystemExit):
                commands[command].parse_args([*flags, "model"])

    yield Kept(SETTINGS, mutants.damage_bytes, read)


@contextmanager
def answers(model: Path, folder: Path) -> Iterator[Kept]:
    """What is no answer is never written over."""
    tasks = [Task(i, [1], f"{i:016x}") for i in range(4)]
    lines = [json.dumps({"index": t.index, "of": t.digest, "text": "ü\n"}) for t in tasks]

    def read(path: Path) -> None:
        before = path.read_bytes()
        try:
            Answers(str(path), tasks).close()
        except UsageError:
            assert path.read_bytes() == before
            raise
        kept = path.read_bytes()
        assert before.startswith(kept)
        assert b"\n" not in before[len(kept) :]

    yield Kept(("\n".join(lines) + "\n").encode(), mutants.damage_bytes, read)


@contextmanager
def messages(model: Path, folder: Path) -> Iterator[Kept]:
    """What is read is a prompt of the model's tokens."""
    turns = [
        ("system", "Be brief."),
        ("user", "Höw?"),
        ("assistant", "So."),
        ("user", "\U0001f600"),
    ]
    sound = json.dumps([{"role": role, "content": text} for role, text in turns]).encode()
    with OpenModel.at(model) as opened:

        def read(path: Path) -> None:
            tokens = opened.tokenizer.chat(read_messages(str(path)))
            assert all(0 <= token < opened.checkpoint.config.vocab for token in tokens)

        yield Kept(sound, mutants.damage_json, read)


@contextmanager
def prompts(model: Path, folder: Path) -> Iterator[Kept]:
    """The same of a file of many."""
    lines = [
        "A line of text",
        json.dumps({"prompt": "One\nof JSON", "id": 7}),
        json.dumps({"messages": [{"role": "user", "content": "Hello"}]}),
    ]
    with OpenModel.at(model) as opened:
        tokens = opened.tokenizer

        def read(path: Path) -> None:
            for task in read_tasks(str(path), tokens, tokens.chat, None, []):
                assert all(0 <= it < opened.checkpoint.config.vocab for it in task.token_ids)

        yield Kept("\n".join(lines).encode(), mutants.damage_bytes, read)


KEPT = {
    "context": contexts,
    "plan": plans,
    "settings": settings,
    "answers": answers,
    "messages": messages,
    "prompts": prompts,
}


def try_mutants(name: str, model: Path, folder: Path, first: int, last: int) -> Outcome:
    """Reads mutants first..last-1 of a file. Each is read or refused with a typed error."""
    damaged = folder / "damaged"
    taken, refused, faults = 0, 0, []
    with KEPT[name](model, folder) as kept:
        began = time.process_time()
        for seed in range(first, last):
            damaged.write_bytes(kept.damage(kept.sound, random.Random(f"{name} {seed}")))
            try:
                kept.read(damaged)
                taken += 1
            except TriforceError:
                refused += 1
            except Exception as error:
                faults.append(f"{name} {seed}: {type(error).__name__}: {error}"[:300])
        seconds = time.process_time() - began
    return Outcome(taken, refused, faults, seconds)
