"""transformers `generate` with the weights on the device, in four variants.

The variants are plain decoding, a KV cache in host memory, prompt lookup, and a draft model.
"""

from __future__ import annotations

from rivals.job import Job, Outcome, Refusal
from rivals.models import generate, load


def run(job: Job) -> Outcome:
    """options: arguments of `generate`; `assistant` is the path of a draft model"""
    options = dict(job.options)
    if options.get("cache_implementation") == "offloaded" and job.device == "cpu":
        raise Refusal("it needs a CUDA GPU")
    model = load(job)
    if assistant := options.pop("assistant", None):
        options["assistant_model"] = load(job, assistant)
    return generate(model, job, **options)
