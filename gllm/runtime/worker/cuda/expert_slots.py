"""Weights of experts in a GPU's memory that are copies of those on the host: stacks of slots.

The last slot of a stack stays zero. Choices of experts that are not in a stack refer to it, so that
the work of the device has the same shapes whatever it has.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gllm.kernels.experts import StackedExperts, run_stacked
from gllm.models.host_experts import HostExperts
from gllm.runtime.worker.cuda.staging import copy_to_device
from gllm.transport.device_streams import DeviceEvent, DeviceRuntime, DeviceStream

NUM_STAGED = 2
"""Experts in pinned memory: one is unpacked while the device copies the other one."""


class ExpertSlots:
    """Stack of slots on a device, each for the weights of one expert."""

    def __init__(
        self, runtime: DeviceRuntime, experts: HostExperts, num_slots: int, dtype: torch.dtype
    ) -> None:
        """Allocate the stack.

        Args:
            runtime: device and its streams.
            experts: of the layer, or of one of several with equal shapes.
            num_slots: slots, without the one of zeros.
            dtype: dtype of the weights.
        """
        self._runtime = runtime
        shapes = [tensor.shape for tensor in experts.unpack(0)]
        self._tensors = [runtime.zeros((num_slots + 1, *shape), dtype) for shape in shapes]
        up, down, *biases = self._tensors
        has_up_bias = experts.gate_up[0].bias is not None
        self._stack = StackedExperts(
            up,
            down,
            experts.activation,
            biases[0] if has_up_bias else None,
            None if experts.down_bias is None else biases[-1],
        )
        self._num_slots, self._num_experts = num_slots, len(experts.down)

    def write(self, slot: int, tensors: list[Tensor]) -> None:
        """Copy the weights of an expert to a slot. Has to be called in the stream.

        tensors: in pinned memory, as from `HostExperts.unpack`.
        """
        for stacked, tensor in zip(self._tensors, tensors, strict=True):
            stacked[slot].copy_(tensor, non_blocking=True)

    def run(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        slots: Mapping[int, int],
        stream: DeviceStream,
    ) -> Tensor:
        """Return the weighted sum [tokens, hidden] of the experts that have slots.

        Has to be called in the stream.

        Args:
            x: [tokens, hidden], as all tensors on the device.
            expert_ids: [tokens, top_k] int64.
            expert_weights: [tokens, top_k] float32.
            slots: slot of each expert to compute.
            stream: the compute stream.
        """
        with self._runtime.host_work():
            table = torch.full((self._num_experts,), self._num_slots, dtype=torch.int64)
            for expert, slot in slots.items():
                table[expert] = slot
            on_device = copy_to_device(table, self._runtime, stream)
        own = on_device.index_select(0, expert_ids.flatten()).view(expert_ids.shape)
        return run_stacked(x, own, expert_weights, self._stack)


class WeightStaging:
    """Pinned memory through which weights of experts get to a device."""

    def __init__(self, runtime: DeviceRuntime, experts: HostExperts, dtype: torch.dtype) -> None:
        """Allocate the memory for experts of one shape."""
        shapes = [tensor.shape for tensor in experts.unpack(0)]
        self._buffers = [
            [runtime.allocate_pinned(shape, dtype) for shape in shapes] for _ in range(NUM_STAGED)
        ]
        self._copied: list[DeviceEvent] = [runtime.event() for _ in range(NUM_STAGED)]
        self._runtime = runtime
        self._count = 0

    def copy(
        self,
        experts: HostExperts,
        expert: int,
        target: ExpertSlots,
        slot: int,
        stream: DeviceStream,
    ) -> None:
        """Queue the copy of an expert's weights to a slot. Has to be called in the stream."""
        index = self._count % NUM_STAGED
        self._count += 1
        self._copied[index].synchronize()
        with self._runtime.host_work():
            for pinned, tensor in zip(self._buffers[index], experts.unpack(expert), strict=True):
                pinned.copy_(tensor)
        target.write(slot, self._buffers[index])
        stream.record(self._copied[index])
