"""Specification of a worker process, which the parent writes to its standard input.

This module imports no torch, because the parent does not.
"""

import msgspec

from gllm.config.engine import EngineConfig
from gllm.observability.logs import LogConfig
from gllm.transport.edge import Edge


class WorkerSpec(msgspec.Struct, frozen=True):
    """Everything that a worker needs to know to run its stage."""

    stage: int
    """Index of the stage."""
    num_stages: int
    layers: tuple[int, int]
    """First layer of the stage and first layer of the next one."""
    layer_counts: list[int]
    """Number of layers of every stage."""
    model_folder: str
    config: EngineConfig
    """With max_model_len resolved."""
    run: int
    """Number of this start of the parent."""
    sender: int
    """Id of this worker in its sessions."""
    senders: list[int]
    """Ids of the workers of all stages."""
    head_address: str
    """Address of the parent's hub."""
    driver_address: str
    """Address of the driver's hub."""
    incoming: Edge | None
    """Edge from the previous stage; None on the first."""
    outgoing: Edge | None
    """Edge to the next stage; None on the last."""
    logs: LogConfig
    kernel_ratios: int | None = None
    """Descriptor of the file in which stages share measurements of compiled kernels."""
