"""Shared code of systems that run transformers' models: loading, and timed generation."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from rivals.job import Job, Outcome, Refusal


def load(job: Job, path: str | None = None, **placing: Any) -> torch.nn.Module:
    """Load the job's model, or the one at `path`.

    placing: arguments such as device_map; without any, the model goes to the job's device
    """
    from transformers import AutoModelForCausalLM

    prepare(job)
    model = AutoModelForCausalLM.from_pretrained(
        path or job.model, trust_remote_code=False, dtype=getattr(torch, job.dtype), **placing
    )
    return (model if placing else model.to(job.device)).eval()


def prepare(job: Job) -> None:
    """Set the threads and the GPU memory limit, and silence transformers."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(job.threads)
    import transformers

    transformers.logging.set_verbosity_error()
    if job.device == "cpu":
        return
    if not torch.cuda.is_available():
        raise Refusal("it needs a CUDA GPU")
    if job.memory_bytes:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.memory_bytes / total))


class Clock(BaseStreamer):
    """A record of (seconds, tokens so far) for each output of `generate`, the prompt first."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seen: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        # Reading one value on the host waits until the GPU has produced the tokens.
        value.flatten()[-1].item()
        now = time.perf_counter() - self.began
        before = self.seen[-1][1] if self.seen else -value.numel()
        self.seen.append((now, before + value.numel()))

    def end(self) -> None:
        pass


def sampling(job: Job) -> dict[str, Any]:
    """Return arguments of `generate`. Texts have the full length: the model has no end token."""
    arguments: dict[str, Any] = {"max_new_tokens": job.new_tokens, "do_sample": False}
    if job.temperature:
        arguments |= {"do_sample": True, "temperature": job.temperature, "top_p": 0.9, "top_k": 0}
    return arguments


def generate(model: torch.nn.Module, job: Job, **arguments: Any) -> Outcome:
    """Generate one text, after a short one for warm-up."""
    prompt = torch.tensor([job.prompt], device=job.device)
    mask = torch.ones_like(prompt)
    wanted = sampling(job)
    with torch.inference_mode():
        short = wanted | {"max_new_tokens": 2}
        model.generate(prompt[:, :32], attention_mask=mask[:, :32], **short, **arguments)
        torch.manual_seed(job.seed)
        if job.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        clock = Clock()
        output = model.generate(prompt, attention_mask=mask, streamer=clock, **wanted, **arguments)
    first, (last, count) = clock.seen[1], clock.seen[-1]
    return Outcome(
        tokens=output[0, len(job.prompt) :].tolist(),
        first_seconds=first[0],
        token_seconds=(last - first[0]) / (count - first[1]),
        device_bytes=None if job.device == "cpu" else torch.cuda.max_memory_allocated(),
    )
