"""triforce-offload, through its Python interface."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from rivals.job import Job, Outcome, Refusal


def run(job: Job) -> Outcome:
    """Run the job.

    options: engine options; `in_memory`: whether everything may be resident; `as_stored`: whether
        the file's blocks are kept, as llama.cpp keeps them; `policies`: policies
        of the published code to use; `resident_blocks`, `kv_slots`: the placement of streamed KV
    """
    from rivals.published_policies import installed
    from triforce_core import Engine, SamplingParams
    from triforce_offload.errors import TriforceError
    from triforce_offload.plan.placement import Placement

    options: dict[str, Any] = dict(job.options)
    in_memory = options.pop("in_memory", False)
    model = _model(job, as_stored=options.pop("as_stored", False))
    policies = options.pop("policies", ())
    text_tokens = len(job.prompt) + job.new_tokens
    if "kv_slots" in options:
        resident, slots = options.pop("resident_blocks"), options.pop("kv_slots")
        options["placement"] = Placement((), True, resident, 0, slots, 2)
    elif job.device != "cpu" or not in_memory:
        options["device_memory"] = job.memory_bytes
    if job.device == "cpu" and not in_memory:
        options.setdefault("link_bandwidth", job.link_bytes_per_second)
    blocks = text_tokens // options.get("block_tokens", text_tokens)
    params = SamplingParams(job.new_tokens, job.temperature, seed=job.seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(installed(policies, blocks))
        if job.acceptance is not None:
            stack.enter_context(assumed(job.acceptance))
        try:
            engine = stack.enter_context(
                Engine.from_pretrained(
                    model,
                    device=job.device,
                    threads=job.threads,
                    dtype=job.dtype,
                    max_context=text_tokens,
                    tokenizer=NoTokenizer(),
                    **options,
                )
            )
            engine.generate(job.prompt[:32], SamplingParams(2, job.temperature), reuse=False)
            result = engine.generate(job.prompt, params, reuse=False)
        except TriforceError as error:
            raise Refusal(str(error)) from error
    stats = result.stats
    return Outcome(
        tokens=result.token_ids,
        first_seconds=stats["seconds"]["prefill"],
        token_seconds=stats["seconds_per_token"],
        load_seconds=stats["seconds"]["load"],
        device_bytes=stats["memory"]["device_peak_bytes"],
        moved_bytes=stats["link"]["bytes_to_device"] / max(1, stats["new_tokens"] - 1),
        notes={
            name: stats[name]
            for name in ("levels", "passes", "tokens_per_pass", "acceptance", "placement", "link")
        },
    )


def _model(job: Job, *, as_stored: bool) -> str:
    if as_stored and not job.gguf:
        raise Refusal("the model is no GGUF file, whose blocks it would keep")
    return job.gguf if as_stored and job.gguf else job.model


class NoTokenizer:
    """A replacement for a tokenizer, because texts are compared as tokens."""

    def encode(self, text: str) -> list[int]:
        raise RuntimeError("a prompt is tokens here")

    def decode(self, tokens: list[int]) -> str:
        return ""


@contextlib.contextmanager
def assumed(acceptance: float) -> Iterator[None]:
    """Accept every draft token with this probability.

    The acceptance of random weights means nothing. The speed is real; the text is not the model's.
    """
    from triforce_core.decoding.acceptance import Draft, Verdict
    from triforce_core.requests import request

    class Assumed:
        def __init__(self, seed: int) -> None:
            self._coins = torch.Generator().manual_seed(seed)

        def draw(self, probs: torch.Tensor, position: int) -> torch.Tensor:
            return probs.argmax(-1)

        def accept(self, draft: Draft, probs: torch.Tensor, position: int) -> Verdict:
            held = torch.rand(len(draft.tokens), generator=self._coins) < acceptance
            count = int(held.int().cumprod(0).sum())
            return Verdict(
                torch.tensor(count, device=probs.device), probs[count].argmax().to(torch.int64)
            )

    before = request.make_rule
    request.make_rule = lambda name, seed, device: Assumed(seed)
    try:
        yield
    finally:
        request.make_rule = before
