"""Health of engines: ejection of those that have become slow, slow start, budget of retries.

An engine that is much slower than it was before, while other engines are not, gets no new requests
for a while. Source: outlier detection and slow start of Envoy, with times in place of errors: a
slow engine answers without errors, and all its requests are late.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median

from gllm.options.field_types import convert_fields
from gllm.options.options import MAX_TIMEOUT_SECONDS, option
from gllm.routing.state import EngineSnapshot
from gllm.routing.token_speed import TokenSpeed

NUM_SLOW_REPORTS = 3
"""Slow reports in a row after which an engine is ejected."""
MAX_EJECTED_SHARE = 0.5
"""Share of the attached engines of a role that may be ejected."""
MAX_EJECTION_FACTOR = 10
"""Longest ejection of an engine in relation to its first one."""
MIN_WEIGHT = 0.1
"""Weight of an engine at the beginning of its slow start."""
FORGET_SECONDS = 600.0
"""Time after which former ejections and losses of an engine count no longer."""
RETRIES_PER_SECOND = 1.0
"""Retries that are permitted without any requests."""
MAX_RETRIES = 100.0
"""Retries that may be saved up."""


@dataclass(frozen=True)
class HealthConfig:
    """Router options for ejecting slow engines, slow start of new engines, and retry limits."""

    outlier_factor: float = option(
        3.0,
        "an engine whose tokens take this many times longer than before, compared with other "
        "engines, gets no new requests for --ejection-seconds; 0: never",
        ge=0,
        le=1e6,
    )
    ejection_seconds: float = option(
        30.0,
        "time of an engine's first ejection; each further one within ten minutes takes as much "
        "longer",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    slow_start_seconds: float = option(
        10.0,
        "time in which an engine that joins or returns gets more and more requests",
        ge=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    retry_budget: float = option(
        0.1,
        "requests that may go to another engine, because one answered that it takes none, per "
        "request; more than that wait; those of dead and drained engines are not limited",
        ge=0,
        le=1000,
    )

    def __post_init__(self) -> None:
        """Check types and ranges.

        Raises:
            ValueError: a field is invalid; the message names the field and the fix.
        """
        convert_fields(self)


class RetryBudget:
    """Token bucket that limits retries on other engines to a share of the requests.

    Source: RetryBudget of Twitter's Finagle.

    Args:
        ratio: retries per request.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._num_retries = MAX_RETRIES * min(1.0, ratio)
        self._updated_at = 0.0

    def on_request(self, now: float) -> None:
        """Add the share of a new request to the budget."""
        self._refill(now)
        self._num_retries = min(MAX_RETRIES, self._num_retries + self._ratio)

    def may_retry(self, now: float) -> bool:
        """Consume one retry; return False if none is left."""
        self._refill(now)
        if self._num_retries < 1:
            return False
        self._num_retries -= 1
        return True

    def _refill(self, now: float) -> None:
        seconds, self._updated_at = max(0.0, now - self._updated_at), now
        self._num_retries = min(MAX_RETRIES, self._num_retries + RETRIES_PER_SECOND * seconds)


@dataclass(eq=False)
class _EngineHealth:
    """History of one engine."""

    speed: TokenSpeed = field(default_factory=TokenSpeed)
    role: str = "mixed"
    """Role in its last report."""
    attached_at: float | None = None
    """None while the engine is lost."""
    num_slow_reports: int = 0
    """In a row."""
    num_ejections: int = 0
    num_losses: int = 0
    """Unplanned losses since the last planned one."""
    changed_at: float = 0.0
    """Time of the last ejection or loss."""
    ejected_until: float = 0.0
    ejection_cause: str = ""
    slow_start_at: float | None = None
    """Time at which the slow start begins; None for an engine without one."""


class FleetHealth:
    """Ejects engines that have become slow, and gives new and returning ones less load at first."""

    def __init__(self, config: HealthConfig | None = None) -> None:
        self._config = config or HealthConfig()
        self._engines: dict[str, _EngineHealth] = {}
        self.retry_budget = RetryBudget(self._config.retry_budget)
        """Retries that requests of the fleet may still use."""

    def on_attached(self, engine: str, now: float) -> None:
        """Start the slow start of an engine that returns or joins a running fleet."""
        self._forget_old(now)
        is_known = engine in self._engines
        others = [name for name in self._attached() if name != engine]
        health = self._engines.setdefault(engine, _EngineHealth())
        health.attached_at = now
        # The same name may be another process on another device.
        health.speed = TokenSpeed()
        health.num_slow_reports = 0
        runs_already = any(
            now - (self._engines[other].attached_at or now) >= self._config.slow_start_seconds
            for other in others
        )
        if is_known or runs_already:
            health.slow_start_at = now
        if health.num_losses > 1:
            self._eject(health, f"was lost {health.num_losses} times in a short time", now)

    def on_lost(self, engine: str, now: float, is_planned: bool) -> None:
        """Record the loss of an engine, planned or not."""
        health = self._engines.setdefault(engine, _EngineHealth())
        health.attached_at = None
        health.num_losses = 0 if is_planned else health.num_losses + 1
        health.changed_at = now
        self._forget_old(now)

    def on_outputs(self, engine: str, wire_ids: Collection[int], now: float) -> None:
        """Record which sequences got a token in an engine's output."""
        if health := self._engines.get(engine):
            health.speed.on_outputs(wire_ids, now)

    def on_report(self, snapshot: EngineSnapshot, now: float) -> None:
        """Measure the speed of an engine, and eject it if it is slow.

        Args:
            snapshot: state of the engine in its report.
            now: current time in seconds.
        """
        health = self._engines.setdefault(snapshot.name, _EngineHealth(attached_at=now))
        health.role = snapshot.role
        others = [self._engines[name] for name in self._attached() if name != snapshot.name]
        typical = [other.speed.coefficients for other in others if other.speed.coefficients]
        if not health.speed.measure(snapshot, typical, now):
            return
        slowdown = health.speed.slowdown
        slowdowns = [other.speed.slowdown for other in others if other.speed.is_recent(now)]
        # If all are slow together, the machine or the network is, and no other engine is better.
        normal = max(1.0, median(slowdowns)) if slowdowns else 1.0
        factor = self._config.outlier_factor
        if not factor or slowdown < factor * normal:
            health.num_slow_reports = 0
            return
        health.num_slow_reports += 1
        if health.num_slow_reports >= NUM_SLOW_REPORTS and health.ejected_until <= now:
            self._eject(health, f"its tokens take {slowdown:.1f} times as long as before", now)

    def weight(self, engine: str, now: float) -> float:
        """Return the share of its normal load for an engine, 0..1; 0 if it is ejected."""
        health = self._engines.get(engine)
        if health is None:
            return 1.0
        if now < health.ejected_until:
            return 0.0
        if health.slow_start_at is None:
            return 1.0
        duration = self._config.slow_start_seconds
        progress = (now - health.slow_start_at) / duration if duration else 1.0
        return min(1.0, max(MIN_WEIGHT, progress))

    def ejected(self, now: float) -> dict[str, str]:
        """Return the ejected engines with the causes."""
        attached = self._attached()
        return {
            name: health.ejection_cause
            for name, health in self._engines.items()
            if name in attached and now < health.ejected_until
        }

    def _attached(self) -> list[str]:
        return [name for name, health in self._engines.items() if health.attached_at is not None]

    def _eject(self, health: _EngineHealth, cause: str, now: float) -> None:
        """Eject an engine, unless too many of its role are; its slow start follows."""
        attached = [self._engines[name] for name in self._attached()]
        peers = [peer for peer in attached if peer.role == health.role]
        num_ejected = sum(peer.ejected_until > now for peer in peers)
        if num_ejected + 1 > MAX_EJECTED_SHARE * len(peers):
            return
        health.num_slow_reports = 0
        health.num_ejections += 1
        health.changed_at = now
        factor = min(health.num_ejections, MAX_EJECTION_FACTOR)
        health.ejected_until = now + factor * self._config.ejection_seconds
        health.ejection_cause = cause
        health.slow_start_at = health.ejected_until

    def _forget_old(self, now: float) -> None:
        """Forget failures of long ago, and engines that have not returned."""
        for name, health in list(self._engines.items()):
            if now - max(health.changed_at, health.ejected_until) < FORGET_SECONDS:
                continue
            health.num_ejections = health.num_losses = 0
            if health.attached_at is None:
                del self._engines[name]
