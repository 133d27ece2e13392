"""DeepSpeed ZeRO-Inference: stage 3 with parameters in pinned host memory.

The settings are those of DeepSpeedExamples `inference/huggingface/zero_inference`. Without a GPU it
runs on its CPU accelerator.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from rivals.job import Job, Outcome
from rivals.models import generate, load


def run(job: Job) -> Outcome:
    """Run the job.

    options: `offload` keeps parameters in host memory; `cache` is transformers' cache
        implementation
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu" if job.device == "cpu" else "cuda",
    }
    import deepspeed
    from transformers import AutoConfig
    from transformers.integrations import HfDeepSpeedConfig

    hidden = AutoConfig.from_pretrained(job.model, trust_remote_code=False).hidden_size
    settings = zero_settings(hidden, job)
    # This must exist before the model, so that parameters are created where they stay.
    _kept = HfDeepSpeedConfig(settings)
    model = load(job, device_map=None)
    # The settings say whether to offload; otherwise parameters stay on the device.
    engine = deepspeed.initialize(model=model, config_params=settings)[0]
    arguments = {}
    if job.device != "cpu" and job.options.get("cache"):
        arguments["cache_implementation"] = job.options["cache"]
    outcome = generate(engine.module.eval(), job, **arguments)
    outcome.notes["settings"] = settings["zero_optimization"]
    return outcome


def zero_settings(hidden: int, job: Job) -> dict[str, Any]:
    """Return the settings of the example for a hidden size."""
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_prefetch_bucket_size": 2 * hidden * hidden,
        "stage3_param_persistence_threshold": hidden,
        "stage3_max_live_parameters": 2 * hidden * hidden,
    }
    if job.options["offload"]:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    else:
        # Parameters are never partitioned again once they are gathered.
        zero["stage3_param_persistence_threshold"] = 1 << 40
    return {
        "fp16": {"enabled": job.dtype == "float16"},
        "bf16": {"enabled": job.dtype == "bfloat16"},
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1 << 30,
        "wall_clock_breakdown": False,
    }
