"""transformers `generate`, weights on the device: plain, with its cache in host memory, with prompt
lookup, or with a small model that drafts.
"""

from __future__ import annotations

from rivals.job import Job, Outcome, Refusal
from rivals.models import generate, load


def run(job: Job) -> Outcome:
    """options: arguments of `generate`; `assistant`: the path of a small model."""
    options = dict(job.options)
    if options.get("cache_implementation") == "offloaded" and job.device == "cpu":
        raise Refusal("it needs a CUDA GPU")
    model = load(job)
    if assistant := options.pop("assistant", None):
        options["assistant_model"] = load(job, assistant)
    return generate(model, job, **options)
