"""transformers `generate`, weights on the device: plain, with its cache in host memory, with prompt
lookup, or with a small model that drafts.
"""

from __future__ import annotations

from transformers import AutoModelForCausalLM

from rivals.clock import generate
from rivals.job import Job, Outcome
from rivals.models import dtype, need_cuda, prepare


def run(job: Job) -> Outcome:
    """options: arguments of `generate`; `assistant`: the path of a small model."""
    options = dict(job.options)
    if options.get("cache_implementation") == "offloaded":
        need_cuda(job)
    assistant = options.pop("assistant", None)
    prepare(job)
    model = (
        AutoModelForCausalLM.from_pretrained(job.model, trust_remote_code=False, dtype=dtype(job))
        .to(job.device)
        .eval()
    )
    if assistant:
        small = AutoModelForCausalLM.from_pretrained(
            assistant, trust_remote_code=False, dtype=dtype(job)
        )
        options["assistant_model"] = small.to(job.device).eval()
    return generate(model, job, **options)
