"""Snapshots of a fleet for metrics and probes: sums over its engines, and one row per engine."""

from collections.abc import Container, Mapping

from gllm.config.router import RouterConfig
from gllm.engine.fleet_control import EngineRow, RouterTotals
from gllm.engine.interface import EngineUnavailableError
from gllm.router.client import FleetClient
from gllm.router.engine_record import EngineRecord
from gllm.routing.health import FleetHealth
from gllm.runtime.messaging.fleet_links import EngineLink
from gllm.scheduler.plan import SchedulerStats

COUNTERS = (
    "steps",
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "prefill_tokens",
    "decode_tokens",
)
"""Fields of SchedulerStats that count up."""
RETRY_SECONDS = 5
"""Time after which a client may try again while no engine takes requests."""
MAX_NAMES = 1000
"""Most engines whose counters are kept: by default each start of an engine has another name."""
MAX_AGE_SECONDS = 0.1
"""Age up to which a sum is returned again: each request reads it."""


def no_engines_error(cause: str) -> EngineUnavailableError:
    """Return the error of a request while no engine takes any."""
    return EngineUnavailableError("no_engines", cause, RETRY_SECONDS, "rejected-no-endpoints")


class FleetStats:
    """Sums of the schedulers' statistics, which never count down when an engine leaves."""

    def __init__(self) -> None:
        self._departed = SchedulerStats()
        """Counters of engines that have left."""
        self._total = SchedulerStats()
        self._summed_at: float | None = None

    def on_lost(self, record: EngineRecord) -> None:
        """Keep the counters of an engine that leaves."""
        self._departed = _add_counters(self._departed, record.stats)
        self._summed_at = None

    def total(
        self, records: Mapping[str, EngineRecord], num_parked: int, now: float
    ) -> SchedulerStats:
        """Return the sum over all engines; `kv_usage` is the share of all engines' blocks in use.

        Args:
            records: engines by name.
            num_parked: requests that wait for an engine.
            now: time in seconds.
        """
        if self._summed_at is None or now - self._summed_at > MAX_AGE_SECONDS:
            self._total, self._summed_at = self._sum(records), now
        return self._total._replace(waiting=self._total.waiting + num_parked)

    def _sum(self, records: Mapping[str, EngineRecord]) -> SchedulerStats:
        total, used, num_blocks = self._departed, 0.0, 0
        for record in records.values():
            stats, blocks = record.stats, record.announce.num_blocks
            total = _add_counters(total, stats)._replace(
                running=total.running + stats.running,
                waiting=total.waiting + stats.waiting,
                in_flight=total.in_flight + stats.in_flight,
                waiting_tokens=total.waiting_tokens + stats.waiting_tokens,
                decode_context_tokens=total.decode_context_tokens + stats.decode_context_tokens,
                in_flight_prefill_tokens=(
                    total.in_flight_prefill_tokens + stats.in_flight_prefill_tokens
                ),
            )
            used += stats.kv_usage * blocks
            num_blocks += blocks
        return total._replace(kv_usage=used / max(1, num_blocks))


def engine_row(
    record: EngineRecord,
    link: EngineLink,
    weight: float,
    ejection_cause: str,
    num_requests: int,
    num_dispatched: int,
    now: float,
) -> EngineRow:
    """Return an engine's row.

    Args:
        record: of the engine.
        link: of the engine.
        weight: share of its usual load that it gets.
        ejection_cause: why it is ejected; empty if it is not.
        num_requests: requests of this router that it runs.
        num_dispatched: requests that this router has sent to it.
        now: time in seconds.
    """
    announce, report = record.announce, record.report
    return EngineRow(
        name=announce.name,
        role=announce.role,
        state="ejected" if ejection_cause and record.state == "ready" else record.state,
        cause=report.cause or ejection_cause,
        address=link.address,
        version=announce.version,
        attached_seconds=now - record.attached_at,
        silent_seconds=max(0.0, now - link.last_heard),
        stats=record.stats._asdict(),
        num_kv_blocks=announce.num_blocks,
        block_size=announce.block_size,
        num_stages=announce.num_stages,
        num_requests=num_requests,
        num_dispatched=num_dispatched,
        weight=weight,
        has_kv_transfer=bool(announce.kv_endpoint),
    )


def engine_rows(
    records: Mapping[str, EngineRecord],
    links: Mapping[str, EngineLink],
    health: FleetHealth,
    client: FleetClient,
    now: float,
) -> list[EngineRow]:
    """Return the row of each engine, by name.

    Args:
        records: engines by name.
        links: of the engines.
        health: weights and ejections.
        client: with the requests.
        now: time in seconds.
    """
    ejected = health.ejected(now)
    return [
        engine_row(
            record,
            links[name],
            weight=health.weight(name, now),
            ejection_cause=ejected.get(name, ""),
            num_requests=client.num_running(name),
            num_dispatched=client.num_dispatched[name],
            now=now,
        )
        for name, record in sorted(records.items())
    ]


def router_totals(
    config: RouterConfig,
    client: FleetClient,
    num_shed: Mapping[str, int],
    *,
    lost_engines: Mapping[str, int],
    refused_engines: int,
    refused_peers: int,
    role_changes: Mapping[str, int],
) -> RouterTotals:
    """Return a router's counters since its start.

    Args:
        config: of the router.
        client: with the requests.
        num_shed: refused requests by reason.
        lost_engines: ends of sessions by kind.
        refused_engines: engines that cannot serve the router's requests.
        refused_peers: connections that were refused.
        role_changes: commands to take a role, by role.
    """
    return RouterTotals(
        policy=config.policy,
        num_parked=client.num_parked,
        migrations=dict(client.num_migrations),
        lost_engines=dict(lost_engines),
        refused_engines=refused_engines,
        refused_peers=refused_peers,
        shed_requests=dict(num_shed),
        inexact_migrations=client.num_inexact_migrations,
        stale_outputs=client.num_stale_tokens,
        preset=config.preset or "",
        decode_choice=config.decode_choice,
        flips=config.flips,
        role_changes=dict(role_changes),
    )


def forget_departed(counts: dict[str, int], attached: Container[str]) -> None:
    """Drop the oldest counts of engines that are not attached, above MAX_NAMES.

    Args:
        counts: by engine.
        attached: names of the attached engines.
    """
    departed = [name for name in counts if name not in attached]
    for name in departed[: max(0, len(counts) - MAX_NAMES)]:
        del counts[name]


def _add_counters(total: SchedulerStats, stats: SchedulerStats) -> SchedulerStats:
    return total._replace(
        **{name: getattr(total, name) + getattr(stats, name) for name in COUNTERS}
    )


def unready_cause(records: Mapping[str, EngineRecord]) -> str:
    """Describe why no engine takes requests."""
    if not records:
        return "no engine is attached to the router"
    states = ", ".join(f"{name} is {record.state}" for name, record in sorted(records.items()))
    return f"no engine takes requests: {states}"
