"""What a worker process is told once the parent knows it.

Owns the one message that goes by standard input. Imports no torch: the parent writes it.
"""

import msgspec

from gllm.config.engine import EngineConfig
from gllm.observability.logs import LogConfig
from gllm.transport.edge import Edge


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a worker is to be."""

    stage: int
    stages: int
    layers: tuple[int, int]
    """First layer, and the one after the last."""
    layer_counts: list[int]
    """Layers of every stage."""
    folder: str
    """The model's."""
    config: EngineConfig
    """max_model_len resolved."""
    frontend: str
    """Address of the parent's inbox."""
    inboxes: list[str]
    """Address of each stage's inbox."""
    incoming: Edge | None
    """Edge from the previous stage; None on the first."""
    outgoing: Edge | None
    """Edge to the next stage; None on the last."""
    logs: LogConfig
    kernel_ratios: int | None = None
    """Descriptor of the file in which stages share measurements of compiled kernels."""
