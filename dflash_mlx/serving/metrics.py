"""Counts for Prometheus at `/metrics`, and one line of the log per request. No text of a prompt, except with `--log-prompts`.

Knows writers and their generations after they have ended. Queue and memory are read when `/metrics` is requested.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .engine import Engine
from .responses import Writer

log = logging.getLogger("dflash_mlx.requests")
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_RATES = (5, 10, 20, 40, 60, 80, 120, 160, 240, 400)


class Metrics:
    """Counts since the server started, under names that begin with `dflash_`."""

    def __init__(self, engine: Engine):
        self.registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": self.registry, "namespace": "dflash"}
        self.requests = Counter(
            "requests", "Requests that were generated for, by API and by how they ended", ["api", "end"], **made
        )
        self.refused = Counter("refused", "Requests that were answered with an error", ["status"], **made)
        self.prompt = Counter("prompt_tokens", "Tokens of prompts", **made)
        self.reused = Counter("reused_prompt_tokens", "Tokens of prompts that were held from earlier ones", **made)
        self.hits = Counter("prompt_cache_hits", "Requests whose prompt was held in part", **made)
        self.generated = Counter("generated_tokens", "Tokens that were generated", **made)
        self.drafted = Counter("verified_drafts", "Drafted tokens that were verified", **made)
        self.accepted = Counter("accepted_drafts", "Drafted tokens that were accepted", **made)
        self.rounds = Counter("rounds", "Rounds that verified drafts", **made)
        self.width = Histogram("width", "Drafts a round, the mean of an answer", buckets=(0, 1, 2, 4, 8, 12, 16, 32), **made)
        self.first = Histogram("first_token_seconds", "From the request to its first token", buckets=_SECONDS, **made)
        self.speed = Histogram("tokens_per_second", "Of an answer, after its first token", buckets=_RATES, **made)
        for name, about, read in (
            ("queue", "Requests that wait", lambda: engine.waiting),
            ("running", "Requests that run", lambda: len(engine.generations)),
            ("active_memory_bytes", "Memory that MLX holds", mx.get_active_memory),
            ("cache_memory_bytes", "Memory that MLX keeps for reuse", mx.get_cache_memory),
            ("peak_memory_bytes", "Most memory that MLX held", mx.get_peak_memory),
        ):
            Gauge(name, about, **made).set_function(read)

    def text(self) -> bytes:
        """All counts in Prometheus' text format."""
        return generate_latest(self.registry)

    def note(self, writer: Writer, api: str, end: str) -> None:
        """Count a generation that has ended, and log its line. end: "stop", "length", "error" or "left"."""
        said = facts(writer, api, end)
        self.requests.labels(api, end).inc()
        self.prompt.inc(said["prompt_tokens"])
        self.reused.inc(said["reused"])
        self.hits.inc(said["reused"] > 0)
        self.generated.inc(said["tokens"])
        self.drafted.inc(writer.last.verified)
        self.accepted.inc(writer.accepted)
        self.rounds.inc(writer.last.rounds)
        if writer.last.rounds:
            self.width.observe(writer.last.verified / writer.last.rounds)
        if said["first_s"] is not None:
            self.first.observe(said["first_s"])
        if said["tokens_per_s"] is not None:
            self.speed.observe(said["tokens_per_s"])
        log.info("%s", " ".join(f"{key}={value}" for key, value in said.items() if value is not None), extra={"facts": said})


def log_prompt(api: str, text: str) -> None:
    """A line with a prompt as the model reads it."""
    log.info("api=%s prompt=%s", api, json.dumps(text, ensure_ascii=False), extra={"facts": {"api": api, "prompt": text}})


def facts(writer: Writer, api: str, end: str) -> dict[str, Any]:
    """The numbers that the log shows of a request. No text."""
    first, last = writer.first_token_at, writer.last_token_at
    speed = (writer.count - 1) / (last - first) if writer.count > 1 and last > first else None
    return {
        "api": api,
        "end": end,
        "prompt_tokens": writer.prompt_tokens,
        "reused": writer.generation.cached,
        "tokens": writer.count,
        "first_s": None if first is None else round(first - writer.began, 3),
        "tokens_per_s": None if speed is None else round(speed, 1),
        "tau": None if writer.last.tau is None else round(writer.last.tau, 2),
    }
