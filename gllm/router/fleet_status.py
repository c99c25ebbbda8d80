"""Snapshots of a fleet for metrics and probes: sums over its engines, and one row per engine."""

from collections.abc import Container, Mapping

from gllm.engine.fleet_control import EngineRow
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
    "drafts",
    "draft_tokens",
    "accepted_tokens",
)
"""Fields of SchedulerStats that count up."""
HELD = "an operator has drained it; POST /engines/NAME/undrain ends that"
"""Cause of the state of an engine that autoscaling leaves drained."""
RETRY_SECONDS = 5
"""Time after which a client may try again while no engine takes requests."""
MAX_NAMES = 1000
"""Most engines whose counters are kept: by default each start of an engine has another name."""
MAX_AGE_SECONDS = 0.1
"""Age up to which a sum is returned again: each request reads it."""


def no_engines_error(cause: str) -> EngineUnavailableError:
    """Return the error for a request that arrives while no engine accepts requests."""
    return EngineUnavailableError("no_engines", cause, RETRY_SECONDS, "rejected-no-endpoints")


class FleetStats:
    """Sums of the engines' statistics, including the final counters of engines that have left."""

    def __init__(self) -> None:
        self._departed = SchedulerStats()
        """Counters of engines that have left."""
        self._total = SchedulerStats()
        self._summed_at: float | None = None

    def on_lost(self, record: EngineRecord) -> None:
        """Add the final counters of an engine that leaves."""
        self._departed = _add_counters(self._departed, record.stats)
        self._summed_at = None

    def total(
        self, records: Mapping[str, EngineRecord], num_parked: int, now: float
    ) -> SchedulerStats:
        """Return the sum over all engines; `kv_usage` is the used share of all KV blocks.

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


def engine_rows(
    records: Mapping[str, EngineRecord],
    links: Mapping[str, EngineLink],
    health: FleetHealth,
    client: FleetClient,
    now: float,
) -> list[EngineRow]:
    """Return state, load and address of each engine for `GET /engines` and metrics, sorted by name.

    Args:
        records: state and load of the engines, by name.
        links: connections to the engines, by name.
        health: weights and ejections.
        client: counts of running and dispatched requests.
        now: time in seconds.
    """
    ejected = health.ejected(now)
    rows = []
    for name, record in sorted(records.items()):
        announce, report, link = record.announce, record.report, links[name]
        is_ejected = name in ejected and record.state == "ready"
        rows.append(
            EngineRow(
                name=name,
                role=announce.role,
                state="ejected" if is_ejected else record.state,
                cause=report.cause or ejected.get(name, "") or (HELD if record.is_held else ""),
                address=link.address,
                version=announce.version,
                attached_seconds=now - record.attached_at,
                silent_seconds=max(0.0, now - link.last_heard),
                stats=record.stats.to_numbers(),
                num_kv_blocks=announce.num_blocks,
                block_size=announce.block_size,
                num_stages=announce.num_stages,
                num_requests=client.num_running(name),
                num_dispatched=client.num_dispatched[name],
                weight=health.weight(name, now),
                has_kv_transfer=bool(announce.kv_endpoint),
            )
        )
    return rows


def forget_departed(counts: dict[str, int], attached: Container[str]) -> None:
    """Delete the oldest counts of engines that have left, as far as there are more than MAX_NAMES.

    Args:
        counts: number by engine name; changed in place.
        attached: names of the attached engines, which are kept.
    """
    departed = [name for name in counts if name not in attached]
    for name in departed[: max(0, len(counts) - MAX_NAMES)]:
        del counts[name]


def _add_counters(total: SchedulerStats, stats: SchedulerStats) -> SchedulerStats:
    return total._replace(
        **{name: getattr(total, name) + getattr(stats, name) for name in COUNTERS}
    )


def unready_cause(records: Mapping[str, EngineRecord]) -> str:
    """Return a text for errors and probes: why no engine accepts requests."""
    if not records:
        return "no engine is attached to the router"
    states = ", ".join(f"{name} is {record.state}" for name, record in sorted(records.items()))
    return f"no engine takes requests: {states}"
