"""Damages checkpoints and tries to load them: `python tests/mutants.py ROOT TARGET FIRST LAST`.

A process of its own, so that a crash is seen as the death of it.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

CPU_SECONDS = 2.0
EXTRA_BYTES = 200 << 20
# Makes transformers import a thousand modules more while it reads the tokenizer.
_MISLEADING = {"dtype": "x"}
# What a parser that calls itself does not come back from.
_DEEP = (b"[" * 5000, b'{"a":' * 5000, b"[" * 200 + b"]" * 200)
# Texts that are no Unicode, end a C string, or are a number that no machine has.
_TEXTS = ('"\\ud800"', '"\\u0000"', '"' + "9" * 5000 + '"', '""')
WORDS = (
    "0",
    "-1",
    "1e309",
    "null",
    "true",
    '"x"',
    "[]",
    "{}",
    "99999999999999999999",
    "1",
    "2.5",
    *_TEXTS,
)


def damage_bytes(data: bytes, choose: random.Random) -> bytes:
    """Flips, cuts, doubles or overwrites some bytes, most often near the start: the header. One in
    twenty times puts brackets there that nothing closes.
    """
    data = bytearray(data)
    for _ in range(choose.choice((1, 1, 2, 8))):
        if not data:
            break
        near = choose.choice((min(64, len(data)), min(4096, len(data)), len(data)))
        at = choose.randrange(near)
        action = choose.randrange(21) // 4
        if action == 0:
            data[at] ^= 1 << choose.randrange(8)
        elif action == 1:
            del data[at:]
        elif action == 2:
            data[at : at + 8] = choose.choice((b"\xff" * 8, b"\0" * 8, b"\0\0\0\0\0\1\0\0"))
        elif action == 3:
            del data[at : at + choose.randrange(1, 9)]
        elif action == 4:
            data[at:at] = data[at : at + choose.randrange(1, 65)]
        else:
            data[at:at] = choose.choice(_DEEP)
    return bytes(data)


def damage_json(data: bytes, choose: random.Random) -> bytes:
    """Replaces, drops or adds a value somewhere in a JSON text; at times only its bytes."""
    if choose.random() < 0.2:
        return damage_bytes(data, choose)
    parsed = json.loads(data)
    for _ in range(choose.choice((1, 1, 1, 2, 4))):
        place = parsed
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = choose.choice(keys)
            if isinstance(place[key], (dict, list)) and place[key] and choose.random() < 0.8:
                place = place[key]
                continue
            action = choose.random()
            if action < 0.6:
                place[key] = json.loads(choose.choice(WORDS))
            elif action < 0.8:
                del place[key]
            elif isinstance(place, dict):
                place[choose.choice(("x", "rope_scaling", "layer_types"))] = place[key]
            else:
                place.append(place[key])
            break
    return json.dumps(parsed).encode()


TARGETS: dict[str, tuple[str, str, Callable[[bytes, random.Random], bytes]]] = {
    "safetensors": ("hf", "model.safetensors", damage_bytes),
    "config": ("hf", "config.json", damage_json),
    "generation": ("hf", "generation_config.json", damage_json),
    "tokenizer": ("hf", "tokenizer.json", damage_json),
    "tokenizer_config": ("hf", "tokenizer_config.json", damage_json),
    "index": ("sharded", "model.safetensors.index.json", damage_json),
    "gguf": ("gguf", "model.gguf", damage_bytes),
}


def make_sound(root: Path) -> None:
    """Writes hf/, sharded/ and gguf/ into `root`: the same tiny model three times."""
    from gguf_files import write_gguf
    from helpers import add_tokenizer, make_model

    model = make_model("llama", root / "hf")
    add_tokenizer(root / "hf")
    model.save_pretrained(root / "sharded", max_shard_size="60KB")
    add_tokenizer(root / "sharded")
    (root / "gguf").mkdir()
    write_gguf(model, root / "gguf" / "model.gguf")


def try_mutants(root: Path, target: str, first: int, last: int) -> None:
    """Loads mutants first..last-1 of a file and generates a token from those that load.

    Runs in a process of its own, whose death by a signal the test sees. Prints a line for each
    outcome that is not allowed.
    """
    from triforce_core import Engine, SamplingParams
    from triforce_offload.errors import CheckpointError, TriforceError

    folder, name, damage = TARGETS[target]
    path = root / folder
    sound_bytes = (path / name).read_bytes()
    engine_path = path / name if folder == "gguf" else path

    def load() -> None:
        with Engine.from_pretrained(
            engine_path, device="cpu", device_memory="1GiB", max_context=32, block_tokens=16
        ) as engine:
            engine.generate([1, 2, 3], SamplingParams(max_new_tokens=2, seed=0))

    load()
    if folder != "gguf":
        # These imports happen once and are no work on a mutant: they are over before any is timed.
        config = path / "config.json"
        sound_config = config.read_bytes()
        config.write_text(json.dumps(json.loads(sound_config) | _MISLEADING))
        try:
            load()
            raise AssertionError(f"{_MISLEADING} no longer misleads the tokenizer")
        except CheckpointError as error:
            assert "tokenizer" in str(error), error
        config.write_bytes(sound_config)
    loaded = refused = 0
    for seed in range(first, last):
        (path / name).write_bytes(damage(sound_bytes, random.Random(f"{target} {seed}")))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.process_time()
        try:
            load()
            loaded += 1
        except TriforceError:
            refused += 1
        except BaseException as error:
            print(f"FAULT {target} {seed}: {type(error).__name__}: {error}"[:300])
        seconds = time.process_time() - began
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory)
        if seconds > CPU_SECONDS:
            print(f"FAULT {target} {seed}: took {seconds:.1f} s of processor time")
        if grown > EXTRA_BYTES + 3 * len(sound_bytes):
            print(f"FAULT {target} {seed}: took {grown >> 20} MiB")
    print(f"done {loaded} {refused}")


if __name__ == "__main__":
    try_mutants(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
