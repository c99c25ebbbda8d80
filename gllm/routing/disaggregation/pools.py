"""Engines of a phase, by the roles that they announce."""

from collections.abc import Sequence

from gllm.routing.state import EngineSnapshot


def prefill_pool(engines: Sequence[EngineSnapshot]) -> Sequence[EngineSnapshot]:
    """Return the engines that prefill: those of this role and mixed ones, else all."""
    return _pool(engines, "prefill")


def decode_pool(engines: Sequence[EngineSnapshot]) -> Sequence[EngineSnapshot]:
    """Return the engines that decode: those of this role and mixed ones, else all.

    Every engine can run both phases, so a fleet that has lost all engines of a role still serves.
    """
    return _pool(engines, "decode")


def _pool(engines: Sequence[EngineSnapshot], role: str) -> Sequence[EngineSnapshot]:
    own = [engine for engine in engines if engine.role in (role, "mixed")]
    return own or engines
