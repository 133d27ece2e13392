"""The request that every system of a comparison gets, and its answer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Job:
    """One text to generate, the same for all systems.

    module, options: the adapter and its options for this system
    model: a directory with dense safetensors and no end token, so that all texts have the same
        length
    gguf: the file that the directory was made from, or its float32 counterpart; None without one
    prompt: token ids
    device: "cpu" or "cuda:0"
    memory_bytes: the memory of the device; None for all of it
    link_bytes_per_second: the rate of an emulated link
    acceptance: the assumed acceptance of each draft token, for random weights
    """

    module: str
    options: dict[str, Any]
    model: str
    prompt: list[int]
    new_tokens: int
    dtype: str
    device: str
    threads: int
    gguf: str | None = None
    temperature: float = 0.0
    seed: int = 0
    memory_bytes: int | None = None
    link_bytes_per_second: float | None = None
    acceptance: float | None = None

    @classmethod
    def from_json(cls, text: str) -> Job:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Outcome:
    """The timing of one generated text, or the reason why there is none.

    tokens: new token ids, or None if the system does not give them
    first_seconds: the time from the request to the first new token
    token_seconds: the time for each token after it
    device_bytes: the peak of the device's memory, or None if it is not counted; on a CPU only our
        engine counts it, for its emulated device
    host_bytes: the peak of the process's resident memory, everything included
    moved_bytes: the bytes moved to the device for each new token
    refusal: why the system cannot run here
    """

    tokens: list[int] | None = None
    first_seconds: float | None = None
    token_seconds: float | None = None
    load_seconds: float | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    moved_bytes: float | None = None
    refusal: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Outcome:
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


class Refusal(Exception):
    """A system cannot run here; the message gives the reason."""
