"""Flips by load: an idle engine of one phase gets the role of the other phase.

Source: "Inference without Interference" (TetriInfer, arXiv 2401.11181), section 3.5: a watcher may
flip an instance whose load is below 10 % for one minute; the evaluation flips instances that are
idle for one minute. Here an engine is flipped only if the engines of the other phase are loaded, so
that an idle fleet does not flip back and forth.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gllm.options.field_types import convert_fields
from gllm.options.options import MAX_TIMEOUT_SECONDS, option
from gllm.routing.disaggregation.policy import RoleChange
from gllm.routing.disaggregation.role_pools import OPPOSITE_ROLES
from gllm.routing.state import EngineSnapshot


@dataclass(frozen=True)
class FlipConfig:
    """Router options for changing engines between the prefill role and the decode role by load."""

    flip_low_load: float = option(
        0.1, "mean load of an engine below which it may be flipped, from 0 to 1", gt=0, lt=1
    )
    flip_high_load: float = option(
        0.5,
        "mean load of the other phase from which it gets an engine, above --flip-low-load, so that "
        "the engine is not flipped back by the same load",
        gt=0,
        le=1,
    )
    flip_seconds: float = option(
        60.0,
        "time over which loads are averaged: an engine is observed for this long before a flip, "
        "and the fleet flips at most one engine in it",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )

    def __post_init__(self) -> None:
        """Check the fields. Raises ValueError that names the field and the fix."""
        convert_fields(self)
        if self.flip_low_load >= self.flip_high_load:
            raise ValueError(
                f"flip_low_load is {self.flip_low_load}, but has to be below flip_high_load "
                f"({self.flip_high_load})"
            )


def phase_load(engine: EngineSnapshot) -> float:
    """Return the load of a prefill or decode engine, from 0 to 1.

    A prefill engine has load 1 while it has prompt tokens to compute, otherwise 0. A decode engine
    has its share of max_num_seqs or of the KV blocks in use, whichever is greater, and 1 while
    requests wait.
    """
    if engine.role == "prefill":
        return float(engine.num_waiting_tokens > 0 or engine.stats.in_flight > 0)
    if engine.stats.waiting or engine.num_sent > engine.max_num_seqs:
        return 1.0
    seats = engine.num_requests / engine.max_num_seqs
    return min(1.0, max(seats, engine.stats.kv_usage, 0.0))


class FlipPolicy:
    """Changes an idle prefill engine to decode, or the reverse, when the other role is overloaded.

    The last engine of a role is kept. Mixed engines are ignored.
    """

    def __init__(self, config: FlipConfig | None = None) -> None:
        """Create a policy that has observed nothing."""
        self._config = config or FlipConfig()
        self._windows: dict[str, _LoadWindow] = {}
        self._flipped_at: float | None = None

    def observe(self, engines: Sequence[EngineSnapshot], now: float) -> RoleChange | None:
        """Record the present loads; return the role change, if any.

        Args:
            engines: all attached engines; those that do not take requests are not flipped, but
                count as engines of their role no more.
            now: time in seconds, not less than before.
        """
        ready = {engine.name: engine for engine in engines if engine.state == "ready"}
        for name in [name for name in self._windows if name not in ready]:
            del self._windows[name]
        for name, engine in ready.items():
            window = self._windows.get(name)
            if window is None or window.role != engine.role:
                window = self._windows[name] = _LoadWindow(engine.role, now)
            window.add(phase_load(engine), now, self._config.flip_seconds)
        if self._flipped_at is not None and now - self._flipped_at < self._config.flip_seconds:
            return None
        change = self._find_flip(now)
        if change is not None:
            self._flipped_at = now
        return change

    def _find_flip(self, now: float) -> RoleChange | None:
        """Return the idlest engine whose role is too idle while the other one is loaded."""
        loads: dict[str, dict[str, float]] = {role: {} for role in OPPOSITE_ROLES}
        sizes = dict.fromkeys(OPPOSITE_ROLES, 0)
        for name, window in self._windows.items():
            if window.role not in OPPOSITE_ROLES:
                continue
            sizes[window.role] += 1
            if now - window.since >= self._config.flip_seconds:
                loads[window.role][name] = window.mean(now, self._config.flip_seconds)
        for role, other in OPPOSITE_ROLES.items():
            low_load = self._config.flip_low_load
            idle = {name: load for name, load in loads[role].items() if load < low_load}
            demand = loads[other]
            # Engines whose window is not complete are not known to need help.
            if not idle or sizes[role] < 2 or not demand or len(demand) < sizes[other]:
                continue
            if sum(demand.values()) / len(demand) >= self._config.flip_high_load:
                return RoleChange(min(sorted(idle), key=loads[role].__getitem__), other)
        return None


class _LoadWindow:
    """Loads of one engine in one role."""

    def __init__(self, role: str, now: float) -> None:
        self.role = role
        self.since = now
        """Time of the first observation."""
        self._loads: deque[tuple[float, float]] = deque()
        """Times and loads; a load holds until the next one."""

    def add(self, load: float, now: float, window_seconds: float) -> None:
        """Add a load; those that ended before the window are forgotten."""
        if self._loads and self._loads[-1][1] == load:
            return
        self._loads.append((now, load))
        while len(self._loads) > 1 and self._loads[1][0] <= now - window_seconds:
            self._loads.popleft()

    def mean(self, now: float, window_seconds: float) -> float:
        """Return the mean load of the last seconds; these have been observed."""
        total, end = 0.0, now
        for start, load in reversed(self._loads):
            begin = max(start, now - window_seconds)
            total += load * max(0.0, end - begin)
            end = begin
        return total / window_seconds
