"""One step on a device as data: the tensors that it takes there, and the events around its work.

Owns no memory and no order of work: those belong to staging.py and executor.py.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from gllm.models.stage import StageInputs
from gllm.runtime.cuda.drawing import DrawInputs
from gllm.runtime.cuda.tokens import PendingTokens
from gllm.transport.device_streams import DeviceEvent


class Inputs(NamedTuple):
    """All that a step takes to the device."""

    stage: StageInputs
    sample_rows: Tensor
    """[samples] int64"""
    ids: Tensor
    """[tokens] int64: on the last of several stages, whose `stage` has none; else empty."""
    draw: DrawInputs
    unknown: Tensor
    """[placeholders] int64: token rows whose id is a last token."""
    places: Tensor
    """[placeholders] int64: of which place."""
    kept: Tensor
    """[samples] int64: places that the step's tokens are put to; empty where nobody looks."""


@dataclass(slots=True)
class OnDevice:
    """What a batch carries beside its own."""

    inputs: Inputs
    """On the host."""
    spans: list[tuple[DeviceEvent, DeviceEvent]] = field(default_factory=list)
    """Timed events around each part of the step that the device computes, in order."""
    told: PendingTokens | None = None
    """On the last stage, once computed."""
