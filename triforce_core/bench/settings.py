"""What `triforce bench` times."""

from __future__ import annotations

from dataclasses import dataclass

from triforce_offload.errors import UsageError

TESTS = ("link", "pass", "retrieval", "drafter", "prefill", "decode")


@dataclass(frozen=True)
class BenchSettings:
    """Raises UsageError for values out of range.

    shape, draft_shape: as `read_shape` takes them; draft_shape may be "none"
    context: tokens in the KV cache before what is timed. draft_tokens: verified by a pass.
    budget: as MethodSettings has it
    new_tokens: decoded one by one after the prompt that `prefill` and `decode` read
    """

    shape: str = "smollm2-135m"
    context: int = 4096
    draft_shape: str = "llama-68m"
    tests: tuple[str, ...] = TESTS
    repeats: int = 5
    draft_tokens: int = 24
    budget: int | None = None
    new_tokens: int = 16

    def __post_init__(self) -> None:
        for test in self.tests:
            if test not in TESTS:
                raise UsageError(f"test {test!r} is not one of {', '.join(TESTS)}")
        for name, least in (("context", 64), ("repeats", 1), ("draft_tokens", 1)):
            if getattr(self, name) < least:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} must be {least} or more, got {getattr(self, name)}")
