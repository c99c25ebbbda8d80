"""Several ranks of a stage: they run the same steps, and fail or end together."""

import asyncio
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from gllm.kernels.all_reduce import GroupClosedError, GroupMismatchError
from gllm.messages.steps import GrammarReady, RegisterSequences, StepDone
from gllm.runtime.worker.stage import StageRunner
from gllm.transport.groups import StageGroups
from tests.runtime.worker.test_stage import FakeExecutor, FakeReceiver, FakeSender, plan
from tests.support.models.thread_group import thread_groups

NUM_RANKS = 3


class RankExecutor(FakeExecutor):
    """Adds up a number over the ranks in each step, as layers do."""

    def __init__(self, rank: int, groups: StageGroups) -> None:
        super().__init__()
        self.rank, self.groups = rank, groups
        self.prepare_fails: set[int] = set()
        self.compute_fails: set[int] = set()
        self.sums: list[float] = []
        self.compiling: Future[bytes] = Future()

    def register(self, message: RegisterSequences) -> "Future[bytes]":
        return self.compiling

    def prepare(self, step: Any) -> Any:
        if step.step in self.prepare_fails:
            raise KeyError("prepare", self.rank)
        return step

    def compute(self, batch: Any, hidden: torch.Tensor | None) -> torch.Tensor:
        if batch.step in self.compute_fails:
            raise RuntimeError(f"compute on rank {self.rank}")
        self.log.append(f"compute {batch.step}")
        part = torch.full((1, 1), float(self.rank + 1))
        self.sums.append(self.groups.layers.sum(part, None, torch.float32).item())
        return torch.zeros(1, 3)

    def sample(self, batch: Any, logits: torch.Tensor) -> Any:
        assert self.rank == 0, "only rank 0 samples"
        return super().sample(batch, logits)

    def fail_sequences(self, error: str) -> None:
        """No thread waits for a grammar."""


class Ranks:
    """The ranks of one stage in one process."""

    def __init__(self, is_last: bool = True, has_receivers: bool = False) -> None:
        ends = [StageGroups(*pair) for pair in zip(*(thread_groups(NUM_RANKS),) * 2, strict=True)]
        self.executors = [RankExecutor(rank, groups) for rank, groups in enumerate(ends)]
        self.results: list[list[Any]] = [[] for _ in ends]
        self.faults: list[list[BaseException]] = [[] for _ in ends]
        self.senders = [FakeSender() for _ in ends]
        before = set(threading.enumerate())
        self.runners = []
        for rank, executor in enumerate(self.executors):
            executor.has_sampler = is_last and rank == 0
            self.runners.append(
                StageRunner(
                    executor,  # type: ignore[arg-type]
                    [FakeReceiver()] if has_receivers else [],  # type: ignore[list-item]
                    [] if is_last else [self.senders[rank]],  # type: ignore[list-item]
                    self.results[rank].append,
                    self.faults[rank].append,
                    groups=ends[rank],
                )
            )

        self.threads = set(threading.enumerate()) - before

    def run(self, *steps: int) -> None:
        for step in steps:
            for runner in self.runners:
                runner.run_plan(plan(step))

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds; no rank fails before."""
        async with asyncio.timeout(60):
            while not condition():
                assert self.faults == [[]] * NUM_RANKS
                await asyncio.sleep(0.001)

    async def wait_for_faults(self, ranks: Collection[int]) -> None:
        """Wait until each of these ranks has reported an error."""
        async with asyncio.timeout(60):
            while not all(self.faults[rank] for rank in ranks):
                await asyncio.sleep(0.001)

    async def wait_for_results(self, count: int) -> list[tuple[int, str]]:
        """Step and error of rank 0's results."""
        await self.until(lambda: len(self.results[0]) >= count)
        done = [result for result in self.results[0] if isinstance(result, StepDone)]
        return [(each.result.step, each.result.error) for each in done]

    async def finish(self) -> None:
        """Close once the other ranks have finished too, which may be after rank 0's report."""
        await self.until(lambda: not any(runner.is_busy for runner in self.runners))
        await self.close()

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(runner.close) for runner in self.runners))
        assert len(self.threads) >= NUM_RANKS
        assert not any(thread.is_alive() for thread in self.threads)


@pytest.mark.parametrize("has_receivers", [False, True])
async def test_all_ranks_compute_and_rank_0_reports(has_receivers: bool) -> None:
    ranks = Ranks(has_receivers=has_receivers)
    ranks.run(4, 5, 6)
    assert await ranks.wait_for_results(3) == [(4, ""), (5, ""), (6, "")]
    await ranks.finish()
    for executor, results in zip(ranks.executors, ranks.results, strict=True):
        assert executor.sums == [6.0] * 3
        assert bool(results) == (executor.rank == 0)
    assert ranks.faults == [[]] * NUM_RANKS


@pytest.mark.parametrize("rank", range(NUM_RANKS))
async def test_a_plan_that_one_rank_cannot_prepare_fails_on_all(rank: int) -> None:
    """The error is that of the first rank which has one, and later steps go on."""
    ranks = Ranks()
    ranks.executors[rank].prepare_fails.add(5)
    ranks.run(4, 5, 6)
    error = f"KeyError: ('prepare', {rank})"
    assert await ranks.wait_for_results(3) == [(4, ""), (5, error), (6, "")]
    await ranks.finish()
    for executor in ranks.executors:
        assert executor.sums == [6.0] * 2
        failed = executor.plans_given_up if executor.rank == rank else executor.given_up
        assert [each[-1] for each in failed] == [error]
    assert ranks.faults == [[]] * NUM_RANKS


async def test_a_step_that_failed_on_an_earlier_stage_fails_on_all_ranks() -> None:
    ranks = Ranks(has_receivers=True)
    ranks.run(4, 7, 6)
    failed = "an earlier stage failed"
    assert await ranks.wait_for_results(3) == [(4, ""), (7, failed), (6, "")]
    await ranks.finish()
    assert [[step for _, step, _ in each.given_up] for each in ranks.executors] == [[7]] * 3


async def test_ranks_in_the_middle_all_send_the_error() -> None:
    ranks = Ranks(is_last=False)
    ranks.executors[1].prepare_fails.add(6)
    ranks.run(4, 5, 6, 8)
    await ranks.until(lambda: all(len(sender.sent) == 4 for sender in ranks.senders))
    for sender in ranks.senders:
        assert sender.sent == [(4, ""), (5, ""), (6, "KeyError: ('prepare', 1)"), (8, "")]
    await ranks.close()


@pytest.mark.parametrize("rank", range(NUM_RANKS))
async def test_an_error_in_the_middle_of_a_step_ends_all_ranks(rank: int) -> None:
    """Only the rank whose error it is reports one; the others learn that the group is closed."""
    ranks = Ranks()
    ranks.executors[rank].compute_fails.add(5)
    ranks.run(4, 5, 6)
    await ranks.wait_for_faults(range(NUM_RANKS))
    for other, (fault,) in enumerate(ranks.faults):
        if other == rank:
            assert str(fault) == f"compute on rank {rank}"
        else:
            assert isinstance(fault, GroupClosedError)
    assert await ranks.wait_for_results(1) == [(4, "")]
    await ranks.close()
    assert not any("compute 6" in executor.log for executor in ranks.executors)


@pytest.mark.parametrize("rank", [0, 1])
async def test_ranks_that_wait_for_one_that_has_ended_end(rank: int) -> None:
    """Rank `rank` never runs the step; closing it wakes the others."""
    ranks = Ranks()
    for other, runner in enumerate(ranks.runners):
        if other != rank:
            runner.run_plan(plan(4))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(ranks.runners[rank].close)
    await ranks.wait_for_faults(set(range(NUM_RANKS)) - {rank})
    assert not ranks.faults[rank]
    await ranks.close()


async def test_ranks_that_disagree_on_the_step_fail() -> None:
    ranks = Ranks()
    for rank, runner in enumerate(ranks.runners):
        runner.run_plan(plan(4 + rank))
    await ranks.wait_for_faults(range(NUM_RANKS))
    faults = [fault for (fault,) in ranks.faults]
    assert any(isinstance(fault, GroupMismatchError) for fault in faults)
    assert not any(executor.log for executor in ranks.executors)
    await ranks.close()


async def test_only_rank_0_reports_grammars_and_requests_that_cannot_be_sampled() -> None:
    ranks = Ranks()
    message = RegisterSequences(1, 3)
    for runner, executor in zip(ranks.runners, ranks.executors, strict=True):
        runner.register(message)
        executor.compiling.set_exception(ValueError("no grammar"))
    assert await ranks.wait_for_results(1) == []
    await asyncio.sleep(0)
    assert ranks.results == [[GrammarReady(1, "no grammar")], [], []]
    await ranks.close()
