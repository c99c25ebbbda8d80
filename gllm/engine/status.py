"""Snapshot of an engine for metrics and probes."""

from gllm.config.engine import EngineConfig
from gllm.engine.interface import EngineStatus
from gllm.runtime.head.cluster_head import ClusterHead
from gllm.runtime.head.supervisor import Supervisor


def read_status(
    supervisor: Supervisor, config: EngineConfig, cluster: ClusterHead | None = None
) -> EngineStatus:
    """Return the state and the counters of an engine.

    Args:
        supervisor: of the engine.
        config: of the engine.
        cluster: its other machines; None for this one alone.
    """
    client, deaths = supervisor.client, supervisor.deaths
    mover = supervisor.kv_mover
    is_moving = client.stalled_seconds < config.health_timeout
    return EngineStatus(
        state=supervisor.state,
        cause_of_death=supervisor.cause,
        is_healthy=supervisor.state == "recovering"
        or (supervisor.state in ("ready", "sleeping", "draining") and is_moving),
        num_requests=client.num_requests,
        stats=client.stats,
        step_sizes=dict(client.step_sizes),
        stage_loads=dict(client.totals.stage_loads),
        rank_loads=dict(client.totals.rank_loads),
        bubbles=client.totals.bubbles,
        num_kv_blocks=supervisor.num_blocks,
        kv_cache_bytes=supervisor.kv_bytes,
        block_size=config.scheduler.block_size,
        generation=supervisor.recovery.generation,
        recovering_since=supervisor.recovering_since,
        recovery_cause=deaths.cause if supervisor.recovering_since is not None else "",
        is_recovery_overdue=supervisor.is_recovery_overdue,
        recoveries=dict(deaths.recoveries),
        recovery_seconds=tuple(deaths.recovery_seconds),
        num_resumed_requests=client.num_resumed_requests,
        num_stale_frames=supervisor.num_stale_frames,
        num_node_losses=0 if cluster is None else cluster.num_losses,
        num_malformed_frames=0 if cluster is None else cluster.num_malformed_frames,
        refused_peers={} if cluster is None else cluster.refused_peers,
        tensor_parallel_size=max(config.stage_degrees),
        kv_transfers=mover.totals if mover.is_enabled else None,
    )
