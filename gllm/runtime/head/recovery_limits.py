"""Recovery of an engine by its configuration."""

import secrets
from random import Random

from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.recovery.records import RecoveryLimits
from gllm.recovery.recovery import Recovery
from gllm.runtime.head.layer_planner import LayerPlanner


def make_recovery(
    config: EngineConfig, planner: LayerPlanner, nodes: NodesConfig | None
) -> Recovery:
    """Return the recovery of an engine that has not started.

    Args:
        config: of the engine.
        planner: divides the layers among the stages.
        nodes: its machines; None for this one alone.
    """
    recovery = Recovery(
        planner.bounds,
        make_recovery_limits(config, nodes),
        Random(secrets.randbits(64)),
        config.stage_degrees,
        planner.should_measure,
        recut=planner.recut,
    )
    recovery.extend = planner.extend
    recovery.find_costliest = planner.find_costliest
    recovery.uses_joined_nodes = config.rebalance
    return recovery


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
        spare_preloads=nodes is not None and nodes.spare_preloads,
        node_return_seconds=0.0 if nodes is None else nodes.node_return_timeout,
        join_seconds=0.0 if nodes is None else nodes.join_timeout,
    )
