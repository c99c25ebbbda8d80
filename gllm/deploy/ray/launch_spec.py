"""Messages between the head of an engine and its launcher process (`python -m gllm.deploy.ray`).

The head writes a `LaunchSpec` to the launcher's standard input and keeps that open as long as it
wants the agents; the launcher writes `LaunchEvent`s to its standard output. Both are lines of JSON.
"""

import msgspec


class LaunchSpec(msgspec.Struct, frozen=True):
    """Machines that an engine needs from Ray, and the command line of their agents."""

    address: str | None
    """Address of the Ray cluster; None for RAY_ADDRESS or the cluster of this machine."""
    degrees: list[int]
    """Workers of each pipeline stage."""
    num_nodes: int | None
    """Machines of the engine, the head included; None to use what the Ray cluster has."""
    has_gpus: bool | None
    """True if a worker needs a GPU; None if it does where the Ray cluster has GPUs."""
    num_spares: int
    """Further machines of the Ray cluster on which an agent waits as a spare."""
    host: str | None
    """Host by which the agents reach the head; None for this machine's address in Ray."""
    port: int
    """Port of the head's hub."""
    has_secret: bool
    """True if the machines have a node secret, which hosts off loopback need."""
    agent_arguments: list[str]
    """Arguments of `gllm node` on all machines, besides the head's address, name and ports. The
    secret is not among them: each machine reads its own file."""
    data_port: int
    """Preferred port of activations on each machine; 0 for none."""
    timeout_seconds: float | None
    """Time within which Ray has to find the machines; None for any time."""
    log_level: str
    log_format: str
    stages_per_node: list[int] = []
    """Stages of each machine; empty for about the same number of workers on each."""


class LaunchEvent(msgspec.Struct, frozen=True):
    """Report of the launcher: Ray has found the machines, or cannot be used."""

    num_nodes: int = 0
    """Machines of the engine, the head included."""
    host: str = ""
    """Host by which the agents reach the head."""
    gpu_ids: list[str] = []
    """GPUs of this machine that Ray has reserved for the head's workers."""
    error: str = ""
    """The launcher has ended for this reason; empty if Ray has found the machines."""
