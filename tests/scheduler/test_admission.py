"""Who gets KV blocks when, what is computed again after preemption, and what that leaves over."""

from itertools import product

import pytest

from benchmarks.preemption import LOADS, run_load
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.output_lengths import LimitLengthPredictor
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_traps import prompt
from tests.support.scheduler.pipeline import Pipeline


def pipeline(num_blocks: int, max_model_len: int, stages: int = 1, **options) -> Pipeline:
    config = SchedulerConfig(**options)
    return Pipeline(config.resolve(stages, num_blocks, max_model_len))


MANY_DECODES, *OTHER_LOADS = (load for load in LOADS if load.fast)


@pytest.mark.parametrize(
    ("load", "stages"),
    [
        (MANY_DECODES, 1),
        pytest.param(MANY_DECODES, 4, marks=pytest.mark.full),
        *product(OTHER_LOADS, (1, 4)),
    ],
    ids=lambda value: value if isinstance(value, int) else value.name,
)
def test_little_is_computed_twice(load, stages: int) -> None:
    assert run_load(load, stages).recomputed_share <= 0.2


def test_a_victim_returns_only_when_its_whole_target_fits() -> None:
    """Beside a decode it would lose its blocks again at the decode's next block."""
    pipe = pipeline(16, 250, expected_output_tokens=0, prefix_cache=False)
    pipe.add(SchedulerRequest(0, prompt(20), 200))
    pipe.add(SchedulerRequest(1, prompt(225, mark=2), 8))
    pipe.drain()
    assert pipe.scheduler.stats().preemptions == 1


def test_one_that_is_not_expected_to_fit_waits() -> None:
    """Two prompts fit, their outputs do not."""
    pipe = pipeline(16, 250)
    pipe.add(SchedulerRequest(0, prompt(60), 100))
    pipe.add(SchedulerRequest(1, prompt(60, mark=2), 100))
    plan = pipe.schedule()
    assert plan is not None
    assert [row.seq for row in plan.rows] == [0]
    pipe.drain()
    assert pipe.scheduler.stats().preemptions == 0


def test_shorter_outputs_than_expected_let_more_in() -> None:
    """By max_tokens of 100 one fits at a time; answers take one token."""
    pipe = pipeline(16, 250, max_num_seqs=4)
    for seq in range(12):
        pipe.add(SchedulerRequest(seq, prompt(20, mark=seq), 100, frozenset(range(50))))
    together = []
    while pipe.alive:
        plan = pipe.schedule()
        if plan is None:
            pipe.commit()
        else:
            together.append(len(pipe.scheduler.kv_cache.running))
    assert together[0] == 1
    assert max(together) == 4


@pytest.mark.parametrize("stages", [1, 2])
def test_a_scored_prompt_reads_after_preemption_what_it_has_scored(stages: int) -> None:
    """Another request keeps the same prompt cached all the while."""
    pipe = pipeline(40, 250, stages, expected_output_tokens=0, max_num_seqs=2)
    pipe.add(SchedulerRequest(0, prompt(160), 80))
    pipe.schedule()
    pipe.commit()
    scored = SchedulerRequest(1, prompt(160), 30, reads_prefix_cache=False, priority=1)
    pipe.add(scored)
    while not pipe.generated[1]:
        if pipe.schedule() is None:
            pipe.commit()
    assert pipe.scheduler.stats().prefill_tokens == 320, "it is computed although it is cached"
    # A request of better priority needs its seat.
    pipe.add(SchedulerRequest(2, [9], 1))
    pipe.drain()
    assert pipe.scheduler.stats().preemptions == 1
    assert pipe.scheduler.stats().prefill_tokens < 320 + 1 + 32


def test_expected_lengths_follow_what_has_ended() -> None:
    lengths = LimitLengthPredictor(256)
    assert [lengths.predict(1000, n) for n in (0, 255, 256, 600)] == [256, 256, 512, 1000]
    assert lengths.predict(100, 0) == 100
    for length in (10, 20, 60):
        lengths.record(1000, length)
    assert [lengths.predict(900, n) for n in (0, 10, 20, 60)] == [30, 40, 60, 120]
    assert lengths.predict(2000, 0) == 256, "other requests, to judge by max_tokens"


def test_old_lengths_are_forgotten() -> None:
    lengths = LimitLengthPredictor(256)
    for _ in range(64):
        lengths.record(1000, 900)
    for _ in range(64):
        lengths.record(1000, 10)
    assert lengths.predict(1000, 0) == 10
    assert lengths.predict(1000, 10) == 20


def test_a_predictor_goes_on_where_an_earlier_one_ended() -> None:
    earlier = LimitLengthPredictor(256)
    for number in range(100):
        earlier.record(1000, number)
        earlier.record(50, 7)
    later = LimitLengthPredictor(256, earlier.recent_lengths)
    for lengths in (earlier, later):
        lengths.record(1000, 5000)
    cases = [(max_tokens, n) for max_tokens in (10, 50, 1000) for n in (0, 5, 60, 99, 6000)]
    assert [later.predict(*case) for case in cases] == [earlier.predict(*case) for case in cases]
    assert later.recent_lengths == earlier.recent_lengths
