"""What adapters of transformers' models have in common."""

from __future__ import annotations

import os

import torch

from rivals.job import Job, Refusal


def prepare(job: Job) -> None:
    """Threads, quiet, and the cap of the GPU's memory."""
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


def dtype(job: Job) -> torch.dtype:
    return getattr(torch, job.dtype)


def need_cuda(job: Job) -> None:
    if job.device == "cpu":
        raise Refusal("it needs a CUDA GPU")
