"""Report of a worker on its speed, by which the layers are divided."""

from typing import ClassVar

from gllm.messages.base import WireMessage


class StageMeasured(WireMessage, frozen=True):
    """Measured time and memory of each layer of the model on a worker.

    A time is that of a decode step, plus a share of that of a prefill step (gllm/runtime/probe.py).
    """

    is_fenced: ClassVar[bool] = False
    stage: int
    rank: int
    layer_seconds: list[float]
    """Time of each layer of the model."""
    head_seconds: float
    """Time of the LM head; 0 unless the worker belongs to the last stage."""
    step_seconds: float
    """Time of a step in addition to that of its layers."""
    layer_bytes: list[int]
    """Weights of each layer, and its keys and values of the longest sequence."""
    embedding_bytes: int
    head_bytes: int
    """0 unless the worker belongs to the last stage."""
    available_bytes: int | None = None
    """Memory for both; None in the host's memory, which all stages share."""
    keeps_weights: bool = True
    """False if the process has to end to free the memory of the measurement."""
    cache_key: str = ""
    """Key under which the worker's machine keeps the measurement."""
