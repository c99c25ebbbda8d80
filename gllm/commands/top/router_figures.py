"""Figures of a router and of the engines behind it, from two scrapes of its /metrics."""

import math
from dataclasses import dataclass

from gllm.deploy.metrics_scrape import MetricsScrape


@dataclass(frozen=True)
class EngineFigures:
    """One engine of a router over a time window."""

    name: str
    state: str
    num_requests: float
    """Requests of this router that the engine runs."""
    waiting: float
    """Sequences of all routers that wait for KV blocks."""
    kv_usage: float
    """Used share of the KV cache, in [0, 1]."""
    prefix_hits: float
    """Share of prompt tokens found in the prefix cache, in [0, 1]."""
    output_rate: float
    """Tokens decoded per second."""
    weight: float
    """Share of its usual load that the engine gets, in [0, 1]."""


@dataclass(frozen=True)
class RouterFigures:
    """A router and its engines."""

    parked: float
    """Requests that wait for an engine."""
    migrations: float
    """Number of requests taken to another engine since the router's start."""
    lost_engines: float
    """Number of engines whose connection ended, drained ones included."""
    shed: float
    """Number of requests refused because of their objective."""
    engines: tuple[EngineFigures, ...]
    """Engines by name."""


def router_figures_between(before: MetricsScrape, after: MetricsScrape) -> RouterFigures | None:
    """Return the figures of a router between two scrapes; None if the server is no router."""
    if "router_parked_requests" not in after.values:
        return None
    return RouterFigures(
        parked=after.value("router_parked_requests"),
        migrations=after.value("router_migrations_total"),
        lost_engines=after.value("router_lost_engines_total"),
        shed=after.value("router_shed_requests_total"),
        engines=tuple(_engine_figures(name, before, after) for name in sorted(after.engine_states)),
    )


def _engine_figures(name: str, before: MetricsScrape, after: MetricsScrape) -> EngineFigures:
    """Return the figures of one engine between two scrapes."""
    hits = _increase("router_engine_prefix_cache_hits_total", name, before, after)
    queries = _increase("router_engine_prefix_cache_queries_total", name, before, after)
    tokens = _increase("router_engine_decode_tokens_total", name, before, after)
    seconds = after.time - before.time
    return EngineFigures(
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
