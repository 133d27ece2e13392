"""Settings of `triforce bench`."""

from __future__ import annotations

from dataclasses import dataclass

from triforce_offload.errors import UsageError

TESTS = ("link", "pass", "retrieval", "drafter", "prefill", "decode")


@dataclass(frozen=True)
class BenchSettings:
    """Settings of `triforce bench`. Raises UsageError for values out of range.

    shape, draft_shape: shapes that `read_shape` accepts; draft_shape may be "none"
    context: the tokens in the KV cache before the timed work
    draft_tokens: the draft tokens that a pass verifies
    budget: as in MethodSettings
    new_tokens: the tokens decoded one by one after the prompt of `prefill` and `decode`
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
