"""Two engines that hand requests to each other: every request ends, every block returns."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_properties import configs, random_request
from tests.support.examples import further_runs, num_examples
from tests.support.scheduler.engine_pair import EnginePair
from tests.support.scheduler.pipeline import generate

STEPS = 250
FULL = pytest.mark.full


def check_end(pair: EnginePair) -> None:
    """Each request has the tokens that one engine generates, nothing is left, and logs replay."""
    for client_id, request in pair.requests.items():
        alone = generate(request)
        is_whole = not {"abort", "error"} & set(pair.ended[client_id])
        for output in pair.outputs[client_id]:
            assert output == (alone if is_whole else alone[: len(output)])
    for engine in pair.engines:
        stats = engine.scheduler.stats()
        assert (stats.unfinished, stats.in_flight, stats.fetching) == (0, 0, 0)
        assert (stats.held_blocks, stats.kv_usage) == (0, 0.0)
        assert not engine.scheduler.transfers.has_pending_fetches
    pair.check_replays()


def drive(pair: EnginePair, steps: int) -> None:
    """Arrivals, hand-offs both ways, aborts, failures and deaths in random order."""
    rng = pair.rng
    longest = min(config.max_model_len or 0 for config in pair.configs)
    arrivals, fails = rng.choice([0.05, 0.2, 0.6]), rng.choice([0.0, 0.02, 0.3])
    for _ in range(steps):
        if rng.random() < arrivals and len(pair.clients) < 30:
            pair.add(random_request(rng, 0, longest), rng.randrange(2), rng.random() < 0.8)
        if rng.random() < 0.03 and pair.clients:
            pair.abort(rng.choice(sorted(pair.clients)))
        if rng.random() < 0.004:
            pair.restart(rng.randrange(2))
        if rng.random() < 0.005:
            pair.engines[rng.randrange(2)].scheduler.reset_prefix_cache()
        if rng.random() < 0.4:
            pair.move(fails)
        else:
            pair.step(rng.randrange(2), fails=rng.random() < 0.01)


@further_runs(2)
@settings(
    max_examples=num_examples(6, 300),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(
    first=configs(has_states=False), second=configs(has_states=False), seed=st.integers(0, 2**32)
)
def test_every_request_ends_and_every_block_returns(
    run: int, first: SchedulerConfig, second: SchedulerConfig, seed: int
) -> None:
    """With fetches, holds, revocations, failed transfers, aborts and deaths at any state."""
    rng = Random(seed)
    configs = [
        replace(each, kv_push=rng.choice(("off", "layer")), kv_push_threshold=rng.choice((0, 5)))
        for each in (first, second)
    ]
    pair = EnginePair(configs, rng)
    drive(pair, STEPS)
    pair.drain()
    check_end(pair)


def small_config(num_blocks: int, **changes: object) -> SchedulerConfig:
    config = SchedulerConfig(block_size=4, expected_output_tokens=0, prefix_cache=False)
    config = config.__class__(**{**vars(config), **changes})
    return config.resolve(1, num_blocks, 40)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(i, marks=FULL) for i in range(2, 10))])
def test_two_engines_full_of_holds_for_each_other_go_on(seed: int) -> None:
    """All blocks of both are held for requests that the other one has no block for."""
    pair = EnginePair([small_config(10)] * 2, Random(seed), has_foreign=False)
    for number in range(20):
        prompt = [number, *range(11)]
        pair.add(SchedulerRequest(0, prompt, 8), number % 2, is_handed_off=True)
    for _ in range(200):
        # Nothing is moved before both are full.
        pair.step(0)
        pair.step(1)
    assert all(engine.scheduler.stats().kv_usage >= 0.9 for engine in pair.engines)
    assert not any(engine.plans for engine in pair.engines)
    pair.drain()
    check_end(pair)
    assert pair.num_revoked
    assert pair.num_fetched


@pytest.mark.parametrize("kv_push", ["off", "layer"])
def test_blocks_are_fetched_again_after_the_death_of_their_receiver(kv_push: str) -> None:
    num_fetched_again = num_failed = 0
    for seed in range(8):
        config = small_config(60, kv_push=kv_push, kv_push_threshold=0)
        pair = EnginePair([config, config], Random(seed))
        for number in range(8):
            pair.add(SchedulerRequest(0, [number, *range(11)], 8), 0, is_handed_off=True)
        while not any(transfer.num_done for transfer in pair.transfers):
            pair.step(0)
            pair.step(1)
            pair.move()
        pair.restart(1)
        pair.drain()
        check_end(pair)
        num_fetched_again += pair.num_fetched_again
        num_failed += pair.num_failed
    assert num_fetched_again > num_failed


@pytest.mark.parametrize("num_blocks", [10, pytest.param(14, marks=FULL), 40])
def test_pushed_prompts_end_though_both_engines_are_full(num_blocks: int) -> None:
    """Each engine prefills for the other one, and prefetches from it."""
    num_pushed = num_adopted = num_repeated = 0
    for seed in range(num_examples(6, 100)):
        rng = Random(seed)
        config = small_config(
            num_blocks,
            prefix_cache=rng.random() < 0.5,
            async_scheduling=rng.random() < 0.5,
            kv_threshold=rng.choice((0, 0.05)),
            max_prefill_tokens=rng.choice((4, 32)),
            min_prefill_tokens=4,
            kv_push="layer",
            kv_push_threshold=rng.choice((0, 5)),
            policy="sarathi",
        )
        pair = EnginePair([config, config], rng)
        drive(pair, STEPS)
        pair.drain()
        check_end(pair)
        num_pushed += pair.num_pushed
        num_adopted += pair.num_adopted
        num_repeated += pair.num_repeated
    assert num_pushed > num_adopted > 0
    assert num_repeated > 0 or num_blocks == 40


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=FULL) for i in range(1, 5))])
def test_in_a_burst_waiting_kv_stays_at_the_prefill_engine(seed: int) -> None:
    """Nothing is computed twice however long the decodes take: prefill waits for its blocks.

    The decode engine admits only what fits to its end, so it never takes a reservation back.
    """
    configs = [small_config(40), small_config(20, policy="lightllm")]
    pair = EnginePair(configs, Random(seed), has_foreign=False)
    for number in range(40):
        pair.add(SchedulerRequest(0, [number, *range(15)], 20), 0, is_handed_off=True)
    most_held = 0
    while pair.clients:
        assert any([pair.step(0), pair.step(1), pair.move()])
        most_held = max(most_held, pair.engines[0].scheduler.stats().held_blocks)
    pair.drain()
    check_end(pair)
    prefill, decode = (engine.scheduler.stats() for engine in pair.engines)
    abandoned = len(pair.abandoned)
    assert prefill.prefill_tokens == 40 * 16
    assert pair.num_failed == decode.failed_fetches == 0
    assert pair.num_fetched == 40 - abandoned
    assert most_held > 20
    assert decode.prefill_tokens == abandoned * 17
