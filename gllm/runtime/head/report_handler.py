"""Dispatch of the workers' reports to the recovery, the client and the layer planner."""

import logging
import time
from collections.abc import Callable

from gllm.messages.codec import AnyMessage
from gllm.messages.control import CommandDone
from gllm.messages.handoff import FirstChunkComputed, KvPushStarted
from gllm.messages.kv_cache import KvCacheEvents
from gllm.messages.kv_transfer import KvMoverStuck, KvTransferTotals
from gllm.messages.lifecycle import (
    GenerationClosed,
    Heartbeat,
    Hello,
    LayersPrepared,
    LoadProgress,
    StageFailed,
    StageLoaded,
    StageReady,
)
from gllm.messages.measurement import StageMeasured
from gllm.messages.reports import BubbleReport, StageUtilization, StepCostReport
from gllm.messages.requests import EngineOutputs
from gllm.recovery.actions import Action
from gllm.recovery.placement import Placement
from gllm.recovery.records import RecoveryState
from gllm.recovery.recovery import Recovery
from gllm.runtime.head.action_executor import ActionExecutor
from gllm.runtime.head.client import EngineClient
from gllm.runtime.head.death_handler import DeathHandler
from gllm.runtime.head.deaths import DeathLog
from gllm.runtime.head.layer_planner import LayerPlanner, format_layers
from gllm.runtime.head.liveness_watch import LivenessWatch
from gllm.runtime.head.load_progress import TotalLoadProgress

log = logging.getLogger(__name__)


class ReportHandler:
    """Handles the messages of the workers on the head's event loop."""

    def __init__(
        self,
        recovery: Recovery,
        executor: ActionExecutor,
        client: EngineClient,
        deaths: DeathLog,
        death_handler: DeathHandler,
        planner: LayerPlanner,
        progress: TotalLoadProgress,
        execute: Callable[[list[Action]], None],
    ) -> None:
        """Create the handler.

        Args:
            recovery: decides what follows.
            executor: has the connections to the workers.
            client: has the running requests.
            deaths: log of the deaths.
            death_handler: handles workers that fail.
            planner: divides the layers.
            progress: of loading, shown during the first start.
            execute: executes the actions that follow.
        """
        self.liveness: LivenessWatch | None = None
        """None if frozen workers are left alone."""
        self._recovery = recovery
        self._executor = executor
        self._client = client
        self._deaths = deaths
        self._death_handler = death_handler
        self._planner = planner
        self._progress = progress
        self._execute = execute

    def begin_generation(self, placement: Placement) -> None:
        """Expect the reports of a generation's workers."""
        self._progress.clear()
        if self.liveness is not None:
            self.liveness.watch(placement)

    def close(self) -> None:
        """Watch the workers no longer."""
        if self.liveness is not None:
            self.liveness.close()

    def on_message(self, sender: int, message: AnyMessage) -> None:
        """Handle a message of a worker."""
        match message:
            case EngineOutputs() | StageUtilization() | BubbleReport() | StepCostReport():
                self._client.on_report(message)
                if isinstance(message, EngineOutputs) and message.outcome.num_step_tokens:
                    self._recovery.on_step_committed()
                if isinstance(message, StageUtilization):
                    self._on_utilization(message, time.monotonic())
            case KvCacheEvents():
                self._executor.kv_events.on_events(message)
            case KvPushStarted() | FirstChunkComputed():
                self._executor.kv_mover.on_prefill(message)
            case KvTransferTotals():
                self._executor.kv_mover.totals += message
            case KvMoverStuck():
                self._executor.kv_mover.restart()
            case Heartbeat():
                self._deaths.heartbeats[sender] = message
                if self.liveness is not None:
                    self.liveness.on_heartbeat(sender, message)
            case CommandDone():
                self._executor.commands.on_done(message)
            case Hello():
                self._executor.connections.channels.on_connected(sender)
                self._execute(self._recovery.on_connected(sender, time.monotonic()))
            case _:
                self._on_lifecycle(sender, message, time.monotonic())

    def _on_lifecycle(self, sender: int, message: AnyMessage, now: float) -> None:
        """Handle the report of a worker that changes the engine's state."""
        match message:
            case StageMeasured():
                self._planner.on_measured(message)
                self._execute(self._recovery.on_measured(sender, now, message.keeps_weights))
            case LayersPrepared(change, num_bytes, reason, is_failed):
                place = self._recovery.name_of(sender) or f"the new worker {sender}"
                outcome = reason or f"{num_bytes / 2**20:.1f} MiB read"
                log.info("planned change %d: %s has prepared: %s", change, place, outcome)
                error = f"{place} cannot load its layers: {reason}" if is_failed else ""
                self._execute(self._recovery.on_prepared(sender, change, now, error))
            case LoadProgress():
                self._recovery.on_progress(sender, now)
                if not self._recovery.has_been_ready:
                    self._progress.on_report(sender, message)
            case StageLoaded():
                self._executor.loaded[sender] = message
                self._execute(self._recovery.on_loaded(sender, now, message.keeps_weights))
            case StageReady(kv_layout=layout):
                self._executor.kv_mover.add_layout(sender, layout)
                self._execute(self._recovery.on_ready(sender, now))
            case GenerationClosed():
                self._execute(self._recovery.on_closed(sender, now))
            case StageFailed(cause=cause):
                self._death_handler.on_failed(sender, cause)

    def _on_utilization(self, message: StageUtilization, now: float) -> None:
        """Begin a generation with other layers if they have been faster for long enough."""
        if self._recovery.state is not RecoveryState.READY or message.rank:
            return
        better = self._planner.on_totals(
            message.stage, message.num_steps, message.busy_seconds, now
        )
        if better is not None:
            cause = f"the layers are divided anew: {format_layers(better.layers)}"
            bounds = [(part.start, part.stop) for part in better.layers]
            self._execute(self._recovery.change_layers(bounds, cause, now))
