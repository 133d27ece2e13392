"""accelerate: hooks load the weights of each module from host memory or disk for its forward."""

from __future__ import annotations

import tempfile
from collections import Counter

from accelerate import cpu_offload, disk_offload

from rivals.job import Job, Outcome
from rivals.models import generate, load


def run(job: Job) -> Outcome:
    """Run the job.

    options: `how` is cpu_offload, disk_offload, auto (device_map, with the same memory), or memory
        (device_map of one device)
    """
    how = job.options["how"]
    with tempfile.TemporaryDirectory() as folder:
        # cpu_offload and disk_offload expect a model in host memory.
        placing = {"device_map": None}
        if how == "memory":
            placing = {"device_map": {"": job.device}}
        elif how == "auto" and job.memory_bytes:
            memory = {"cpu": job.memory_bytes}
            if job.device != "cpu":
                memory = {0: job.memory_bytes, "cpu": 1 << 40}
            placing = {"device_map": "auto", "max_memory": memory, "offload_folder": folder}
        model = load(job, **placing)
        if how == "cpu_offload":
            cpu_offload(model, execution_device=job.device)
        elif how == "disk_offload":
            disk_offload(model, folder, execution_device=job.device)
        outcome = generate(model, job)
        places = getattr(model, "hf_device_map", {}).values()
        outcome.notes["placed"] = dict(Counter(map(str, places)))
    return outcome
