"""Flags of a plan's engines and router as arguments of a command line."""

from collections.abc import Collection, Mapping
from typing import Any

from gllm.config.attachment import AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.config.router import RouterConfig
from gllm.config.server import ServerConfig
from gllm.options.flags import FlagParser, add_flags, flag_arguments
from gllm.plan.serving_plan import PlanError
from gllm.scheduler.config import SchedulerConfig

ENGINE_CONFIGS = (EngineConfig, AttachmentConfig, NodesConfig, ServerConfig)
ROUTER_CONFIGS = (RouterConfig, ServerConfig)
SCHEDULER_CONFIGS = (SchedulerConfig,)
DERIVED_ENGINE_FIELDS = {
    "model": "model",
    "pipeline_parallel_size": "stages",
    "tensor_parallel_size": "devices of the stages",
    "layers": "layers of the stages",
    "nnodes": "nodes of the stages",
    "stages_per_node": "nodes of the stages",
    "node_rank": "nodes of the stages",
    "master_addr": "hosts of the nodes",
    "node_name": "names of the nodes",
    "data_port": "port of the engine",
    "kv_transfer_address": "port of the engine",
    "router": "router",
    "hub": "router",
    "role": "role of the engine",
    "name": "name of the engine",
    "port": "port of the engine",
}
"""Fields of `gllm serve` that a plan sets by others, and the name of these."""
DERIVED_ROUTER_FIELDS = {
    "model": "model",
    "engines": "engines",
    "port": "port of the router",
    "policy": "policy of the router",
    "preset": "preset of the router",
}
"""The same for `gllm router`."""


def render_flags(
    configs: Collection[type],
    values: Mapping[str, Any],
    path: str,
    derived: Mapping[str, str] | None = None,
) -> list[str]:
    """Return flags as arguments of a command line.

    Args:
        configs: configurations that have the flags.
        values: values by the names of the flags, with dashes or underscores.
        path: of the values in the plan, for errors.
        derived: fields that the plan sets by other fields.

    Raises:
        PlanError: there is no such flag, or it cannot have the value; the message names the fix.
    """
    parser = FlagParser(add_help=False)
    for config in configs:
        add_flags(parser, config)
    arguments: list[str] = []
    for key, value in values.items():
        try:
            action = parser.action_of(key)
            if source := (derived or {}).get(action.dest):
                raise ValueError(f"the plan sets it by the {source}: remove it here")
            arguments += flag_arguments(action.option_strings[0], action, value, key)
        except ValueError as error:
            raise PlanError(f"{path}.{key}: {error}") from None
    return arguments


def find_flag(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a flag by its name with underscores; None if it is not set."""
    return next((value for key, value in values.items() if key.replace("-", "_") == name), None)
