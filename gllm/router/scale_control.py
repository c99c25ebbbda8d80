"""Number of engines that a router wants: its load, as the autoscaler sees it, and its decision.

The router starts and stops nothing. It publishes the decision in `GET /engines` and as the metric
`gllm:wanted_engines`; `gllm up`, Kubernetes or Ray follow it. All routers decide, but only the one
that all engines name their leader publishes the decision; without engines each router does.
"""

from collections.abc import Callable
from statistics import median

from gllm.config.router import RouterConfig
from gllm.engine.fleet_control import ScaleStatus
from gllm.options.slo import Slo
from gllm.router.dispatcher import Dispatcher
from gllm.routing.policies.predict import predict_all
from gllm.routing.prefix_index import PrefixIndex
from gllm.routing.scaling.autoscaler import (
    OVERDUE_FACTOR,
    Autoscaler,
    EngineLoad,
    EnginePhase,
    FleetLoad,
    ScaleDecision,
)
from gllm.routing.scaling.engine_rate import sustained_rate
from gllm.routing.state import RoutingRequest

PHASES = {"ready": EnginePhase.READY, "draining": EnginePhase.DRAINING}
"""Phases by state; engines in other states may serve later."""


class ScaleControl:
    """Decides how many engines should run, by the router's load. Implements `EngineScaling`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        config: RouterConfig,
        clock: Callable[[], float],
        is_leader: Callable[[], bool],
        parked_since: Callable[[], float | None],
    ) -> None:
        """Create the control of engines, which may attach and leave later.

        Args:
            dispatcher: has the engines and the lengths of requests.
            config: configuration of the router.
            clock: returns the time in seconds.
            is_leader: returns True if this router may decide for all engines.
            parked_since: returns the time since which a request has waited for an engine.
        """
        self._dispatcher = dispatcher
        self._records = dispatcher.records
        self._config = config.scale_conditions
        self._clock = clock
        self._is_leader = is_leader
        self._parked_since = parked_since
        self._park_timeout = config.park_timeout
        self._scaler = Autoscaler(self._config, clock()) if self._config.is_on else None
        self._decision = ScaleDecision(0)
        self._num_arrivals = 0
        self._engine_rate: float | None = None
        self._tpot_seconds: float | None = None
        self._woken_at = clock()

    @property
    def park_seconds(self) -> float:
        """Longest wait of a request for an engine; includes the start of one."""
        if self._scaler is None:
            return self._park_timeout
        return max(self._park_timeout, OVERDUE_FACTOR * self._scaler.startup_seconds)

    @property
    def holds_requests(self) -> bool:
        """True if requests wait while no engine runs, because one is being started."""
        if self._scaler is None:
            return False
        is_asleep = not self._decision.num_wanted
        return is_asleep or self._clock() - self._woken_at < self.park_seconds

    def on_requests(self, count: int, slo: Slo | None) -> None:
        """Count new requests for the arrival rate."""
        self._num_arrivals += count
        if slo is not None and slo.tpot_seconds is not None:
            self._tpot_seconds = slo.tpot_seconds
        if self._scaler is not None and not self._decision.num_wanted:
            # Not at the next tick: an engine may start up to a tick earlier.
            self._woken_at = self._clock()
            self._observe()

    def wants_drain(self, name: str) -> bool:
        """Return True if the present decision names an engine to drain."""
        return name in self._decision.drain

    def on_tick(self) -> None:
        """Update the number of engines that should run."""
        if self._scaler is not None:
            self._observe()

    def status(self) -> ScaleStatus | None:
        """Return the present decision; None if scaling is off."""
        if self._scaler is None:
            return None
        return ScaleStatus(
            is_leader=self._is_leader(),
            num_wanted=self._decision.num_wanted,
            drain=list(self._decision.drain),
            undrain=list(self._decision.undrain),
            removable=list(self._decision.removable),
            rate=self._scaler.rate.rate,
            engine_rate=self._engine_rate,
            startup_seconds=self._scaler.startup_seconds,
        )

    def _observe(self) -> None:
        assert self._scaler is not None
        now = self._clock()
        engines = [
            EngineLoad(
                record.name,
                PHASES.get(record.state, EnginePhase.STARTING),
                record.snapshot().num_requests,
                record.is_held,
            )
            for record in self._records.values()
            if record.state != "dead"
        ]
        self._engine_rate = self._config.scale_engine_rate or self._predict_rate()
        num_arrivals, self._num_arrivals = self._num_arrivals, 0
        parked = self._parked_since()
        load = FleetLoad(
            num_arrivals,
            int(parked is not None),
            max(self._predict_queue(), 0.0 if parked is None else now - parked),
            engines,
            self._engine_rate,
        )
        self._decision = self._scaler.observe(load, now)

    def _predict_rate(self) -> float | None:
        """Return the requests per second of one engine; None while step costs are unknown."""
        lengths = self._dispatcher.mean_lengths
        if lengths is None:
            return self._engine_rate
        rates = [
            sustained_rate(engine, engine.coefficients, lengths, self._tpot_seconds)
            for engine in (record.snapshot() for record in self._records.values())
            if engine.coefficients is not None
        ]
        # Without engines the last prediction holds.
        return median(rates) if rates else self._engine_rate

    def _predict_queue(self) -> float:
        """Return the time that a request would wait at the engine with the shortest queue."""
        ready = [record.snapshot() for record in self._records.values() if record.accepts_requests]
        prediction = predict_all(RoutingRequest(1, num_output_tokens=1), ready, PrefixIndex())
        return min((engine.ttft_seconds for engine in prediction.values()), default=0.0)
