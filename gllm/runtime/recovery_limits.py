"""Limits of the recovery by the configuration."""

from gllm.cluster.records import RecoveryLimits
from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig


def make_recovery_limits(config: EngineConfig, nodes: NodesConfig | None) -> RecoveryLimits:
    """Return the limits of an engine's recovery.

    Args:
        config: of the engine.
        nodes: its machines; None for this one alone, where nothing waits for another one.
    """
    return RecoveryLimits(
        config.max_restarts,
        config.recovery_timeout,
        # Without restarts nothing could use a standby worker.
        config.standby_workers if config.max_restarts else 0,
        node_return_seconds=0.0 if nodes is None else nodes.node_return_timeout,
        join_seconds=0.0 if nodes is None else nodes.join_timeout,
    )
