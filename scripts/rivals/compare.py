"""Generate the same text with every system that a user could choose, in turns, on this machine.

Each system runs in a separate process, with the same model, prompt, lengths, dtype, threads and
memory. Repeats are interleaved. A system that cannot run here gives the reason. Measurements are
kept until the comparison is complete: after an interrupt the same command resumes it (`--afresh`
starts over).

    python scripts/rivals compare [--rivals transformers accelerate ours] [--model PATH]
        [--prompt-tokens 2000] [--new-tokens 64] [--repeats 3] [--task continuation]
    bash scripts/setup_rivals.sh      # once, for DeepSpeed and llama.cpp

Prints a table; writes benchmarks/results/compare.json and, with --plot, a picture. With options
that make it another comparison, it writes compare_own.json unless --result names a file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from bench.material import model_file
from bench.workloads import TASKS, prompt
from frame import write_result
from rivals import prepared, reference, spawn
from rivals.answers import Answers
from rivals.compare_report import Comparison, plot, print_comparison
from rivals.job import Job, Outcome
from rivals.systems import GROUPS, System, chosen, systems
from triforce_core.model.checkpoints.checkpoint import open_checkpoint
from triforce_core.model.known.shapes import SHAPES
from triforce_core.model.tokenizing.tokenizer import load_tokenizer
from triforce_offload.errors import TriforceError
from triforce_offload.units import format_bytes, parse_bandwidth, parse_bytes

# Options that make it another comparison.
_OF_THE_COMPARISON = (
    *("rivals", "model", "shape", "acceptance", "assistant", "task", "prompt_tokens", "new_tokens"),
    *("repeats", "temperature", "dtype", "threads", "device_memory", "link_bandwidth"),
)


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    args.result = args.result or result_name(parser, args)
    try:
        return Run(args).all()
    except (TriforceError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--rivals", nargs="+", default=["memory", "offloaded"], metavar="NAME",
        help=f"names, beginnings of names, {', '.join(GROUPS)} or all")  # fmt: skip
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="a directory or a .gguf file; SmolLM2-135M")
    model.add_argument("--shape", choices=SHAPES, help="random weights: speed alone")
    add("--acceptance", type=float, help="of drafted tokens, assumed of random weights")
    add("--assistant", default="", help="a small model for transformers' assisted generation")
    add("--task", choices=TASKS, default="continuation", help="what is written")
    add("--prompt-tokens", type=int, default=2000)
    add("--new-tokens", type=int, default=64)
    add("--repeats", type=int, default=3)
    add("--temperature", type=float, default=0.0)
    add("--dtype", default=None, help="float32 on a CPU, float16 on a GPU")
    add("--threads", type=int, default=os.cpu_count(), help="of the CPU")
    add("--device-memory", type=parse_bytes,
        help="of all systems; half of weights and KV on a CPU, 24GB on a GPU")  # fmt: skip
    add("--link-bandwidth", type=parse_bandwidth,
        help="of our emulated link; what one thread copies, measured")  # fmt: skip
    add("--limit", type=float, default=600, help="seconds for one text of one system")
    add("--work", type=Path, default=_cache(), help="for checkpoints and what was measured")
    add("--afresh", action="store_true", help="forget what was measured before")
    add("--result",
        help="a name under benchmarks/results, or a whole path (default: compare for the recorded "
        "comparison, which has no other options; compare_own for all others)")  # fmt: skip
    add("--plot", type=Path, help="write a picture")
    return parser


def result_name(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return the name of the result: quick runs do not overwrite the recorded one."""
    same = (getattr(args, name) == parser.get_default(name) for name in _OF_THE_COMPARISON)
    return "compare" if all(same) else "compare_own"


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "triforce-offload" / "compare"


class Run:
    """One comparison: the job that all systems get, and their outcomes."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Prepare the model and the prompt. Raises ValueError or TriforceError."""
        if args.acceptance is not None and not args.shape:
            raise ValueError("--acceptance is assumed of random weights alone: give a --shape")
        self._args = args
        self._on_gpu = torch.cuda.is_available()
        self._dtype = args.dtype or ("float16" if self._on_gpu else "float32")
        args.work.mkdir(parents=True, exist_ok=True)
        self._job = self._make_job()
        self._systems = self._chosen()
        stamp = hashlib.sha256(self._job.to_json().encode()).hexdigest()[:16]
        self._logs = args.work / f"{stamp}-logs"
        self._reference = args.work / f"{stamp}.npz"
        self._answers = Answers(args.work / f"{stamp}.jsonl", afresh=args.afresh)
        self._rates = self._answers.rates(args.threads)
        if args.link_bandwidth is None:
            rate = self._rates["copied_bytes_per_second"]
            self._job = replace(self._job, link_bytes_per_second=rate)

    def _make_job(self) -> Job:
        args, gguf = self._args, None
        if args.shape:
            directory = prepared.of_shape(args.shape, SHAPES[args.shape], self._dtype, args.work)
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(100, 20000, (args.prompt_tokens,), generator=generator).tolist()
            self._name = f"{args.shape}, random weights"
        else:
            source = args.model or model_file()
            if not source.exists():
                raise ValueError(f"{source} does not exist")
            directory = prepared.prepared(source, args.work)
            ids = prompt(args.task, load_tokenizer(source), args.prompt_tokens)
            self._name = source.name
            # Workers run in another directory.
            gguf = str(source.resolve()) if source.suffix == ".gguf" else None
        self._stored_bytes = _stored_bytes(directory, self._dtype, len(ids) + args.new_tokens)
        memory = args.device_memory
        if memory is None:
            memory = 24 * 10**9 if self._on_gpu else self._stored_bytes // 2
        return Job(
            module="",
            options={},
            model=str(directory),
            prompt=ids,
            new_tokens=args.new_tokens,
            dtype=self._dtype,
            device="cuda:0" if self._on_gpu else "cpu",
            threads=args.threads,
            gguf=gguf,
            temperature=args.temperature,
            memory_bytes=memory,
            link_bytes_per_second=args.link_bandwidth,
            acceptance=args.acceptance,
        )

    def _chosen(self) -> dict[str, System]:
        job, args = self._job, self._args
        known = systems(
            len(job.prompt), job.new_tokens, args.assistant, is_gguf=job.gguf is not None
        )
        try:
            return {name: known[name] for name in chosen(args.rivals, known)}
        except KeyError as error:
            raise ValueError(
                f"--rivals {error.args[0]!r} is none of {', '.join(GROUPS)}, all, or the beginning "
                f"of {', '.join(known)}"
            ) from error

    def all(self) -> int:
        """Run every system and report. Return the exit code."""
        args = self._args
        console = Console(stderr=True)
        self._logs.mkdir(exist_ok=True)
        console.print(
            f"{self._name}, {len(self._job.prompt)} + {args.new_tokens} tokens, {self._job.dtype}, "
            f"{args.threads} threads, device memory {format_bytes(self._job.memory_bytes)} "
            f"of {format_bytes(self._stored_bytes)} of weights and KV"
        )
        comparison = self._compared(self._measure(console))
        print_comparison(comparison)
        path = write_result(args.result, comparison.record())
        print(f"written to {os.path.relpath(path)}")
        self._answers.close()
        if args.plot:
            plot(comparison, args.plot)
            print(f"drawn in {os.path.relpath(args.plot)}")
        return 0

    def _measure(self, console: Console) -> dict[tuple[str, int], Outcome]:
        """Return the outcomes of all systems and repeats. A system that refuses runs only once."""
        done, names, repeats = self._answers.outcomes(), list(self._systems), self._args.repeats
        # Each round begins with a different system.
        todo = [
            (repeat, names[(i + repeat) % len(names)])
            for repeat in range(repeats)
            for i in range(len(names))
        ]
        refused = set()
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("the text that all must give", total=len(todo) + 1)
            self._make_reference(console)
            progress.advance(bar)
            for repeat, name in todo:
                progress.update(bar, description=f"{name} ({repeat + 1} of {repeats})")
                if (name, repeat) not in done and name not in refused:
                    outcome = done[name, repeat] = self._ask(name, self._systems[name])
                    self._answers.add(name, repeat, outcome)
                    said = f"{name}: {outcome.refusal}"
                    if outcome.refusal:
                        refused.add(name)
                    else:
                        said = f"{name} {repeat + 1}: {outcome.token_seconds:.4f} s/token"
                    console.print(said)
                progress.advance(bar)
        return done

    def _ask(self, name: str, system: System) -> Outcome:
        if system.refusal:
            return Outcome(refusal=system.refusal)
        job = replace(self._job, module=system.module, options=system.options)
        log = self._logs / f"{name.replace(' ', '-').replace(',', '')}.log"
        began = time.perf_counter()
        outcome = spawn.run(job, log, self._args.limit, own_packages=system.own_packages)
        outcome.notes["process_seconds"] = time.perf_counter() - began
        if outcome.tokens and not self._job.temperature and self._reference.exists():
            found = reference.difference(str(self._reference), outcome.tokens)
            outcome.notes["difference"] = found and {"token": found[0], "logit_gap": found[1]}
        return outcome

    def _make_reference(self, console: Console) -> None:
        """Make the reference text, in float32 if that is small enough, else in the job's dtype."""
        if self._job.temperature or self._reference.exists():
            return
        options = {"path": str(self._reference)}
        dtype = "float32" if not self._on_gpu or self._stored_bytes < 8 << 30 else self._job.dtype
        job = replace(self._job, module="reference", options=options, dtype=dtype)
        outcome = spawn.run(job, self._logs / "reference.log", self._args.limit, own_packages=False)
        if outcome.refusal:
            console.print(f"no text to hold others against: {outcome.refusal}")

    def _compared(self, done: dict[tuple[str, int], Outcome]) -> Comparison:
        job, args = self._job, self._args
        return Comparison(
            settings={
                "model": self._name,
                "task": None if args.shape else args.task,
                "prompt_tokens": len(job.prompt),
                "new_tokens": job.new_tokens,
                "dtype": job.dtype,
                "temperature": job.temperature,
                "repeats": args.repeats,
                "threads": job.threads,
                "device": job.device,
                "device_memory_bytes": job.memory_bytes,
                "weights_and_kv_bytes": self._stored_bytes,
                "link": "PCIe" if self._on_gpu else "emulated, ours alone has one",
                "link_bytes_per_second": None if self._on_gpu else job.link_bytes_per_second,
                "assumed_acceptance": job.acceptance,
            },
            memory=self._rates,
            systems=self._systems,
            outcomes={
                name: [done[name, i] for i in range(args.repeats) if (name, i) in done]
                for name in self._systems
            },
        )


def _stored_bytes(directory: Path, dtype: str, tokens: int) -> int:
    """Return the bytes of weights and KV. Raises TriforceError."""
    checkpoint = open_checkpoint(directory)
    try:
        config, itemsize = checkpoint.config, getattr(torch, dtype).itemsize
        stored = torch.float32 if checkpoint.stored_dtype == "float32" else torch.float16
        weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    finally:
        checkpoint.close()
    kv = 2 * len(config.kv_layers) * config.attention.keys * itemsize * tokens
    return weights * itemsize // stored.itemsize + kv
