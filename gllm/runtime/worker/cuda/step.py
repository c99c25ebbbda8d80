"""State of a step on a device: the tensors that are copied there and the events around its work."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from gllm.models.stage import StageInputs
from gllm.runtime.worker.cuda.readback import PendingTokens
from gllm.runtime.worker.cuda.sampler import SamplerInputs
from gllm.transport.device_streams import DeviceEvent


class StepInputs(NamedTuple):
    """All tensors of a step that are copied to the device."""

    stage: StageInputs
    logits_indices: Tensor
    """[samples] int64"""
    token_ids: Tensor
    """[tokens] int64: on the last of several stages, whose `stage` has none; else empty."""
    sampler: SamplerInputs
    placeholder_rows: Tensor
    """[placeholders] int64: token rows whose id is the last token of a sequence."""
    placeholder_slots: Tensor
    """[placeholders] int64: slots of those tokens in the table of last tokens; empty on ranks
    without one."""
    last_token_slots: Tensor
    """[samples] int64: slots that the sampled tokens are stored in; empty if they are not."""


@dataclass(slots=True)
class DeviceStepState:
    """State of a batch on a device."""

    inputs: StepInputs
    """On the host."""
    uses_graph: bool = False
    """True if a graph computes the layers."""
    spans: list[tuple[DeviceEvent, DeviceEvent]] = field(default_factory=list)
    """Timed events around each part of the step that the device computes, in order."""
    tokens: PendingTokens | None = None
    """With the sampler, once computed."""
