"""The text that all lossless systems must give, and the logits of each token."""

from __future__ import annotations

import numpy as np
import torch

from rivals.job import Job, Outcome
from rivals.models import load, sampling


def run(job: Job) -> Outcome:
    """Generate the reference.

    options: `path` is the file for the tokens [n] and the logits before each token, [n, vocab]
    """
    model = load(job)
    prompt = torch.tensor([job.prompt], device=job.device)
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **sampling(job),
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = output.sequences[0, len(job.prompt) :].tolist()
    logits = torch.cat(output.logits).float().cpu().numpy()
    np.savez(job.options["path"], tokens=np.array(tokens), logits=logits)
    return Outcome(tokens=tokens)


def difference(path: str, tokens: list[int]) -> tuple[int, float] | None:
    """Return where tokens first differ from the reference, and the gap of the reference's logits.

    The gap is the logit of the reference's token minus that of the other token. It is NaN if only
    the lengths differ. Return None if the tokens are the same.
    """
    with np.load(path) as kept:
        for i, (own, theirs) in enumerate(zip(kept["tokens"], tokens, strict=False)):
            if own != theirs:
                row = kept["logits"][i]
                return i, float(row[own] - row[theirs])
        if len(tokens) != len(kept["tokens"]):
            return min(len(tokens), len(kept["tokens"])), float("nan")
    return None
