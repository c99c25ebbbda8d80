"""An engine of the demo model whose workers are scripted, without processes or weights."""

from typing import Any

from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from tests.support.nodes.scripted_node import ScriptedNode


def scripted_config(num_stages: int = 2, **options: Any) -> EngineConfig:
    return EngineConfig.from_options(
        "demo", pipeline_parallel_size=num_stages, max_model_len=256, **options
    )


def scripted_engine(
    config: EngineConfig | None = None, node: ScriptedNode | None = None, **options: Any
) -> tuple[Engine, ScriptedNode]:
    """An engine that has not started, and its node. Options are those of `Engine`."""
    node = node or ScriptedNode()
    return Engine(config or scripted_config(), node=node, **options), node
