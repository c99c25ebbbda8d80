"""Prometheus metrics of a router: its own counters, and the load of each engine."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gllm.engine.fleet_control import EngineRow, FleetControl
from gllm.frontend.node_metrics import counter, gauge

ENGINE_STATES = ("loading", "ready", "recovering", "sleeping", "draining", "ejected", "dead")
"""Values of the label `state`."""
MIGRATION_CAUSES = ("lost", "drained", "recovering", "unavailable", "moved", "rebalanced")
"""Values of the label `cause` of migrations."""
LOSS_KINDS = ("drained", "lost")
"""Values of the label `kind` of lost engines."""


class RouterCollector(Collector):
    """Prometheus collector of a router and its engines, read at each scrape."""

    def __init__(self, fleet: FleetControl, model: str) -> None:
        self._fleet = fleet
        self._model = {"model_name": model}

    def collect(self) -> Iterator[Metric]:
        """Yield the router's counters, and state and load of its engines."""
        rows = self._fleet.engines()
        states = Counter(row.state for row in rows)
        counts = [((state,), states[state]) for state in ENGINE_STATES]
        yield gauge("router_engines", "Attached engines by state", self._model, counts, "state")
        yield from self._engine_gauges(rows)
        text = "State of an engine, as a label; the value is 1"
        labels = [((row.name, row.state), 1) for row in rows]
        yield gauge("router_engine_state", text, self._model, labels, "engine state")
        yield from self._engine_counters(rows)
        yield from self._totals()
        # From the router whose decision counts.
        status = self._fleet.scaling.status()
        wanted = [] if status is None or not status.is_leader else [((), status.num_wanted)]
        text = "Engines that should run, by the leading router"
        yield gauge("wanted_engines", text, self._model, wanted)

    def _engine_gauges(self, rows: list[EngineRow]) -> Iterator[Metric]:
        for name, text, values in (
            ("engine_up", "1 if an engine takes requests, 0 if it is attached but does not",
             [float(row.state == "ready") for row in rows]),
            ("engine_requests", "Requests of this router that an engine runs",
             [row.num_requests for row in rows]),
            ("engine_running", "Sequences of an engine that hold KV blocks, of all its routers",
             [row.stats["running"] for row in rows]),
            ("engine_waiting", "Sequences of an engine that wait for KV blocks",
             [row.stats["waiting"] for row in rows]),
            ("engine_kv_cache_usage_perc", "Share of an engine's KV blocks in use, 0 to 1",
             [row.stats["kv_usage"] for row in rows]),
            ("engine_weight", "Share of its usual load that an engine gets; 0 while it is ejected",
             [row.weight for row in rows]),
        ):  # fmt: skip
            samples = [((row.name,), value) for row, value in zip(rows, values, strict=True)]
            yield gauge("router_" + name, text, self._model, samples, "engine")

    def _engine_counters(self, rows: list[EngineRow]) -> Iterator[Metric]:
        for name, text, values in (
            ("dispatched_requests", "Requests sent to an engine, those sent again included",
             [row.num_dispatched for row in rows]),
            ("engine_prefix_cache_queries",
             "Prompt tokens that an engine looked up in its prefix cache, for all its routers",
             [row.stats["prefix_queries"] for row in rows]),
            ("engine_prefix_cache_hits",
             "Prompt tokens that an engine found in its prefix cache, for all its routers",
             [row.stats["prefix_hits"] for row in rows]),
            ("engine_decode_tokens", "Tokens that an engine decoded, for all its routers",
             [row.stats["decode_tokens"] for row in rows]),
        ):  # fmt: skip
            samples = [((row.name,), value) for row, value in zip(rows, values, strict=True)]
            yield counter("router_" + name, text, self._model, samples, "engine")

    def _totals(self) -> Iterator[Metric]:
        totals = self._fleet.totals()
        text = "Requests that wait for an engine"
        yield gauge("router_parked_requests", text, self._model, totals.num_parked)
        for name, text, label, counts, known in (
            ("migrations", "Requests taken to another engine after they were sent to one",
             "cause", totals.migrations, MIGRATION_CAUSES),
            ("lost_engines", "Ends of engines' connections",
             "kind", totals.lost_engines, LOSS_KINDS),
            ("shed_requests", "Requests refused because no engine was likely to meet their SLO",
             "reason", totals.shed_requests, ()),
        ):  # fmt: skip
            samples = [((value,), counts.get(value, 0)) for value in sorted({*known, *counts})]
            yield counter("router_" + name, text, self._model, samples, label)
        for name, text, count in (
            ("held_requests",
             "New requests that waited for a heartbeat, or for an engine with room",
             totals.held_requests),
            ("refused_engines", "Engines refused, such as those of another model",
             totals.refused_engines),
            ("refused_connections", "Connections refused, such as those without the node secret",
             totals.refused_peers),
            ("inexact_migrations", "Requests that went on at an engine of other numerics",
             totals.inexact_migrations),
            ("kv_checkpoints", "Copies of running requests' KV to other engines that were started",
             totals.kv_checkpoints),
            ("rebalancing_seconds",
             "Time that requests moved between engines by --move-requests waited for a token",
             totals.rebalancing_seconds),
            ("stale_outputs", "Tokens that arrived after their request had been taken elsewhere",
             totals.stale_outputs),
        ):  # fmt: skip
            yield counter("router_" + name, text, self._model, count)
