"""Command line and environment of a service's process on a node: `gllm serve` with a node rank."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from gllm.config.node_environment import remove_launcher
from gllm.deploy.cluster.service_request import check_parameters, parameter_flags
from gllm.messages.services import StartServiceProcess
from gllm.options.addresses import format_host_port

KEY_VARIABLE = "GLLM_API_KEY"
"""Environment variable from which `gllm serve` takes the service's key, so that process lists do
not show it."""


@dataclass(frozen=True)
class ServiceMachine:
    """Properties of a node that the processes of all its services share."""

    name: str
    address: str
    """IP address at which other nodes reach it."""
    node_secret_file: str | None = None
    data_port: int = 0
    advertise: str = ""
    link_congestion: str | None = None
    link_policy: str | None = None
    """Order of messages on links; None for the default."""
    device: str = "auto"
    threads: int | None = None
    gpu_memory_utilization: float = 0.9
    ports: tuple[int, int] = (0, 0)
    """First and last port for the API of a service and the head of its engine."""


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
    num_nodes = len(start.degrees)
    is_head = start.node_rank == 0
    flags = [
        f"--pp={num_nodes}",
        f"--tp={','.join(map(str, start.degrees))}",
        f"--layers={start.layers}",
        f"--host={machine.address if is_head else '127.0.0.1'}",
        f"--port={ports.api}",
        f"--shutdown-timeout={start.shutdown_seconds:g}",
        f"--device={machine.device}",
        f"--gpu-memory-utilization={machine.gpu_memory_utilization}",
        *parameter_flags(start.parameters),
    ]
    if machine.threads is not None:
        flags.append(f"--threads={machine.threads}")
    if machine.node_secret_file is not None:
        flags.append(f"--node-secret-file={machine.node_secret_file}")
    if num_nodes > 1:
        flags += [
            f"--nnodes={num_nodes}",
            f"--node-rank={start.node_rank}",
            f"--master-addr={head}",
            f"--node-name={machine.name}",
            f"--data-port={machine.data_port}",
        ]
        if machine.advertise:
            flags.append(f"--advertise={machine.advertise}")
        if machine.link_congestion:
            flags.append(f"--link-congestion={machine.link_congestion}")
        if machine.link_policy:
            flags.append(f"--link-policy={machine.link_policy}")
    return [sys.executable, "-m", "gllm.serve", f"--model={start.model}", *flags]


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
