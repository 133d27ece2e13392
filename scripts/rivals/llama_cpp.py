"""llama.cpp, through the xllamacpp wheel."""

from __future__ import annotations

from rivals.job import Job, Outcome, Refusal


def run(job: Job) -> Outcome:
    """options: `kv_on_host` keeps KV and attention on the host, with layers on the GPU"""
    if not job.gguf:
        raise Refusal("it reads GGUF files, and the model is none")
    import xllamacpp

    with_gpu = any("CUDA" in str(device) for device in xllamacpp.get_device_info())
    if job.device != "cpu" and not with_gpu:
        raise Refusal("the wheel xllamacpp on this machine was built without CUDA")
    if job.options.get("kv_on_host") and job.device == "cpu":
        raise Refusal("it needs a CUDA GPU")
    params = xllamacpp.CommonParams()
    params.model.path = job.gguf
    params.n_ctx = len(job.prompt) + job.new_tokens + 8
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job.threads
    params.cache_ram_mib = params.verbosity = 0
    params.n_gpu_layers = 0 if job.device == "cpu" else 999
    params.no_kv_offload = bool(job.options.get("kv_on_host"))
    server = xllamacpp.Server(params)
    answer = server.handle_completions(
        {
            "prompt": job.prompt,
            "n_predict": job.new_tokens,
            "temperature": job.temperature,
            "top_p": 0.9 if job.temperature else 1.0,
            "top_k": 0,
            "min_p": 0,
            "seed": job.seed,
            "cache_prompt": False,
            "ignore_eos": True,
            "logprobs": 1,
        }
    )
    if "timings" not in answer:
        raise Refusal(f"llama.cpp answered {answer}")
    timings = answer["timings"]
    logprobs = answer["choices"][0].get("logprobs") or {}
    tokens = [each["id"] for each in logprobs.get("content", ()) if "id" in each]
    return Outcome(
        tokens=tokens or None,
        first_seconds=timings["prompt_ms"] / 1e3,
        token_seconds=timings["predicted_ms"] / 1e3 / max(1, timings["predicted_n"] - 1),
        notes={"weights": job.options.get("weights", "the file's blocks")},
    )
