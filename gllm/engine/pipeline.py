"""Backend of an engine whose requests run on one pipeline of worker processes of its own."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from gllm.config.emulation import emulated_devices
from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.engine.attachment.attachment import RouterAttachment
from gllm.engine.interface import (
    EngineStatus,
    EngineUnavailableError,
    NodeDrainError,
    UnknownNodeError,
)
from gllm.engine.preflight import make_join_facts
from gllm.messages.lifecycle import StartProfile, StopProfile
from gllm.messages.node_report import NodeReport
from gllm.observability.logs import LogConfig
from gllm.options.slo import Slo
from gllm.runtime.head.cluster_head import ClusterHead
from gllm.runtime.head.kv_events import KvEventPublisher
from gllm.runtime.head.layer_planner import LayerPlanner
from gllm.runtime.head.node import LocalNode, Node
from gllm.runtime.head.supervisor import STOPPED, Supervisor
from gllm.runtime.node.machine import MachineMonitor, read_facts

log = logging.getLogger(__name__)

RECOVERY_RETRY_SECONDS = 5
"""Time after which a client may try again while the engine recovers."""


class PipelineBackend:
    """Runs token-id requests on a pipeline of worker processes; a backend of `TextEngine`."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        planner: LayerPlanner,
        logs: LogConfig,
        shows_progress: bool,
        node: Node | None,
        nodes: NodesConfig | None = None,
        node_secret_file: str | None = None,
    ) -> None:
        """Create the backend; `start` starts the workers.

        Args:
            config: configuration of the engine, with max_model_len resolved.
            folder: folder of the model.
            planner: divides the layers among the stages.
            logs: level and format of the workers' logs.
            shows_progress: show a progress bar while the weights load.
            node: node with worker processes that were started before; None to start them.
            nodes: machines of the engine, with the head's address; None for this one alone.
            node_secret_file: file of the secret that the machines share.

        Raises:
            ValueError: the machines cannot form an engine; the message says what to do.
            ModelError: the model's files cannot be read.
        """
        supervisor = self.supervisor = Supervisor(config, planner, self._show_progress, nodes)
        self.client, self.died = supervisor.client, supervisor.died
        self.set_sleeping = supervisor.set_sleeping
        self.reset_prefix_cache = supervisor.reset_prefix_cache
        self._cluster: ClusterHead | None = None
        """Other machines; None for this one alone."""
        if nodes is not None and nodes.is_used:
            facts = make_join_facts(config, folder, config.max_model_len or 0)
            self._cluster = ClusterHead(
                nodes,
                node_secret_file,
                facts,
                config.stage_degrees,
                config.recovery_timeout,
                freeze_timeout=config.freeze_timeout,
            )
        self.attachment: RouterAttachment | None = None
        """Sessions with routers; None without."""
        self._config = config
        self._folder = folder
        self._logs = logs
        self._node = node
        self._shows_progress = shows_progress
        self._publisher: KvEventPublisher | None = None
        """None if KV cache events are not published."""
        self._machine = MachineMonitor()
        self._facts = read_facts("", 0, devices=self._machine.gpu_names)
        self._bar: tqdm | None = None
        """Progress bar of the weights; None until the first bytes are loaded."""

    @property
    def state(self) -> str:
        """Current state: loading, ready, recovering, sleeping, draining or dead."""
        return self.supervisor.state

    @property
    def is_sleeping(self) -> bool:
        """True after `set_sleeping`, also while the engine recovers."""
        return self.supervisor.admission.is_sleeping

    def status(self) -> EngineStatus:
        """Return a snapshot of state and counters."""
        status = read_status(self.supervisor, self._config, self._cluster)
        attachment = self.attachment
        if attachment is None or not attachment.needs_router:
            return status
        num_routers = len(attachment.attached_routers)
        cause = "" if attachment.is_ready_without else attachment.unattached_cause
        return replace(status, num_routers=num_routers, unattached_cause=cause)

    @property
    def num_local_workers(self) -> int:
        """Number of workers on this machine."""
        degrees = self._config.stage_degrees
        if self._cluster is None:
            return sum(degrees)
        stage_nodes = self._cluster.stage_nodes
        return sum(size for size, node in zip(degrees, stage_nodes, strict=True) if node == 0)

    def describe(self) -> dict[str, Any]:
        """Return configuration and state as JSON values."""
        lengths = self.supervisor.client.output_lengths
        return {
            "state": self.supervisor.state,
            "layers": [len(layers) for layers in self.supervisor.planner.layers],
            "kv_blocks": self.supervisor.num_blocks,
            "kv_bytes": self.supervisor.kv_bytes,
            "config": msgspec.to_builtins(self._config),
            **({} if lengths is None else {"output_lengths": lengths.describe()}),
            **({} if self.attachment is None else {"routers": self.attachment.describe()}),
        }

    def nodes(self) -> list[NodeReport]:
        """Return the state of each machine, the head first."""
        reports = self._node_reports()
        if not self._config.is_emulated:
            return reports
        # The machines' own devices do nothing.
        names = emulated_devices(self._config.device, len(self.supervisor.planner.layers))
        degrees = dict(enumerate(self._config.stage_degrees))

        def devices_of(stages: Sequence[int]) -> list[str]:
            return [names[stage] for stage in stages for _ in range(degrees.get(stage, 1))]

        return [
            msgspec.structs.replace(report, devices=devices_of(report.stages)) for report in reports
        ]

    def _node_reports(self) -> list[NodeReport]:
        facts = self._facts
        if self._cluster is not None:
            return self._cluster.reports(self.supervisor.node_stages)
        return [
            NodeReport(
                name=facts.host_name,
                state="member",
                rank=0,
                host_name=facts.host_name,
                system=facts.system,
                version=facts.version,
                devices=facts.devices,
                load=self._machine.read(),
                stages=list(range(self._config.pipeline_parallel_size)),
            )
        ]

    def drain_node(self, name: str) -> str:
        """Move the stages of a machine to other machines and remove it."""
        if self._cluster is not None:
            return self._cluster.drain(name, self.check_ready)
        if name == self._facts.host_name:
            raise NodeDrainError(f"{name} has all of the engine: stop the engine instead")
        raise UnknownNodeError(f"there is no machine {name!r}: see /nodes")

    @property
    def accepts_requests(self) -> bool:
        """True if requests run, or wait for the end of a recovery."""
        return not self.supervisor.admission.reason_to_refuse

    def check_ready(self) -> None:
        """Raise EngineUnavailableError unless the engine is ready."""
        admission, cause = self.supervisor.admission, self.supervisor.cause
        state = admission.name
        if state == "recovering" and admission.is_sleeping:
            state = "sleeping"
        if state == "recovering":
            cause = f"the engine is recovering: {self.supervisor.deaths.cause}"
            raise EngineUnavailableError(state, cause, RECOVERY_RETRY_SECONDS)
        if state != "ready":
            raise EngineUnavailableError(state, cause or f"the engine is {state}")

    def check_admission(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        priority: int,
        cache_salt: str,
        slo: Slo | None,
    ) -> None:
        """Accept every request; only a router refuses requests by their SLO."""

    async def start(self) -> None:
        """Start the workers and wait until a warm-up step has run on all of them.

        Raises EngineError if a worker fails.
        """
        if self._config.step_log is not None:
            # Drivers append: the log of a run has the events of all its drivers.
            try:
                open(self._config.step_log, "wb").close()
            except OSError as error:
                path = self._config.step_log
                log.warning("the step log %s cannot be emptied: %s", path, error.strerror)
        try:
            self._start_publisher()
            if self._cluster is not None:
                names = await self._cluster.form()
                self.supervisor.set_nodes(names, self._cluster.machines)
            self._node = self._node or LocalNode(self.num_local_workers)
            await self.supervisor.start(self._folder, self._node, self._logs, self._cluster)
            if self.attachment is not None:
                await self.attachment.start()
        except BaseException as error:
            is_cancelled = isinstance(error, asyncio.CancelledError)
            cause = STOPPED if is_cancelled else f"the engine could not start: {error}"
            self.supervisor.die(cause)
            await self.stop()
            raise
        finally:
            if self._bar is not None:
                self._bar.close()

    async def drain(self, seconds: float) -> None:
        """Reject new requests and wait at most `seconds` for the running ones."""
        if self.attachment is not None:
            await self.attachment.drain()
        await self.supervisor.drain(seconds)

    async def stop(self) -> None:
        """Stop the workers; running requests end with an error."""
        # The steps run from the last one to the first, each even if an earlier one fails.
        async with AsyncExitStack() as steps:
            if self._node is not None:
                steps.push_async_callback(self._node.stop)
            if self._cluster is not None:
                cause = self.supervisor.cause or STOPPED
                steps.push_async_callback(self._cluster.stop, cause, cause != STOPPED)
            steps.push_async_callback(self._stop_publisher)
            steps.push_async_callback(self.supervisor.stop)
            # First, so that routers continue the remaining requests elsewhere.
            if self.attachment is not None:
                steps.push_async_callback(self.attachment.stop)

    async def start_profile(self, folder: str) -> str:
        """Start a profile on all stages; return the first error, empty on success."""
        return await self.supervisor.run_command(lambda number: StartProfile(number, folder))

    async def stop_profile(self) -> str:
        """Stop the profile on all stages; return the first error, empty on success."""
        return await self.supervisor.run_command(StopProfile)

    def _start_publisher(self) -> None:
        """Publish KV cache events, if that is configured. Raises ValueError for a bad address."""
        events = self._config.kv_events_config
        if events is not None and events.is_enabled:
            block_size = self._config.scheduler.block_size
            publisher = KvEventPublisher(events, block_size, self.supervisor.kv_events)
            publisher.start()
            self._publisher = publisher

    async def _stop_publisher(self) -> None:
        if self._publisher is not None:
            await self._publisher.stop()
            self._publisher = None

    def _show_progress(self, done: int, total: int) -> None:
        if self._bar is None:
            hidden = not self._shows_progress
            self._bar = tqdm(unit="B", unit_scale=True, desc="weights", disable=hidden)
        self._bar.total = total
        self._bar.update(done - self._bar.n)


def read_status(
    supervisor: Supervisor, config: EngineConfig, cluster: ClusterHead | None = None
) -> EngineStatus:
    """Return the state, load and counters of an engine for metrics and health checks.

    Args:
        supervisor: runs the engine's workers.
        config: configuration of the engine.
        cluster: manager of the engine's other machines; None if there are none.
    """
    client, deaths = supervisor.client, supervisor.deaths
    mover, lengths = supervisor.kv_mover, client.output_lengths
    return EngineStatus(
        state=supervisor.state,
        is_sleeping=supervisor.admission.is_sleeping,
        cause_of_death=supervisor.cause,
        is_healthy=supervisor.state == "recovering"
        or (supervisor.state in ("ready", "sleeping", "draining") and not supervisor.has_stalled),
        num_requests=client.num_requests,
        stats=client.stats,
        step_sizes=dict(client.step_sizes),
        stage_loads=dict(client.totals.stage_loads),
        rank_loads=dict(client.totals.rank_loads),
        bubbles=client.totals.bubbles,
        num_kv_blocks=supervisor.num_blocks,
        kv_cache_bytes=supervisor.kv_bytes,
        block_size=config.scheduler.block_size,
        epoch=supervisor.recovery.epoch,
        recovering_since=supervisor.recovering_since,
        recovery_cause=deaths.cause if supervisor.recovering_since is not None else "",
        is_recovery_overdue=supervisor.is_recovery_overdue,
        recoveries=dict(deaths.recoveries),
        recovery_seconds=tuple(deaths.recovery_seconds),
        recovery_phase_seconds=dict(deaths.phase_seconds),
        num_resumed_requests=client.num_resumed_requests,
        num_stale_frames=supervisor.num_stale_frames,
        num_node_losses=0 if cluster is None else cluster.num_losses,
        num_malformed_frames=0 if cluster is None else cluster.num_malformed_frames,
        refused_peers={} if cluster is None else cluster.refused_peers,
        tensor_parallel_size=max(config.stage_degrees),
        kv_transfers=mover.totals if mover.is_enabled else None,
        kv_disk=mover.disk_totals,
        length_predictor="" if lengths is None else lengths.name,
        output_lengths=() if lengths is None else lengths.accuracy.rows(),
    )
