"""Rates, shares and quantiles of a server or a router from two scrapes of its /metrics.

Undefined results, such as a rate over zero seconds or a quantile of no observations, are NaN.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gllm.deploy.metrics_scrape import MetricsScrape


@dataclass(frozen=True)
class EngineMetrics:
    """Load, cache use and throughput of one engine behind a router, over a time window."""

    name: str
    state: str
    num_requests: float
    """Requests of this router that run on the engine."""
    waiting: float
    """Sequences of all routers that wait for KV blocks of the engine."""
    kv_usage: float
    """Used share of the KV cache, in [0, 1]."""
    prefix_hits: float
    """Share of prompt tokens found in the prefix cache, in [0, 1]."""
    output_rate: float
    """Tokens decoded per second."""
    weight: float
    """Share of its usual load that the engine gets, in [0, 1]."""


@dataclass(frozen=True)
class RouterMetrics:
    """Metrics of a router (waiting, moved and refused requests) and of its engines."""

    parked: float
    """Requests that wait in the router for an engine that can run them."""
    migrations: float
    """Number of requests that moved to another engine since the router's start."""
    lost_engines: float
    """Number of engines that disconnected, including drained ones."""
    shed: float
    """Number of requests refused because no engine was likely to meet their SLO."""
    engines: tuple[EngineMetrics, ...]
    """Engines by name."""


def router_metrics_between(before: MetricsScrape, after: MetricsScrape) -> RouterMetrics | None:
    """Return a router's metrics of the time between two scrapes; None if there is no router."""
    if "router_parked_requests" not in after.values:
        return None
    return RouterMetrics(
        parked=after.value("router_parked_requests"),
        migrations=after.value("router_migrations_total"),
        lost_engines=after.value("router_lost_engines_total"),
        shed=after.value("router_shed_requests_total"),
        engines=tuple(_engine_metrics(name, before, after) for name in sorted(after.engine_states)),
    )


def _engine_metrics(name: str, before: MetricsScrape, after: MetricsScrape) -> EngineMetrics:
    """Return the figures of one engine between two scrapes."""
    hits = _increase("router_engine_prefix_cache_hits_total", name, before, after)
    queries = _increase("router_engine_prefix_cache_queries_total", name, before, after)
    tokens = _increase("router_engine_decode_tokens_total", name, before, after)
    seconds = after.time - before.time
    return EngineMetrics(
        name=name,
        state=after.engine_states[name],
        num_requests=after.engine("router_engine_requests", name),
        waiting=after.engine("router_engine_waiting", name),
        kv_usage=after.engine("router_engine_kv_cache_usage_perc", name),
        prefix_hits=hits / queries if queries > 0 else math.nan,
        output_rate=tokens / seconds if seconds > 0 else math.nan,
        weight=after.engine("router_engine_weight", name),
    )


def _increase(metric: str, engine: str, before: MetricsScrape, after: MetricsScrape) -> float:
    """Return the increase of an engine's counter; an engine that is new counts from zero."""
    value, earlier = after.engine(metric, engine), before.engine(metric, engine)
    return value - earlier if value >= earlier else value


WINDOW_SECONDS = 5.0
"""Window of shares and quantiles; stages report their times twice per second."""
MAX_RATES = 512
"""Number of rates that the sparkline shows."""


RANK_BUSY = "rank_busy_seconds_total"
"""Name of the metric of a rank's busy seconds, without its prefix."""


class Latency(NamedTuple):
    """50th and 99th percentile of a latency, in seconds."""

    p50: float
    p99: float


class StageTimeShares(NamedTuple):
    """Shares of time, 0 to 1, in which a pipeline stage was busy, or idle despite pending work."""

    busy: float
    bubble: float
    """Share of the time with pending work in which the stage was idle."""
    ranks: tuple[float, ...] = ()
    """Busy share of each rank of a stage with several."""


@dataclass(frozen=True)
class ServerMetrics:
    """Metrics of a server over a time window: load, rates, latencies and stage utilization."""

    model: str
    running: float
    waiting: float
    kv_usage: float
    """Used share of the KV cache, in [0, 1]."""
    in_flight: float
    preemptions: float
    """Number of preemptions since the server's start."""
    recoveries: float
    """Number of recoveries since the server's start."""
    recovering_seconds: float
    """Time since the running recovery began; 0 if none runs."""
    prompt_rate: float
    """Prompt tokens computed per second."""
    output_rate: float
    """Tokens generated per second."""
    ttft: Latency
    itl: Latency
    prefix_hits: float
    """Share of prompt tokens found in the prefix cache, in [0, 1]."""
    step_rate: float
    """Micro-batches per second."""
    step_tokens: float
    """Mean number of tokens per micro-batch."""
    stages: tuple[StageTimeShares, ...]
    state_slots: float = 0.0
    """Slots for the states of recurrent layers; 0 for a model without."""
    used_state_slots: float = 0.0
    """State slots that running sequences use."""
    router: RouterMetrics | None = None
    """Metrics of a router and its engines; None for an engine."""
    node_counts: Mapping[str, float] = field(default_factory=dict)
    """Number of the engine's machines, by state."""
    has_speculation: bool = False
    """True for an engine that guesses tokens."""
    accepted_share: float = math.nan
    """Share of its guesses that were right, in [0, 1]."""
    tokens_per_window: float = math.nan
    """Mean tokens of the text that a row with guesses yields."""
    node_losses: float = 0.0
    """Number of losses of machines since the server's start."""


class ScrapeHistory:
    """Recent scrapes of a server's /metrics, and its generated tokens per second over time."""

    def __init__(self) -> None:
        self.rates: deque[float] = deque(maxlen=MAX_RATES)
        self._scrapes: deque[MetricsScrape] = deque()

    def add(self, scrape: MetricsScrape) -> ServerMetrics:
        """Add a scrape and return the metrics of the last WINDOW_SECONDS."""
        scrapes = self._scrapes
        if scrapes:
            self.rates.append(metrics_between(scrapes[-1], scrape).output_rate)
            if not scrape.follows(scrapes[-1]):
                # A new process counts from zero: its counters cover the time since the last scrape.
                last_time = scrapes[-1].time
                scrapes.clear()
                scrapes.append(MetricsScrape(last_time))
        scrapes.append(scrape)
        while len(scrapes) > 2 and scrape.time - scrapes[1].time >= WINDOW_SECONDS:
            scrapes.popleft()
        return metrics_between(scrapes[0], scrape)


def metrics_between(before: MetricsScrape, after: MetricsScrape) -> ServerMetrics:
    """Return rates, shares and latency percentiles of the time between two scrapes of /metrics.

    If a counter has decreased, the server was restarted; the time since its start then counts.
    """
    seconds = after.time - before.time
    if not after.follows(before):
        before = MetricsScrape(before.time)

    def increase(name: str) -> float:
        return after.value(name) - before.value(name)

    def latency(name: str) -> Latency:
        counts = subtract_buckets(before.buckets.get(name, {}), after.buckets.get(name, {}))
        return Latency(quantile(counts, 0.5), quantile(counts, 0.99))

    work = increase("pipeline_work_seconds_total")

    def stage(number: int) -> StageTimeShares:
        busy, bubble = (
            after.stage(name, number) - before.stage(name, number)
            for name in ("stage_busy_seconds_total", "stage_bubble_seconds_total")
        )
        ranks = (
            after.rank(RANK_BUSY, number, rank) - before.rank(RANK_BUSY, number, rank)
            for stage, rank in sorted(after.ranks.get(RANK_BUSY, {}))
            if stage == number
        )
        return StageTimeShares(
            cap_share(safe_ratio(busy, seconds)),
            cap_share(safe_ratio(bubble, work)),
            tuple(cap_share(safe_ratio(rank, seconds)) for rank in ranks),
        )

    steps = increase("micro_batches_total")
    tokens = increase("prefill_tokens_total") + increase("decode_tokens_total")
    accepted = increase("spec_decode_num_accepted_tokens_total")
    return ServerMetrics(
        model=after.model,
        running=after.value("num_requests_running"),
        waiting=after.value("num_requests_waiting"),
        kv_usage=after.value("kv_cache_usage_perc"),
        in_flight=after.value("micro_batches_in_flight"),
        preemptions=after.value("num_preemptions_total"),
        recoveries=after.value("recoveries_total"),
        recovering_seconds=after.value("recovering_seconds"),
        prompt_rate=safe_ratio(increase("prefill_tokens_total"), seconds),
        output_rate=safe_ratio(increase("generation_tokens_total"), seconds),
        ttft=latency("time_to_first_token_seconds"),
        itl=latency("inter_token_latency_seconds"),
        prefix_hits=safe_ratio(
            increase("prefix_cache_hits_total"), increase("prefix_cache_queries_total")
        ),
        accepted_share=safe_ratio(accepted, increase("spec_decode_num_draft_tokens_total")),
        tokens_per_window=1 + safe_ratio(accepted, increase("spec_decode_num_drafts_total")),
        has_speculation="spec_decode_num_drafts_total" in after.values,
        step_rate=safe_ratio(steps, seconds),
        step_tokens=safe_ratio(tokens, steps),
        stages=tuple(map(stage, sorted(after.stages.get("stage_busy_seconds_total", {})))),
        state_slots=after.value("state_slots_total"),
        used_state_slots=after.value("state_slots_used"),
        router=router_metrics_between(before, after),
        node_counts=after.node_counts,
        node_losses=after.value("node_losses_total"),
    )


def safe_ratio(part: float, whole: float) -> float:
    """Return part / whole; NaN if the whole is not positive."""
    return part / whole if whole > 0 else math.nan


def cap_share(share: float) -> float:
    """Return a share of time limited to 1.

    Stages report twice per second, so a report may cover slightly more than the time window.
    """
    return 1.0 if share > 1 else share


def subtract_buckets(
    before: Mapping[float, float], after: Mapping[float, float]
) -> dict[float, float]:
    """Return the difference of two cumulative histograms, by upper bound of each bucket."""
    return {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}


def quantile(counts: Mapping[float, float], q: float) -> float:
    """Return a quantile of a cumulative histogram, interpolated linearly within a bucket.

    Args:
        counts: cumulative number of observations by upper bound, ascending; the last is infinite.
        q: share of observations below the result, in [0, 1].

    Returns:
        The quantile; the highest finite bound if it lies above that; NaN without observations.
    """
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return math.nan
    lower, under = 0.0, 0.0
    for bound, count in counts.items():
        if count >= q * total and count > under:
            within = (q * total - under) / (count - under)
            # Rounding must not exceed the bound.
            return lower if math.isinf(bound) else min(lower + (bound - lower) * within, bound)
        lower, under = bound if math.isfinite(bound) else lower, count
    return lower
