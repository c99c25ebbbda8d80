"""What is counted, given back and reported, one case each: figures that no text depends on."""

from array import array

import pytest

from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.block_table_replica import BlockTableReplica
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.plan import SchedulerCounters, StepPlan
from gllm.scheduler.preemption import PreemptionManager
from gllm.scheduler.queues import SequenceQueues
from gllm.scheduler.sequence import SchedulerRequest, Sequence, SequenceTable
from tests.scheduler.test_traps import prompt
from tests.support.scheduler.pipeline import Pipeline


def pipeline(num_blocks: int = 50, stages: int = 1, **options) -> Pipeline:
    config = SchedulerConfig(**{"expected_output_tokens": 0, **options})
    return Pipeline(config.resolve(stages, num_blocks, min(200, 16 * num_blocks)))


def plan_of(pipe: Pipeline) -> StepPlan:
    plan = pipe.schedule()
    assert plan is not None
    return plan


def fill(pipe: Pipeline, lengths: list[int], priorities: list[int]) -> None:
    """Prefill sequences 0, 1, ... and commit, so that each is ready to decode."""
    for seq, (length, priority) in enumerate(zip(lengths, priorities, strict=True)):
        pipe.add(SchedulerRequest(seq, prompt(length, mark=seq), 40, priority=priority))
    plan_of(pipe)
    pipe.commit()


class Decodes:
    """A KV cache with sequences 0, 1, ... of so many computed tokens, and their preemption."""

    def __init__(self, num_blocks: int, lengths: list[int], priorities: list[int]) -> None:
        config = SchedulerConfig(prefix_cache=False, async_scheduling=False)
        config = config.resolve(1, num_blocks, 16 * num_blocks)
        self.kv_cache, self.counters = KVCacheManager(config), SchedulerCounters()
        admission = AdmissionController(config, self.kv_cache)
        queues = SequenceQueues(self.kv_cache, config)
        self.preemption = PreemptionManager(config, self.kv_cache, admission, queues, self.counters)
        table = SequenceTable()
        for seq, (length, priority) in enumerate(zip(lengths, priorities, strict=True)):
            request = SchedulerRequest(seq, prompt(length, mark=seq), 40, priority=priority)
            sequence = table.add(request, 0.0)
            assert self.kv_cache.admit(sequence)
            self.kv_cache.allocate(sequence, length)
            sequence.num_scheduled_tokens = sequence.num_computed_tokens = length
        self.sequences = list(table.sequences.values())

    def allocate(self, seq: int, num_tokens: int) -> bool:
        return self.preemption.allocate_decode(self.sequences[seq], num_tokens)

    @property
    def preemptions(self) -> list[int]:
        """How often each sequence has lost its blocks."""
        return [sequence.num_preemptions for sequence in self.sequences]

    @property
    def preempting(self) -> list[int]:
        """Victims that have rows in flight."""
        return [sequence.seq for sequence in self.sequences if sequence.is_preempting]


def test_a_decode_takes_no_block_from_a_better_rank() -> None:
    """Sequence 0 came first; 1 and 2 have a better priority. The cache is full."""
    decodes = Decodes(12 + 1, [64, 64, 64], [1, 0, 0])
    assert decodes.kv_cache.block_pool.num_free_blocks == 1
    assert decodes.allocate(0, 1)
    assert not decodes.allocate(0, 40)
    assert decodes.preemptions == [0, 0, 0]
    assert decodes.allocate(2, 40)
    assert decodes.preemptions == [1, 0, 0]


def test_the_worst_rank_gives_way_and_no_more_than_needed() -> None:
    decodes = Decodes(12, [64, 64, 64], [0, 0, 0])
    assert decodes.allocate(0, 1)
    assert decodes.preemptions == [0, 0, 1]
    assert decodes.counters.preemptions == 1


def test_a_victim_in_flight_counts_once() -> None:
    """Its blocks come at its commit; who needs more than those has to take from others too."""
    decodes = Decodes(12, [60, 60, 60], [0, 0, 0])
    for sequence in decodes.sequences:
        sequence.schedule_row(1)
    assert not decodes.allocate(0, 16)
    assert decodes.preempting == [2]
    assert not decodes.allocate(0, 64)
    assert decodes.preempting == [2]
    assert not decodes.allocate(0, 100)
    assert decodes.preempting == [1, 2]


def test_prefill_does_not_lead_while_a_decode_lacks_a_block() -> None:
    """prefill-first: two decodes have all blocks, and their next token needs one each."""
    pipe = pipeline(9, policy="prefill-first", async_scheduling=False, max_in_flight=3)
    fill(pipe, [64, 64], [0, 0])
    assert [row.seq for row in plan_of(pipe).rows] == [0], "there is one block for both"
    pipe.add(SchedulerRequest(2, prompt(4, mark=2), 4, priority=-1))
    pipe.commit()
    rows = plan_of(pipe).rows
    assert rows[0].seq in (0, 1), "decodes first"


def test_nothing_is_planned_past_max_tokens() -> None:
    """Async scheduling knows the length at which an output ends."""
    pipe = pipeline(max_in_flight=8)
    pipe.add(SchedulerRequest(0, prompt(20), 3))
    starts = []
    while (plan := pipe.schedule()) is not None:
        starts += [row.start for row in plan.rows]
    assert starts == [0, 20, 21]


def test_idle_blocks_that_would_be_shared_are_no_free_blocks() -> None:
    """All blocks that are left hold the beginning of the sequence itself."""
    pipe = pipeline(10)
    pipe.add(SchedulerRequest(0, prompt(80), 1))
    pipe.drain()
    pipe.add(SchedulerRequest(1, prompt(76, mark=2), 60))
    plan_of(pipe)
    memory = pipe.scheduler.kv_cache
    sequence = Sequence(2, SchedulerRequest(2, prompt(96), 1), array("q", prompt(96)), 96)
    shared = memory.find_shareable_blocks(sequence)
    assert (len(shared), memory.block_pool.num_free_blocks) == (5, 5)
    assert not memory.admit(sequence)
    assert memory.block_pool.num_free_blocks == 5


def test_blocks_are_offered_once_they_are_computed() -> None:
    pipe = pipeline()
    pipe.add(SchedulerRequest(0, prompt(40), 4))
    plan_of(pipe)
    offered = pipe.scheduler.kv_cache.block_pool.digests
    assert not offered
    pipe.commit()
    assert len(offered) == 2, "the third is not full"


def test_blocks_of_chunks_in_flight_are_not_offered() -> None:
    chunks = {"max_num_batched_tokens": 16, "max_in_flight": 3}
    pipe = pipeline(**chunks)
    pipe.add(SchedulerRequest(0, prompt(48), 4))
    for _ in range(3):
        plan_of(pipe)
    pipe.commit()
    assert len(pipe.scheduler.kv_cache.block_pool.digests) == 1


def test_choices_that_wait_for_the_first_are_counted() -> None:
    pipe = pipeline()
    pipe.add(SchedulerRequest(0, prompt(20), 4, n=3))
    assert (pipe.scheduler.stats().waiting, pipe.scheduler.stats().running) == (3, 0)
    plan_of(pipe)
    assert (pipe.scheduler.stats().waiting, pipe.scheduler.stats().running) == (2, 1)


def test_followers_forget_choices_that_were_aborted_before_they_ran() -> None:
    pipe = pipeline(async_scheduling=False)
    pipe.add(SchedulerRequest(0, prompt(20), 4, n=3))
    pipe.abort([1, 2])
    assert plan_of(pipe).released_seqs == [1, 2]
    assert set(pipe.stages[0].mirror.sequences) == {0}
    pipe.drain()
    pipe.add(SchedulerRequest(3, prompt(20), 1))
    assert plan_of(pipe).released_seqs == [0]
    assert set(pipe.stages[0].mirror.sequences) == {3}


def test_followers_forget_what_a_plan_releases() -> None:
    mirror = BlockTableReplica()
    mirror.register(0, 4, [1, 2, 3, 4])
    mirror.apply(StepPlan(0, [], [0]))
    mirror.release([0])
    assert not mirror.sequences


def test_queue_seconds_end_with_the_first_chunk() -> None:
    """The clock of this pipeline advances by one second with each call of schedule."""
    pipe = pipeline(max_num_seqs=1, async_scheduling=False)
    pipe.add(SchedulerRequest(0, prompt(20), 3))
    pipe.add(SchedulerRequest(1, prompt(20, mark=2), 1))
    firsts: dict[int, float] = {}
    while pipe.alive:
        if pipe.schedule() is None:
            firsts.update((first.seq, first.queue_seconds) for first in pipe.commit().first_tokens)
    assert firsts[0] == 1.0
    assert firsts[1] == pytest.approx(7.0)
