"""Collectives of the ranks that compute one stage together: the interface, and its errors.

A linear layer whose inputs are divided over the ranks returns a partial sum on each of them;
`RankGroup.sum` adds these in the order of the ranks, so that all ranks hold the same bits. The
transports implement the interface (`gllm.transport.groups`).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class GroupClosedError(Exception):
    """Raised by a collective operation when the tensor-parallel group has been cancelled.

    The group is cancelled when one of its ranks fails or when the engine restarts its workers.
    """


class GroupMismatchError(Exception):
    """Raised when tensor-parallel ranks call different collectives or compute different steps.

    The ranks are out of sync, so their pipeline stage cannot continue.
    """


class RankGroup(Protocol):
    """Collectives (all-reduce, gather, broadcast) among the tensor-parallel ranks of a stage.

    Used by one thread of each rank. All ranks call the same methods in the same order with the same
    shapes. All methods but `cancel` raise GroupClosedError once any rank has cancelled the group,
    and GroupMismatchError if the ranks call different methods. Methods that "can be captured" can
    be part of a recorded program (native/program.py) or a CUDA graph.
    """

    rank: int
    """Number of this rank, from 0."""
    size: int
    """Number of ranks."""

    @property
    def is_waiting(self) -> bool:
        """True if this rank waits for another one; may be read on any thread."""

    def partial(self, rows: int, width: int) -> Tensor | None:
        """Return shared memory [rows, width] float32 to write the input of the next `sum` to.

        Returns:
            The memory, valid until that `sum`; only `maximum` may be called in between. None if
            the input may be any tensor.
        """

    def sum(self, partial: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Sum a tensor over all ranks (all-reduce), bitwise equal on all ranks; can be captured.

        Parts are added in the order of the ranks in float32, then the bias, and rounded once.

        Args:
            partial: this rank's part [rows, width], float32 or `dtype`; from `partial` or any other
                tensor.
            bias: [width], float32 or `dtype`.
            dtype: dtype of the result.
        """

    def maximum(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks, [rows] float32; can be captured.

        A NaN of any rank is the result. values: [rows] float32; a recorded step has one per token.
        """

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """Concatenate the ranks' columns on rank 0, [rows, sum of sizes]; return None elsewhere.

        Args:
            part: this rank's part [rows, sizes[rank]] float32.
            sizes: width of each rank's part, the same on all ranks.
        """

    def agree_on_step(self, step: int, error: str) -> str:
        """Wait until all ranks are about to compute a step; return the first rank's error, or "".

        Args:
            step: number of the step that this rank is about to compute.
            error: why this rank cannot compute it; empty if it can.

        Raises:
            GroupMismatchError: another rank is about to compute another step.
        """

    def broadcast(self, values: Tensor | None, count: int) -> Tensor:
        """Broadcast rank 0's values [count] int64 to all ranks; other ranks' values are ignored."""

    def cancel(self) -> None:
        """Make every current and later wait of every rank raise GroupClosedError.

        Called on any thread; all groups of the stage are cancelled together.
        """

    def close(self) -> None:
        """Free this rank's resources; only `cancel` may be called at the same time or later."""
