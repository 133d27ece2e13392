"""Prometheus metrics, served at /metrics."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from triforce_core.requests.stream import Completion
from triforce_core.server.errors import refused
from triforce_core.server.worker import Job, Worker

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = {"registry": self.registry}
        self._requests = Counter(
            "triforce_requests", "Texts that were asked for", ["outcome"], **registry
        )
        self._tokens = Counter("triforce_tokens", "By what became of them", ["kind"], **registry)
        self._drafts = Counter("triforce_drafts", "Drafted tokens", ["outcome"], **registry)
        self._link = Counter("triforce_link_bytes", "Over the link", ["direction"], **registry)
        self._busy = Counter("triforce_link_busy_seconds", "Carrying to the device", **registry)
        self._decode = Counter("triforce_decode_seconds", "Spent in decoding", **registry)
        self._waited = Histogram(
            "triforce_queue_seconds", "Waiting for the engine", buckets=_SECONDS, **registry
        )
        self._first = Histogram(
            "triforce_first_token_seconds",
            "From being asked to the first token",
            buckets=_SECONDS,
            **registry,
        )
        self._each = Histogram(
            "triforce_token_seconds", "Of each token after it", buckets=_SECONDS, **registry
        )
        self._waiting = Gauge("triforce_waiting", "Requests that wait", **registry)
        self._running = Gauge("triforce_running", "Requests under way", **registry)

    def served(self, job: Job, result: Completion | BaseException) -> None:
        """Count a job that has ended."""
        if not isinstance(result, Completion):
            status, _ = refused(result)
            self._requests.labels("failed" if status >= 500 else "refused").inc()
            return
        stats, link = result.stats, result.stats["link"]
        self._requests.labels(result.finish_reason).inc()
        reused = stats["reused_tokens"]
        for kind, count in (
            ("prompt", stats["prompt_tokens"] - reused),
            ("reused", reused),
            ("generated", stats["new_tokens"]),
        ):
            self._tokens.labels(kind).inc(count)
        lengths = stats["acceptance"]["accepted_lengths"]
        accepted = sum(length * count for length, count in enumerate(lengths))
        drafted = round((stats["draft_tokens"]["mean"] or 0) * sum(lengths))
        self._drafts.labels("accepted").inc(accepted)
        self._drafts.labels("rejected").inc(max(0, drafted - accepted))
        for direction, name in (("to_device", "to_device"), ("to_host", "to_host")):
            crossed = link[f"bytes_{name}"] + link[f"prefill_bytes_{name}"]
            self._link.labels(direction).inc(crossed)
        self._busy.inc(link["busy_seconds"])
        self._decode.inc(stats["seconds"]["decode"])
        waited = (job.began or time.monotonic()) - job.asked
        self._waited.observe(waited)
        self._first.observe(waited + stats["seconds"]["prefill"])
        if stats["seconds_per_token"]:
            self._each.observe(stats["seconds_per_token"])

    def text(self, worker: Worker) -> bytes:
        """Return all metrics in the Prometheus text format."""
        self._waiting.set(worker.waiting)
        self._running.set(len(worker.running))
        return generate_latest(self.registry)
