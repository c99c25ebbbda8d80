"""Engines without workers, whose driver is the test."""

from gllm.cluster.records import RecoveryState
from gllm.engine.engine import Engine


def mark_ready(engine: Engine) -> None:
    """Let an engine that has not started accept requests."""
    recovery = engine._supervisor._recovery
    recovery.state, recovery.has_been_ready = RecoveryState.READY, True
