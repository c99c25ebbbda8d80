"""From two scrapes to what happened between them.

Owns the arithmetic: rates, shares, quantiles of histograms. Knows nothing of how they are shown.
What cannot be known, as a rate over no time or a quantile of nothing, is NaN.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gllm.commands.top.scrape import Scrape

WINDOW_SECONDS = 5.0
"""Over how long shares and quantiles are taken: stages tell twice a second what they did."""
REMEMBERED = 512
"""Rates that are kept for the sparkline."""


class Latency(NamedTuple):
    """Seconds."""

    p50: float
    p99: float


class Stage(NamedTuple):
    """Shares of time, 0..1."""

    busy: float
    bubble: float
    """Of the time in which there was work: idle though it could have computed."""


@dataclass(frozen=True)
class Figures:
    """What is told of a server."""

    model: str
    running: float
    waiting: float
    kv_usage: float
    """Share, 0..1."""
    in_flight: float
    preemptions: float
    """Since the server's start."""
    prompt_rate: float
    """Prompt tokens computed per second."""
    output_rate: float
    """Tokens generated per second."""
    ttft: Latency
    itl: Latency
    prefix_hits: float
    """Share of prompt tokens, 0..1."""
    step_rate: float
    """Micro-batches per second."""
    step_tokens: float
    """Mean tokens of a micro-batch."""
    stages: tuple[Stage, ...]


class History:
    """The scrapes of one server, and its generation rate over time."""

    def __init__(self) -> None:
        self.rates: deque[float] = deque(maxlen=REMEMBERED)
        self._scrapes: deque[Scrape] = deque()

    def add(self, scrape: Scrape) -> Figures:
        """Take in a scrape; what happened in the last seconds."""
        scrapes = self._scrapes
        if scrapes:
            self.rates.append(between(scrapes[-1], scrape).output_rate)
            if not scrape.follows(scrapes[-1]):
                # All that a new process counted happened since the last answer of the old one.
                last = scrapes[-1].time
                scrapes.clear()
                scrapes.append(Scrape(last))
        scrapes.append(scrape)
        while len(scrapes) > 2 and scrape.time - scrapes[1].time >= WINDOW_SECONDS:
            scrapes.popleft()
        return between(scrapes[0], scrape)


def between(before: Scrape, after: Scrape) -> Figures:
    """What happened between two scrapes. Where counters fell the server is a new one, and all that
    it counted is new."""
    seconds = after.time - before.time
    if not after.follows(before):
        before = Scrape(before.time)

    def grown(name: str) -> float:
        return after.value(name) - before.value(name)

    def latency(name: str) -> Latency:
        counts = histogram(before.buckets.get(name, {}), after.buckets.get(name, {}))
        return Latency(quantile(counts, 0.5), quantile(counts, 0.99))

    work = grown("pipeline_work_seconds_total")

    def stage(number: int) -> Stage:
        busy, bubble = (
            after.stage(name, number) - before.stage(name, number)
            for name in ("stage_busy_seconds_total", "stage_bubble_seconds_total")
        )
        return Stage(capped(share(busy, seconds)), capped(share(bubble, work)))

    steps = grown("micro_batches_total")
    tokens = grown("prefill_tokens_total") + grown("decode_tokens_total")
    return Figures(
        model=after.model,
        running=after.value("num_requests_running"),
        waiting=after.value("num_requests_waiting"),
        kv_usage=after.value("kv_cache_usage_perc"),
        in_flight=after.value("micro_batches_in_flight"),
        preemptions=after.value("num_preemptions_total"),
        prompt_rate=share(grown("prefill_tokens_total"), seconds),
        output_rate=share(grown("generation_tokens_total"), seconds),
        ttft=latency("time_to_first_token_seconds"),
        itl=latency("inter_token_latency_seconds"),
        prefix_hits=share(grown("prefix_cache_hits_total"), grown("prefix_cache_queries_total")),
        step_rate=share(steps, seconds),
        step_tokens=share(tokens, steps),
        stages=tuple(map(stage, sorted(after.stages.get("stage_busy_seconds_total", {})))),
    )


def share(part: float, whole: float) -> float:
    """A part of a whole; NaN of nothing."""
    return part / whole if whole > 0 else math.nan


def capped(share: float) -> float:
    """A share of time, at most all of it: stages tell by themselves twice a second, so what they
    tell may be of a moment more than the window."""
    return 1.0 if share > 1 else share


def histogram(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float]:
    """Observations up to each bound that came between two scrapes, bounds in order."""
    return {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}


def quantile(counts: Mapping[float, float], q: float) -> float:
    """The value below which a share q (0..1) of a histogram's observations lie, linear within a
    bucket; the highest finite bound for one beyond it, NaN without observations.

    counts: observations up to each bound, bounds in order, the last one infinite.
    """
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return math.nan
    lower, under = 0.0, 0.0
    for bound, count in counts.items():
        if count >= q * total and count > under:
            within = (q * total - under) / (count - under)
            return lower if math.isinf(bound) else lower + (bound - lower) * within
        lower, under = bound if math.isfinite(bound) else lower, count
    return lower
