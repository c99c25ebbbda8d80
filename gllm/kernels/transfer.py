"""Small tensors on their way to a GPU.

Owns how they get there without anybody waiting. Does not know what they are.
"""

import torch
from torch import Tensor


def beside(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor on the device of another one; from the CPU to a GPU through pinned memory, so that
    neither waits for the other."""
    return to_device(tensor, other.device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, as `beside` does it."""
    if tensor.device == device:
        return tensor
    if tensor.is_cpu and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
