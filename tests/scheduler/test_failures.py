"""Steps that raise and rows that compute NaN: what others may still read of the cache."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_properties import pipelines, random_request
from tests.support.examples import further_runs, num_examples
from tests.support.scheduler.pipeline import Pipeline, generate

PROMPT = list(range(1, 65))


def pipeline(stages: int = 1, **options) -> Pipeline:
    return Pipeline(SchedulerConfig(**options).resolve(stages, 60, 200))


def chunked(stages: int, chunk: int) -> Pipeline:
    """Prompts are computed in chunks, several of which are in flight."""
    chunks = {"max_prefill_tokens": chunk, "min_prefill_tokens": chunk}
    return pipeline(stages, **chunks, max_num_batched_tokens=chunk, max_in_flight=4)


def commit_all(pipe: Pipeline) -> None:
    while pipe.plans:
        pipe.commit()


def check_asked_again(pipe: Pipeline, seq: int, prompt: list[int]) -> None:
    """Two further requests with this prompt generate what they would alone."""
    for later in (seq, seq + 1):
        pipe.add(SchedulerRequest(later, prompt, 8))
        pipe.drain()
        assert pipe.generated[later] == generate(pipe.requests[later])


@pytest.mark.parametrize("stages", [1, 2])
def test_chunks_behind_a_failed_one_are_not_offered(stages: int) -> None:
    pipe = chunked(stages, 16)
    pipe.add(SchedulerRequest(0, PROMPT, 8))
    for step in range(4):
        pipe.schedule(fails=step == 1)
    commit_all(pipe)
    assert pipe.ended == {0: "error"}
    assert len(pipe.scheduler.kv_cache.block_pool.digests) == 1
    check_asked_again(pipe, 1, PROMPT)


def test_choices_do_not_share_chunks_behind_a_failed_one() -> None:
    """Without a prefix cache they share the blocks of the first choice while it holds them."""
    chunks = {"max_prefill_tokens": 32, "min_prefill_tokens": 32, "max_num_batched_tokens": 32}
    pipe = pipeline(1, prefix_cache=False, max_in_flight=3, **chunks)
    pipe.add(SchedulerRequest(0, PROMPT, 8, n=2))
    pipe.schedule(fails=True)
    pipe.schedule()
    pipe.schedule()
    pipe.commit()
    pipe.commit()
    pipe.drain()
    assert pipe.ended == {0: "error", 1: "length"}
    assert pipe.generated[1] == generate(pipe.requests[1])


def test_a_decode_behind_a_failed_one_offers_nothing_across_a_block() -> None:
    """Async scheduling: the row behind the failed decode begins a new block."""
    pipe = pipeline(1, max_in_flight=3)
    prompt = PROMPT[:31]
    pipe.add(SchedulerRequest(0, prompt, 8))
    pipe.schedule()
    pipe.schedule(fails=True)
    pipe.schedule()
    commit_all(pipe)
    assert pipe.ended == {0: "error"}
    assert len(pipe.scheduler.kv_cache.block_pool.digests) == 1
    check_asked_again(pipe, 1, [*prompt, *generate(SchedulerRequest(0, prompt, 8))])


@pytest.mark.parametrize("stages", [1, 2])
def test_a_row_that_is_not_finite_withdraws_the_blocks_of_its_prompt(stages: int) -> None:
    pipe = chunked(stages, 16)
    pipe.add(SchedulerRequest(0, PROMPT, 8))
    for step in range(4):
        pipe.schedule(faulty=[0] if step == 1 else [])
    commit_all(pipe)
    assert pipe.ended == {0: "error"}
    assert not pipe.scheduler.kv_cache.block_pool.digests
    check_asked_again(pipe, 1, PROMPT)


def test_blocks_from_the_cache_are_withdrawn_by_a_reader_whose_logits_are_not_finite() -> None:
    """The request that wrote NaN ended before it sampled, so that only a reader notices."""
    pipe = chunked(1, 32)
    pipe.add(SchedulerRequest(0, PROMPT, 8))
    pipe.schedule(faulty=[0])
    pipe.commit()
    pipe.abort([0])
    commit_all(pipe)
    pipe.add(SchedulerRequest(1, PROMPT, 8))
    pipe.drain()
    assert pipe.ended == {0: "abort", 1: "error"}
    check_asked_again(pipe, 2, PROMPT)


def test_an_error_of_a_request_alone_withdraws_nothing() -> None:
    """An impossible combination of sampling fields must not empty others' prefix cache."""
    pipe = pipeline()
    pipe.add(SchedulerRequest(0, PROMPT, 8))
    pipe.schedule()
    pipe.commit(errors={0: "every token of the vocabulary is forbidden"})
    assert len(pipe.scheduler.kv_cache.block_pool.digests) == 4


def drive(pipeline: Pipeline, rng: Random, steps: int, nan_share: float) -> None:
    """Arrivals, aborts, steps that raise and rows that are NaN in random order."""
    seq = 0
    for _ in range(steps):
        if rng.random() < 0.2 and len(pipeline.alive) < 20:
            request = random_request(rng, seq, pipeline.config.max_model_len)
            pipeline.add(request)
            seq += request.n
        if rng.random() < 0.02 and pipeline.alive:
            pipeline.abort([rng.choice(sorted(pipeline.alive))])
        if pipeline.plans and rng.random() < 0.5:
            pipeline.commit()
        else:
            faulty = [s for s in sorted(pipeline.alive) if rng.random() < nan_share]
            pipeline.schedule(fails=rng.random() < 0.1, faulty=faulty)


@further_runs(2)
@settings(
    max_examples=num_examples(15, 400),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(pipeline=pipelines(), seed=st.integers(0, 2**32), nan_share=st.sampled_from([0.0, 0.05]))
def test_who_does_not_fail_gets_the_tokens_it_would_get_alone(
    run: int, pipeline: Pipeline, seed: int, nan_share: float
) -> None:
    drive(pipeline, Random(seed), 300, nan_share)
    pipeline.drain()
    for seq, request in pipeline.requests.items():
        alone = generate(request, pipeline.forces)
        if pipeline.ended[seq] in ("abort", "error"):
            assert pipeline.generated[seq] == alone[: len(pipeline.generated[seq])]
        else:
            assert pipeline.generated[seq] == alone
    stats = pipeline.scheduler.stats()
    assert (stats.running, stats.waiting, stats.in_flight, stats.kv_usage) == (0, 0, 0, 0.0)
