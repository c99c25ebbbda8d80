"""Ranks as threads of one process: a RankGroup in plain torch, and a runner of such ranks."""

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from torch import Tensor

from gllm.kernels.all_reduce import GroupClosedError, GroupMismatchError, RankGroup

TIMEOUT_SECONDS = 60.0
"""Longest wait for another rank. A test whose ranks call different collectives fails after it."""
Result = TypeVar("Result")


class _Shared:
    """State of one group that all of its ranks share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_SECONDS)
        self.values: list[Any] = [None] * size


class ThreadGroup:
    """A rank's end of a group of threads."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        self.rank = rank
        self.size = shared.barrier.parties
        self.num_sums = 0
        """Number of sums computed, for tests that count them."""
        self._shared = shared

    @property
    def is_waiting(self) -> bool:
        """See RankGroup; only some rank is known to wait."""
        return self._shared.barrier.n_waiting > 0

    def partial(self, rows: int, width: int) -> Tensor | None:
        """See RankGroup: parts may be anywhere."""
        return None

    def sum(self, partial: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See RankGroup."""
        assert partial.ndim == 2
        assert partial.dtype in (torch.float32, dtype)
        first, *others = self._exchange("sum", partial.shape, partial.to(torch.float32, copy=True))
        self.num_sums += 1
        total: Tensor = first.clone()
        for part in others:
            total += part
        if bias is not None:
            total += bias.to(torch.float32)
        return total.to(dtype)

    def maximum(self, values: Tensor) -> Tensor:
        """See RankGroup."""
        assert values.ndim == 1
        assert values.dtype == torch.float32
        return torch.stack(self._exchange("maximum", values.shape, values.clone())).amax(dim=0)

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """See RankGroup."""
        assert part.dtype == torch.float32
        assert part.shape[1] == sizes[self.rank]
        parts = self._exchange("gather", (len(part), *sizes), part.clone())
        return torch.cat(parts, dim=1) if self.rank == 0 else None

    def agree_on_step(self, step: int, error: str) -> str:
        """See RankGroup."""
        errors: list[str] = self._exchange("meet", step, error)
        return next(filter(None, errors), "")

    def broadcast(self, values: Tensor | None, count: int) -> Tensor:
        """See RankGroup."""
        if self.rank == 0:
            assert values is not None
            assert values.dtype == torch.int64
            assert values.shape == (count,)
            values = values.clone()
        received: Tensor = self._exchange("broadcast", count, values)[0]
        return received.clone()

    def cancel(self) -> None:
        """See RankGroup."""
        self._shared.barrier.abort()

    def close(self) -> None:
        """See RankGroup."""

    def _exchange(self, kind: str, shape: Any, value: Any) -> list[Any]:
        """Return the values of all ranks. Raises GroupClosedError, GroupMismatchError."""
        try:
            self._shared.values[self.rank] = ((kind, shape), value)
            self._shared.barrier.wait()
            calls = list(self._shared.values)
            # Nobody writes its next value before all have read this one.
            self._shared.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise GroupClosedError("the group is closed") from error
        if any(call != (kind, shape) for call, _ in calls):
            raise GroupMismatchError(f"the ranks call {[call for call, _ in calls]}")
        return [value for _, value in calls]


def thread_groups(size: int, kind: type[ThreadGroup] = ThreadGroup) -> list[RankGroup]:
    """Return the ends of a new group of `size` threads, by rank."""
    shared = _Shared(size)
    return [kind(shared, rank) for rank in range(size)]


def run_ranks(groups: Sequence[RankGroup], function: Callable[[RankGroup], Result]) -> list[Result]:
    """Run a function on a thread per rank, in the caller's context; return the results by rank.

    The first exception cancels the group, so that the other ranks end too, and is raised.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(group: RankGroup) -> None:
        try:
            results[group.rank] = function(group)
        except BaseException as error:
            errors.append(error)
            group.cancel()

    threads = [
        threading.Thread(target=copy_context().run, args=(run, group), daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return [results[group.rank] for group in groups]
