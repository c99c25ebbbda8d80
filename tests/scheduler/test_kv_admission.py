"""Rules of admission against hand calculations, with blocks of one token."""

from array import array
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gllm.scheduler.block_pool import TOKEN_TYPE
from gllm.scheduler.config import KV_ADMISSION_NAMES, SchedulerConfig
from gllm.scheduler.kv_admission import ADMISSION_RULES
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.sequence import SchedulerRequest, Sequence
from tests.scheduler.test_properties import check_outputs, drive, random_request
from tests.scheduler.test_traps import prompt
from tests.support.examples import further_runs, num_examples
from tests.support.scheduler.pipeline import EVERY_POLICY, Pipeline, generate

NUM_BLOCKS = 100


def waiting_sequence(
    seq: int,
    num_prompt: int,
    max_tokens: int = 30,
    predicted: int = 0,
    generated: int = 0,
    kv_ticket: int = 0,
) -> Sequence:
    """A sequence without blocks."""
    request = SchedulerRequest(
        seq,
        prompt(num_prompt, mark=seq),
        max_tokens,
        predicted_output_tokens=predicted,
        kv_ticket=kv_ticket,
    )
    tokens = array(TOKEN_TYPE, [*request.prompt_token_ids, *range(generated)])
    return Sequence(seq, request, tokens, num_prompt)


class Cache:
    """A KV cache with two decodes: 35 and 23 tokens, 15 and 9 of them predicted to come."""

    def __init__(self, rule: str, block_size: int = 1, prefix_cache: bool = False) -> None:
        config = SchedulerConfig(
            kv_admission=rule, block_size=block_size, prefix_cache=prefix_cache
        )
        self.block_size = block_size
        config = config.resolve(1, NUM_BLOCKS, 80)
        self.kv_cache = KVCacheManager(config)
        self.rule = ADMISSION_RULES[rule](config, self.kv_cache)

    def run(self, sequence: Sequence) -> None:
        """Give a sequence blocks for its tokens, all of them scheduled."""
        num_tokens = len(sequence.token_ids)
        self.kv_cache.running[sequence.seq] = sequence
        sequence.num_scheduled_tokens = num_tokens
        num_blocks = -(-num_tokens // self.block_size)
        sequence.block_ids = self.kv_cache.block_pool.allocate(num_blocks)

    def run_two_decodes(self) -> None:
        """Fill 58 of 100 tokens."""
        self.run(waiting_sequence(0, 30, max_tokens=25, predicted=20, generated=5))
        self.run(waiting_sequence(1, 20, max_tokens=15, predicted=12, generated=3))

    def most(self, max_tokens: int = 30, predicted: int = 0) -> int:
        """Return the longest prompt that is admitted; all shorter ones are as well."""
        admitted = [
            num_prompt
            for num_prompt in range(1, NUM_BLOCKS + 1)
            if self.rule.is_admissible(waiting_sequence(9, num_prompt, max_tokens, predicted))
        ]
        assert admitted == list(range(1, len(admitted) + 1))
        return len(admitted)


@pytest.mark.parametrize(
    ("rule", "predicted", "longest"),
    [
        # 100 - 35 - 23 tokens are free.
        ("greedy", 7, 42),
        ("reserve-static", 7, 35),
        ("reserve-static", 25, 17),
        # r* = min(20 - 5, 12 - 3, 7) = 7: 42 + 30 + p + 7 <= 100; r* = 9: 44 + 32 + p + 9 <= 100.
        ("reserve-dynamic", 7, 21),
        ("reserve-dynamic", 25, 15),
        # 55 + 35 + p + 5 <= 100.
        ("reserve-max", 3, 5),
        ("distserve", 7, 42),
    ],
)
def test_the_longest_prompt_beside_two_decodes(rule: str, predicted: int, longest: int) -> None:
    cache = Cache(rule)
    cache.run_two_decodes()
    max_tokens = 5 if rule == "reserve-max" else 30
    assert cache.most(max_tokens, predicted) == longest


@pytest.mark.parametrize("rule", ADMISSION_RULES)
def test_an_empty_cache_admits_everything(rule: str) -> None:
    assert Cache(rule).most(max_tokens=500, predicted=400) == NUM_BLOCKS


@pytest.mark.parametrize("rule", ADMISSION_RULES)
def test_blocks_of_victims_count_as_free(rule: str) -> None:
    cache = Cache(rule)
    cache.run_two_decodes()
    candidate = waiting_sequence(9, 50, max_tokens=3, predicted=3)
    assert not cache.rule.is_admissible(candidate)
    assert cache.rule.is_admissible(candidate, {0, 1})


def test_a_sequence_beyond_its_prediction_has_one_token_left() -> None:
    cache = Cache("reserve-dynamic")
    cache.run(waiting_sequence(0, 30, max_tokens=60, predicted=1, generated=20))
    # 50 + 1 + p + 1 <= 100.
    assert cache.most(predicted=60) == 48


def test_without_a_prediction_the_lengths_of_finished_outputs_count() -> None:
    cache = Cache("reserve-static")
    cache.run(waiting_sequence(0, 58))
    for _ in range(4):
        cache.rule.output_lengths.record(30, 11)
    assert cache.most() == 42 - 11
    # A prediction above max_tokens cannot come true.
    assert cache.most(max_tokens=20, predicted=60) == 42 - 20


def test_the_prompts_of_unfinished_prefills_count_whole() -> None:
    cache = Cache("greedy")
    half = waiting_sequence(0, 60)
    cache.run(half)
    half.num_scheduled_tokens = 10
    cache.kv_cache.block_pool.release(half.block_ids[10:])
    del half.block_ids[10:]
    assert cache.most() == 40


def test_cached_blocks_of_the_candidate_are_no_free_blocks() -> None:
    """50 blocks can be allocated; 40 of them hold the beginning of the candidate."""
    cache = Cache("greedy", prefix_cache=True)
    ended = waiting_sequence(0, 40)
    cache.run(ended)
    ended.num_computed_tokens = 40
    cache.kv_cache.publish(ended)
    cache.kv_cache.free(ended)
    cache.run(waiting_sequence(1, 50))
    assert cache.rule.is_admissible(waiting_sequence(0, 50))
    assert not cache.rule.is_admissible(waiting_sequence(0, 51))


@pytest.mark.parametrize(("num_waiting", "longest"), [(4, 96), (5, 0)])
def test_distserve_admits_while_few_prompts_wait_for_their_first_decode(
    num_waiting: int, longest: int
) -> None:
    """Five of 100 blocks are not below 5 %; once the sequence decodes, its blocks do not count."""
    cache = Cache("distserve")
    first = waiting_sequence(0, num_waiting)
    cache.run(first)
    assert cache.most() == longest
    first.num_scheduled_tokens += 1
    assert cache.most() == 100 - num_waiting


def test_distserve_does_not_count_prompts_that_another_engine_decodes() -> None:
    cache = Cache("distserve")
    cache.run(waiting_sequence(0, 40, kv_ticket=7))
    assert cache.most() == 60


@settings(max_examples=num_examples(25, 1000), deadline=None, database=None)
@given(
    outputs=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    predicted=st.integers(1, 30),
)
def test_reserve_dynamic_fits_until_the_first_output_ends(
    outputs: list[tuple[int, int]], predicted: int
) -> None:
    """All outputs grow by the least prediction, whether a running or the waiting one has it."""
    caches = {name: Cache(name) for name in ("greedy", "reserve-static", "reserve-dynamic")}
    for cache in caches.values():
        for seq, (generated, remaining) in enumerate(outputs):
            total = generated + remaining
            cache.run(waiting_sequence(seq, 8, max_tokens=60, predicted=total, generated=generated))
    used = sum(8 + generated for generated, _ in outputs)
    growth = min(predicted, *(remaining for _, remaining in outputs))
    longest = {name: cache.most(60, predicted) for name, cache in caches.items()}
    assert longest["greedy"] == NUM_BLOCKS - used
    assert longest["reserve-static"] == max(0, NUM_BLOCKS - used - predicted)
    num_left = NUM_BLOCKS - used - growth * (len(outputs) + 1)
    assert longest["reserve-dynamic"] == max(0, num_left)


def test_tokens_are_rounded_up_to_blocks() -> None:
    """18 tokens growing by 9, beside p + 9: 7 + ceil((p + 9) / 4) <= 100 blocks of 4."""
    cache = Cache("reserve-dynamic", block_size=4)
    cache.run(waiting_sequence(0, 15, max_tokens=60, predicted=12, generated=3))
    candidate = waiting_sequence(9, 363)
    assert cache.rule.is_admissible(candidate)
    assert not cache.rule.is_admissible(waiting_sequence(9, 364))


def test_the_names_are_those_of_the_rules() -> None:
    assert set(ADMISSION_RULES) == set(KV_ADMISSION_NAMES) - {"auto"}
    with pytest.raises(ValueError, match="kv_admission"):
        SchedulerConfig(kv_admission="first-fit")


CHOOSING_POLICIES = [name for name in EVERY_POLICY if name != "fastertransformer"]


@further_runs(1)
@settings(max_examples=num_examples(7, 300), deadline=None, database=None)
@given(
    rule=st.sampled_from(sorted(ADMISSION_RULES)),
    policy=st.sampled_from(CHOOSING_POLICIES),
    order=st.sampled_from(["fcfs", "sjf", "ljf"]),
    stages=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([15, 30, 100]),
)
def test_every_request_finishes_under_every_rule(
    run: int, rule: str, policy: str, order: str, stages: int, seed: int, num_blocks: int
) -> None:
    config = SchedulerConfig(
        policy=policy,
        kv_admission=rule,
        prefill_order=order,
        prefill_group=3,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=40,
    )
    pipe = Pipeline(config.resolve(stages, num_blocks, 60))
    drive(pipe, Random(seed), 200)
    pipe.drain()
    check_outputs(pipe)


@settings(max_examples=num_examples(6, 100), deadline=None, database=None)
@example(policy="throttle-paper", stages=1, seed=2114)
@given(
    policy=st.sampled_from(CHOOSING_POLICIES),
    stages=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_reserve_max_preempts_nothing(policy: str, stages: int, seed: int) -> None:
    """Without urgent requests: every decode has its block when it needs it."""
    rng = Random(seed)
    config = SchedulerConfig(policy=policy, kv_admission="reserve-max", block_size=4)
    pipe = Pipeline(config.resolve(stages, 30, 60))
    for seq in range(0, 36, 3):
        pipe.add(random_request(rng, seq, 60, priority=0))
        for _ in range(rng.randint(0, 10)):
            if pipe.schedule() is None and pipe.plans:
                pipe.commit()
    pipe.drain()
    assert pipe.scheduler.stats().preemptions == 0
    for seq, request in pipe.requests.items():
        assert pipe.generated[seq] == generate(request)
