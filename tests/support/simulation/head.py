"""The head process of a simulated engine: the real supervisor, without sockets, files and time."""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from random import Random
from types import ModuleType
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.recovery.balance import BalanceLimits
from gllm.recovery.partition import StageCosts
from gllm.runtime.head import supervisor as supervisor_module
from gllm.runtime.head.layer_planner import LayerPlanner
from gllm.runtime.head.supervisor import Supervisor
from tests.support.simulation.clock import VirtualLoop
from tests.support.simulation.network import Context, Hub
from tests.support.simulation.world import BLOCK_SIZE, LAYERS_PER_STAGE, MAX_MODEL_LEN, NUM_BLOCKS

BALANCE_LIMITS = BalanceLimits(window_seconds=2.0, num_windows=2, min_steps=10, cooldown_seconds=5)
"""Smaller than those of a server, because lives are short."""
Part = tuple[ModuleType, str, object]
"""Module, name in it, and what replaces it in a simulation."""
HEAD: ContextVar[Context] = ContextVar("HEAD")
"""Place of the ZeroMQ context with which a supervisor that starts reaches its workers."""
_NUMBERS = count(1)


class HubAddress:
    """Address of the hub of the workers of a head or an agent, in place of HeadSocket."""

    def __init__(self, hub: Any) -> None:
        self.connecting: set[int] = set()
        self._hub = hub
        self._address = f"hub {next(_NUMBERS)}"
        hub.bind(self._address)

    def expect(self, sender: int) -> str:
        self._hub.expect(sender)
        self.connecting.add(sender)
        return self._address

    def close(self) -> None:
        """Nothing is left."""


def create_supervisor(
    degrees: Sequence[int], nodes: NodesConfig | None = None, **options: Any
) -> Supervisor:
    """Return a supervisor that has not started.

    Args:
        degrees: ranks of each stage of the engine.
        nodes: machines of the engine; None for one.
        options: of the engine's configuration.
    """
    config = EngineConfig.from_options(
        "demo",
        pipeline_parallel_size=len(degrees),
        tensor_parallel_size=degrees,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory=NUM_BLOCKS * sum(degrees) * 1000,
        block_size=BLOCK_SIZE,
        max_prefill_tokens=32,
        min_prefill_tokens=4,
        **options,
    )
    num_layers = LAYERS_PER_STAGE * len(degrees)
    layers = [
        range(begin, begin + LAYERS_PER_STAGE) for begin in range(0, num_layers, LAYERS_PER_STAGE)
    ]
    planner = LayerPlanner(config, layers, StageCosts((1.0,) * num_layers), BALANCE_LIMITS)
    return Supervisor(config, planner, lambda done, total: None, nodes)


@contextmanager
def patched_runtime(loop: VirtualLoop, rng: Random, parts: Sequence[Part] = ()) -> Iterator[None]:
    """Replace the clock, random bits and the supervisor's sockets.

    Args:
        loop: has the clock.
        rng: source of the random bits.
        parts: further names of modules and what replaces them.
    """
    own: list[Part] = [
        (time, "monotonic", loop.time),
        (secrets, "randbits", rng.getrandbits),
        (supervisor_module, "Hub", Hub),
        (supervisor_module, "HeadSocket", HubAddress),
        (supervisor_module, "create_context", lambda owner: HEAD.get()),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module, name, part in (*own, *parts):
            patch.setattr(module, name, part)
        yield
