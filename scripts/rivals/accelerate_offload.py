"""accelerate: weights in host memory or on disk, brought for each module's forward by hooks."""

from __future__ import annotations

import tempfile

from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM

from rivals.clock import generate
from rivals.job import Job, Outcome
from rivals.models import dtype, prepare


def run(job: Job) -> Outcome:
    """options: `how` is cpu_offload, disk_offload, auto (device_map, with the same memory), or
    memory (device_map of one device).
    """
    prepare(job)
    how = job.options["how"]
    with tempfile.TemporaryDirectory() as folder:
        placing = {}
        if how == "memory":
            placing = {"device_map": {"": job.device}}
        elif how == "auto" and job.memory_bytes:
            device = "cpu" if job.device == "cpu" else 0
            memory = {device: job.memory_bytes}
            if device != "cpu":
                memory["cpu"] = 1 << 40
            placing = {"device_map": "auto", "max_memory": memory, "offload_folder": folder}
        model = AutoModelForCausalLM.from_pretrained(
            job.model, trust_remote_code=False, dtype=dtype(job), **placing
        ).eval()
        if how == "cpu_offload":
            cpu_offload(model, execution_device=job.device)
        elif how == "disk_offload":
            disk_offload(model, folder, execution_device=job.device)
        outcome = generate(model, job)
        places = getattr(model, "hf_device_map", {})
        outcome.notes["placed"] = {
            str(place): sum(1 for at in places.values() if at == place)
            for place in set(places.values())
        }
    return outcome
