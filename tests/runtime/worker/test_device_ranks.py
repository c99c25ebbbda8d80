"""Ranks of a stage on fake devices of their own: the tokens of one rank on the CPU, in any order,
and not without each wait around what they do together."""

import gc
from functools import cache, partial
from linecache import getline
from pathlib import Path
from typing import Any

import pytest

from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.worker.cuda.executor import CudaExecutor
from gllm.scheduler.plan import StepPlan
from gllm.transport import nccl_group
from gllm.transport.device_group import DeviceRankGroup
from gllm.transport.groups import StageGroups
from gllm.transport.nccl_group import NcclRankGroup
from gllm.transport.staged_group import StagedRankGroup
from tests.runtime.worker.test_device_executor import (
    SPECIALS,
    check,
    expected_of,
    plans_of,
    registered,
)
from tests.support.engines.pipeline import Pipeline
from tests.support.gpu.device_stage import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Answer,
    as_on_a_device,
    executor_on,
    run_interleaved,
)
from tests.support.gpu.fake_graphs import Unjoined
from tests.support.gpu.fake_nccl import FakeCommunicator, Mismatched, fake_host_groups
from tests.support.gpu.fake_streams import FakeQueues
from tests.support.gpu.memory_uses import Race
from tests.support.gpu.turns import Stuck, Turns
from tests.support.models.tiny_models import save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama3", tmp_path_factory.mktemp("ranks"), heads=8)


@pytest.fixture(scope="module")
def plans(folder: Path) -> list[StepPlan]:
    return plans_of(Pipeline(folder, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS))


class Expected:
    """Answers of one rank, by name of what is special, computed once each."""

    def __init__(self, folder: Path, plans: list[StepPlan]) -> None:
        self._of = cache(lambda name: expected_of(folder, plans, SPECIALS[name]))

    def __getitem__(self, name: str) -> list[Answer]:
        return self._of(name)


@pytest.fixture(scope="module")
def expected(folder: Path, plans: list[StepPlan]) -> Expected:
    return Expected(folder, plans)


class Ranks:
    """One run of all ranks, each on a device of its own, whose hosts take turns."""

    def __init__(self, folder: Path, seed: int, size: int = 2, kind: str = "nccl") -> None:
        self.folder, self.seed, self.size, self.kind = folder, seed, size, kind
        self.turns = Turns(seed)
        self.hosts = fake_host_groups(size, self.turns, has_places=seed % 2 == 1)
        self.arrived: list[list[Any]] = [[] for _ in range(size)]
        self.waits: set[str] = set()
        self.groups: dict[int, DeviceRankGroup] = {}
        self.num_graphs = 0
        """Graphs that the ranks have recorded."""

    def connect(self, executor: CudaExecutor, queues: FakeQueues, rank: int) -> StageGroups:
        group: DeviceRankGroup
        if self.kind == "nccl":
            wire = FakeCommunicator(rank, queues, self.arrived)
            host = self.hosts[rank]
            group = NcclRankGroup(host, wire, queues, executor.stream, in_background=False)
        else:
            group = StagedRankGroup(self.hosts[rank], queues, executor.stream)
        self.groups[rank] = group
        return StageGroups(group, group)

    def run(
        self,
        plans: list[StepPlan],
        special: dict[str, SequenceSamplingParams],
        graphs: int = 4,
        ignored: str = "",
        checks: bool = True,
        examples: bool = False,
    ) -> list[Answer]:
        """Return the answers of rank 0; the others have none."""

        def one(rank: int) -> list[Answer]:
            eagerness = (0.2, 0.5, 0.9)[(self.seed + rank) % 3]
            seed = self.seed * self.size + rank
            with FakeQueues(seed, ignored, checks, eagerness, self.turns) as queues:
                executor = executor_on(
                    queues,
                    self.folder,
                    graphs=graphs,
                    ranks=(rank, self.size),
                    connect=lambda executor: self.connect(executor, queues, rank),
                )
                if examples:
                    executor.warm_up()
                for message in registered(**special):
                    executor.register(message)
                meet = partial(self.groups[rank].agree_on_step, error="")
                answers = run_interleaved(queues, executor, plans, seed, meet)
                queues.synchronize()
                self.waits |= queues.waits
                self.num_graphs += len(queues.graphs)
                return answers

        with as_on_a_device():
            first, *others = self.turns.run([partial(one, rank) for rank in range(self.size)])
        assert not any(tokens or details for answers in others for tokens, details in answers)
        return first


@pytest.mark.parametrize(
    ("name", "seed", "graphs", "size"),
    [
        ("everything", 4, 2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("greedy", 0, 4, 2),
                ("greedy", 1, 0, 2),
                ("random", 2, 2, 2),
                ("embeddings", 3, 4, 2),
                ("everything", 5, 0, 2),
                ("penalties", 6, 4, 4),
            )
        ),
    ],
)
def test_ranks_answer_as_one(
    folder: Path,
    plans: list[StepPlan],
    expected: Expected,
    name: str,
    seed: int,
    graphs: int,
    size: int,
) -> None:
    results = Ranks(folder, seed, size).run(plans, SPECIALS[name], graphs)
    check(results, expected[name])


@pytest.mark.parametrize("name", ["embeddings", pytest.param("everything", marks=pytest.mark.long)])
def test_ranks_that_share_a_gpu_answer_as_one_without_graphs(
    folder: Path,
    plans: list[StepPlan],
    expected: Expected,
    name: str,
) -> None:
    ranks = Ranks(folder, 1, kind="staged")
    check(ranks.run(plans, SPECIALS[name]), expected[name])
    assert ranks.num_graphs == 0


@pytest.mark.long
def test_example_steps_are_the_same_on_all_ranks(
    folder: Path, plans: list[StepPlan], expected: Expected
) -> None:
    results = Ranks(folder, 3).run(plans, SPECIALS["greedy"], examples=True)
    check(results, expected["greedy"])


def waits_of(folder: Path, plans: list[StepPlan]) -> set[str]:
    ranks = Ranks(folder, 0)
    ranks.run(plans, SPECIALS["greedy"], graphs=0)
    return {wait for wait in ranks.waits if wait.startswith("nccl_group.py")}


def line_of(wait: str) -> str:
    return getline(nccl_group.__file__, int(wait.rpartition(":")[2]))


def run_often(folder: Path, plans: list[StepPlan], graphs: int, wait: str) -> None:
    for seed in range(6):
        Ranks(folder, seed).run(plans, SPECIALS["greedy"], graphs, ignored=wait)


@pytest.mark.full
@pytest.mark.parametrize("graphs", [0, pytest.param(4, marks=pytest.mark.long)])
def test_no_wait_around_a_collective_can_be_spared(
    folder: Path, plans: list[StepPlan], graphs: int
) -> None:
    """Sums, the gather's receiver, and tokens that the host does not know. What a rank sends in a
    gather nobody overwrites on a device that uses no memory twice: test_nccl_group does."""
    waits = waits_of(folder, plans[:3])
    assert len(waits) == 4
    for wait in waits - {each for each in waits if ".gather([]" in line_of(each)}:
        with pytest.raises((Race, Unjoined, Mismatched)):
            run_often(folder, plans[:3], graphs, wait)


@pytest.mark.long
def test_without_a_wait_numbers_are_wrong(
    folder: Path, plans: list[StepPlan], expected: Expected
) -> None:
    """Not only clocks say so."""

    def goes_wrong(wait: str, seed: int) -> bool:
        ranks = Ranks(folder, seed)
        try:
            results = ranks.run(plans[:4], SPECIALS["greedy"], 0, wait, checks=False)
        except (IndexError, RuntimeError, Stuck):
            return True
        return results != expected["greedy"][:4]

    waits = waits_of(folder, plans[:4])
    for wait in waits - {each for each in waits if ".gather([]" in line_of(each)}:
        assert any(goes_wrong(wait, seed) for seed in range(30)), wait


def test_a_rank_that_starts_otherwise_is_found(folder: Path) -> None:
    """Before its collectives would wait for others."""
    ranks = Ranks(folder, 1)

    def one(rank: int) -> None:
        with FakeQueues(rank, turns=ranks.turns) as queues:
            executor_on(
                queues,
                folder,
                graphs=2 + 2 * rank,
                ranks=(rank, 2),
                connect=lambda executor: ranks.connect(executor, queues, rank),
            )

    with as_on_a_device(), pytest.raises(Exception, match="the ranks are at steps"):
        ranks.turns.run([partial(one, rank) for rank in range(2)])


def test_an_executor_that_is_closed_has_no_graphs(folder: Path) -> None:
    """Which would keep NCCL from freeing the communicator."""
    with as_on_a_device(), FakeQueues(1) as queues:
        executor = executor_on(queues, folder, graphs=4)
        assert queues.graphs
        executor.close()
        gc.collect()
        assert not queues.graphs
