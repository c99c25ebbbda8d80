"""The head process of a simulated engine: the real supervisor, without sockets, files and time."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from gllm.cluster.balance import BalanceLimits
from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.models.partition import StageCosts
from gllm.runtime import deaths as deaths_module
from gllm.runtime import supervisor as supervisor_module
from gllm.runtime.layer_planner import LayerPlanner
from gllm.runtime.supervisor import Supervisor
from tests.support.simulation.clock import VirtualLoop
from tests.support.simulation.network import Context, Hub
from tests.support.simulation.world import BLOCK_SIZE, LAYERS_PER_STAGE, MAX_MODEL_LEN, NUM_BLOCKS

BALANCE_LIMITS = BalanceLimits(window_seconds=2.0, num_windows=2, min_steps=10, cooldown_seconds=5)
"""Smaller than those of a server, because lives are short."""
HEAD: ContextVar[Context] = ContextVar("HEAD")
"""Place of the ZeroMQ context with which a supervisor that starts reaches its workers."""


class HeadAddress:
    """Address of the head's hub."""

    def __init__(self, hub: Any) -> None:
        self.connecting: set[int] = set()
        self._hub = hub
        hub.bind("head")

    def expect(self, sender: int) -> str:
        self._hub.expect(sender)
        self.connecting.add(sender)
        return "head"

    def on_connected(self, sender: int) -> None:
        self.connecting.discard(sender)

    def close(self) -> None:
        """Nothing is left."""


def create_supervisor(
    rng: Random, degrees: Sequence[int], nodes: NodesConfig | None = None, **options: Any
) -> Supervisor:
    """Return a supervisor that has not started.

    Args:
        rng: source of its jitter.
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
    supervisor = Supervisor(config, planner, lambda done, total: None, nodes)
    supervisor._recovery._jitter.seed(rng.random())
    return supervisor


@contextmanager
def patched_runtime(loop: VirtualLoop, rng: Random) -> Iterator[pytest.MonkeyPatch]:
    """Replace the supervisor's sockets, the clock, random bits and files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor_module, "Hub", Hub)
        patch.setattr(supervisor_module, "HeadSocket", HeadAddress)
        patch.setattr(supervisor_module, "zmq", SimpleNamespace(Context=HEAD.get))
        patch.setattr("secrets.randbits", rng.getrandbits)
        patch.setattr(deaths_module.DeathLog, "keep_evidence", lambda *_: None)
        patch.setattr(time, "monotonic", loop.time)
        yield patch
