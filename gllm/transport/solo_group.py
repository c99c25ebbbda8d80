"""Groups of a rank that computes without the other ranks of its stage, for measurements.

The results are wrong: a part stands for the sum. A rank can thus be timed before the others have
loaded anything.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gllm.transport.device_group import DeviceRankGroup
from gllm.transport.groups import StageGroups


class SoloGroup:
    """Communicator that computes one tensor parallel rank without the others, for measurements.

    Collectives return at once with this rank's values.
    """

    is_waiting = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def partial(self, rows: int, width: int) -> Tensor | None:
        """Return None: the input of `sum` may be anywhere."""
        return None

    def sum(self, partial: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return this rank's tensor, with the bias added."""
        return (partial if bias is None else partial + bias).to(dtype)

    def maximum(self, values: Tensor) -> Tensor:
        """Return this rank's values."""
        return values

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """Return this rank's tensor, padded with zeros for the others, on rank 0; else None."""
        if self.rank:
            return None
        return functional.pad(part, (0, sum(sizes) - part.shape[1]))

    def agree_on_step(self, step: int, error: str) -> str:
        """Return the error of this rank; empty for none."""
        return error

    def broadcast(self, values: Tensor | None, count: int) -> Tensor:
        """Return the given values, or zeros on ranks other than 0."""
        return torch.zeros(count, dtype=torch.int64) if values is None else values

    def cancel(self) -> None:
        """Do nothing: collectives of this group never wait."""

    def close(self) -> None:
        """Do nothing: the group has no resources."""


class SoloDeviceGroup(DeviceRankGroup):
    """Communicator that computes one tensor parallel rank on a GPU without the others.

    Collectives return at once with this rank's values.
    """

    can_capture = True

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Create a communicator whose tensors are on a GPU."""
        self._solo, self._device = SoloGroup(rank, size), device
        super().__init__(StageGroups(self._solo, self._solo))

    def sum(self, partial: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return this rank's tensor, with the bias added."""
        return self._solo.sum(partial, bias, dtype)

    def maximum(self, values: Tensor) -> Tensor:
        """Return this rank's values."""
        return values

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """Return this rank's tensor, padded with zeros for the others, on rank 0; else None."""
        return self._solo.gather(part, sizes)

    def broadcast(self, values: Tensor | None, count: int) -> Tensor:
        """Return the given values, or zeros on ranks other than 0."""
        return self._solo.broadcast(values, count).to(self._device)

    def end_step(self, step: int) -> None:
        """Do nothing: no collective is queued."""

    def _abort(self) -> None:
        """Do nothing: no collective is queued."""


def create_solo_groups(rank: int, size: int, device: torch.device | None = None) -> StageGroups:
    """Return communicators for computing one tensor parallel rank without the others.

    Args:
        rank: number of the rank.
        size: number of ranks that the model is divided among.
        device: GPU that computes; None for a CPU.
    """
    group = SoloGroup(rank, size) if device is None else SoloDeviceGroup(rank, size, device)
    return StageGroups(group, group)
