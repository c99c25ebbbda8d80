"""Command line and environment of a service's process on a node: `gllm serve` with a node rank."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gllm.config.join import JoinConfig
from gllm.config.node_environment import remove_launcher
from gllm.deploy.cluster.service_request import check_parameters
from gllm.messages.services import StartServiceProcess
from gllm.options.addresses import format_host_port
from gllm.plan.flags import ENGINE_CONFIGS, render_flags

KEY_VARIABLE = "GLLM_API_KEY"
"""Environment variable from which `gllm serve` takes the service's key, so that process lists do
not show it."""


@dataclass(frozen=True)
class ServiceMachine:
    """Properties of a node that the processes of all its services share."""

    name: str
    address: str
    """IP address at which other nodes reach it."""
    config: JoinConfig = field(default_factory=JoinConfig)
    """Its devices, links and ports."""


@dataclass(frozen=True)
class ServicePorts:
    """Ports of a head's process; 0 for those that it does not need."""

    api: int = 0
    head: int = 0


def make_command(
    machine: ServiceMachine, start: StartServiceProcess, ports: ServicePorts, head: str
) -> list[str]:
    """Return the command line of a process.

    Args:
        machine: of this node.
        start: command of the master.
        ports: of the process.
        head: HOST:PORT of the head of its engine.

    Raises:
        ValueError: a parameter is not one that services may set.
    """
    check_parameters(start.model, start.parameters)
    num_nodes, config = len(start.degrees), machine.config
    values: dict[str, Any] = {
        "model": start.model,
        "pipeline_parallel_size": num_nodes,
        "tensor_parallel_size": start.degrees,
        "layers": start.layers,
        "host": machine.address if start.node_rank == 0 else "127.0.0.1",
        "port": ports.api,
        "shutdown_timeout": start.shutdown_seconds,
        "device": config.device,
        "threads": config.threads,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "node_secret_file": config.node_secret_file,
    }
    if num_nodes > 1:
        values |= {
            "nnodes": num_nodes,
            "node_rank": start.node_rank,
            "master_addr": head,
            "node_name": machine.name,
            "data_port": config.data_port,
            "advertise": config.advertise,
            "link_congestion": config.link_congestion,
            "link_policy": config.link_policy,
        }
    flags = render_flags(ENGINE_CONFIGS, {**values, **start.parameters}, "inference_parameters")
    return [sys.executable, "-m", "gllm.serve", *flags]


def make_environment(api_key: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a process.

    Args:
        api_key: of the service; empty for a process that does not serve its API.
        environment: of this process; None for os.environ. A launcher's description of a group of
            machines is left out, because the service's group is another one.
    """
    own = remove_launcher(os.environ if environment is None else environment)
    own.pop(KEY_VARIABLE, None)
    return own | {KEY_VARIABLE: api_key} if api_key else own


def make_url(machine: ServiceMachine, ports: ServicePorts) -> str:
    """Return the URL of the API of a service whose head runs on this node."""
    return f"http://{format_host_port(machine.address, ports.api)}"
