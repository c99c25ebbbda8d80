"""Reports on measured speeds: of the layers on a worker, and of the links between machines."""

import msgspec

from gllm.messages.base import ProcessMessage, WireMessage


class StageMeasured(ProcessMessage, frozen=True):
    """Measured time and memory of each layer of the model on a worker.

    A time is that of a decode step, plus a share of that of a prefill step
    (gllm/runtime/worker/probe.py).
    """

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


class LinkTime(msgspec.Struct, frozen=True, array_like=True):
    """Measured speed of the link between two neighbouring stages; the defaults on one machine."""

    bytes_per_second: float | None = None
    """Rate of a message that waits for nothing, without its propagation; None for no limit."""
    round_trip_seconds: float = 0.0
    """Least round trip, without queues."""


class LinkTimes(WireMessage, frozen=True):
    """Report of the head to the driver on the links of its pipeline."""

    links: list[LinkTime]
    """From each stage but the last one to the next one."""
    driver_round_trips: list[float]
    """Round trip in seconds between the machines of the driver and of each stage."""
