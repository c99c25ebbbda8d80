"""Properties of the scheduler over random pipelines, loads and moments of abort."""

from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.scheduler.config import KV_ADMISSION_NAMES, SchedulerConfig
from gllm.scheduler.eviction import EVICTION_NAMES
from gllm.scheduler.prefill_order import PREFILL_ORDERS
from gllm.scheduler.sequence import SchedulerRequest
from tests.support.examples import further_runs, num_examples
from tests.support.scheduler.pipeline import EVERY_POLICY, Pipeline, generate

STEPS = 600
EXAMPLES = num_examples(12, 200)
"""In the long profile together 10^5 calls of schedule and commit, each followed by all checks."""


@st.composite
def configs(draw: st.DrawFn, lanes: str = "1", has_states: bool | None = None) -> SchedulerConfig:
    """A configuration whose cache holds from one full-length sequence up.

    has_states: of a model with recurrent layers; None for some."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    max_model_len = draw(st.integers(2, 60))
    blocks = -(-max_model_len // block_size)
    prefill = draw(st.integers(1, 64))
    policy = draw(st.sampled_from(EVERY_POLICY))
    rules = ("auto",) if policy == "fastertransformer" else KV_ADMISSION_NAMES
    config = SchedulerConfig(
        policy=policy,
        prefill_order=draw(st.sampled_from(PREFILL_ORDERS)),
        prefill_group=draw(st.integers(1, 8)),
        prefill_batch_tokens=draw(st.none() | st.integers(1, 80)),
        kv_admission=draw(st.sampled_from(rules)),
        max_prefill_tokens=prefill,
        min_prefill_tokens=draw(st.integers(1, prefill)),
        prefill_iterations=draw(st.integers(1, 8)),
        kv_threshold=draw(st.sampled_from([0.0, 0.05, 0.5])),
        max_num_batched_tokens=draw(st.integers(1, 80)),
        max_num_seqs=draw(st.integers(1, 12)),
        max_in_flight=draw(st.none() | st.integers(1, 9)),
        expected_output_tokens=draw(st.sampled_from([0, 1, 16, 256])),
        lanes=lanes,
        phase_pure=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        block_size=block_size,
        prefix_cache=draw(st.booleans()),
        prefix_cache_eviction=draw(st.sampled_from(EVICTION_NAMES)),
    )
    stages = draw(st.integers(int(lanes), 8))
    num_blocks = blocks + draw(st.integers(0, 3 * blocks))
    may_have_states = draw(st.booleans()) if has_states is None else has_states
    num_slots = draw(st.sampled_from([2, 3, 7, 24, 60])) if may_have_states else 0
    return config.resolve(stages, num_blocks, max_model_len, num_state_slots=num_slots)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """A pipeline of any such configuration."""
    return Pipeline(draw(configs()), draw(st.booleans()))


def random_request(
    rng: Random, seq: int, longest: int, priority: int | None = None
) -> SchedulerRequest:
    """A request that begins like many others, in one of two salts; by default of any priority."""
    prompt_len = rng.randint(1, longest - 1)
    common = rng.randint(0, prompt_len)
    prompt = [7] * common + [rng.randrange(50) for _ in range(prompt_len - common)]
    max_tokens = rng.randint(1, min(longest - prompt_len, 20))
    stop_token_ids = frozenset(rng.sample(range(50), rng.choice([0, 0, 3])))
    random_priority = rng.choice([0, 0, 0, 1, -1])
    return SchedulerRequest(
        seq=seq,
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        priority=random_priority if priority is None else priority,
        cache_salt=rng.choice(["", "salt"]),
        n=rng.choice([1, 1, 1, 3]),
        reads_prefix_cache=rng.random() < 0.8,
        client=rng.choice(["", "key 1"]),
        session=rng.choice(["", "", "a", "b"]),
    )


def drive(pipeline: Pipeline, rng: Random, steps: int) -> None:
    """Arrivals, aborts, a forgetful cache, schedules and commits in random order."""
    seq = 0
    arrivals = rng.choice([0.02, 0.1, 0.5])
    for _ in range(steps):
        if rng.random() < arrivals and len(pipeline.alive) < 40:
            request = random_request(rng, seq, pipeline.config.max_model_len)
            pipeline.add(request)
            seq += request.n
        if rng.random() < 0.02 and pipeline.alive:
            victim = pipeline.requests[rng.choice(sorted(pipeline.alive))]
            pipeline.abort(list(range(victim.seq, victim.seq + rng.randint(1, victim.n))))
        if rng.random() < 0.005:
            pipeline.scheduler.reset_prefix_cache()
        if pipeline.plans and rng.random() < 0.5:
            pipeline.commit()
        else:
            pipeline.schedule()


def check_outputs(pipeline: Pipeline) -> None:
    """Every request has ended with its tokens, and nothing of it is left."""
    for seq, request in pipeline.requests.items():
        alone = generate(request, pipeline.forces)
        if pipeline.ended[seq] == "abort":
            assert pipeline.generated[seq] == alone[: len(pipeline.generated[seq])]
        else:
            assert pipeline.generated[seq] == alone
    stats = pipeline.scheduler.stats()
    assert (stats.running, stats.waiting, stats.in_flight, stats.kv_usage) == (0, 0, 0, 0.0)
    assert not pipeline.scheduler.stats().unfinished
    assert not stats.used_state_slots


@further_runs(2)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(pipeline=pipelines(), seed=st.integers(0, 2**32))
def test_every_request_ends_with_the_tokens_it_would_get_alone(
    run: int, pipeline: Pipeline, seed: int
) -> None:
    drive(pipeline, Random(seed), STEPS)
    pipeline.drain()
    check_outputs(pipeline)


@settings(max_examples=num_examples(10, 50), deadline=None, database=None)
@given(stages=st.integers(1, 8), decoding=st.integers(1, 40), lag=st.integers(0, 100))
def test_constant_decodes_rotate(stages: int, decoding: int, lag: int) -> None:
    """RD constant, no memory stall: every sequence once per min(RD, stages) decode plans."""
    config = SchedulerConfig(policy="throttle", async_scheduling=False, max_num_seqs=64)
    pipeline = Pipeline(config.resolve(stages, 1000, 200))
    for seq in range(decoding):
        pipeline.add(SchedulerRequest(seq, [seq], 199))
    while pipeline.scheduler.describe().waiting_seqs or (
        pipeline.scheduler.stats().decoding < decoding
    ):
        if pipeline.schedule() is None:
            pipeline.commit()
    period = min(decoding, stages)
    decodes: list[set[int]] = []
    while len(decodes) < 8 * period + 20:
        plan = pipeline.schedule()
        if plan is None:
            pipeline.commit()
        else:
            decodes.append({row.seq for row in plan.rows})
    settled = decodes[2 * period :]
    for begin in range(len(settled) - period + 1):
        window = settled[begin : begin + period]
        assert sum(len(rows) for rows in window) == decoding, "each plan carries its share"
        assert set().union(*window) == set(range(decoding))


@further_runs(2)
@settings(max_examples=num_examples(7, 60), deadline=None, database=None)
@given(stages=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_a_ready_decode_waits_a_bounded_number_of_plans(run: int, stages: int, seed: int) -> None:
    """Without memory stalls at most ceil(RD / max(1, floor(RD / stages))) plans, RD varying."""
    rng = Random(seed)
    config = SchedulerConfig(policy="throttle", async_scheduling=False, max_num_seqs=100)
    pipeline = Pipeline(config.resolve(stages, 4000, 100))
    waits: dict[int, int] = {}
    most = 0
    for seq in range(60):
        if rng.random() < 0.5:
            pipeline.add(SchedulerRequest(len(pipeline.requests), [seq], rng.randint(1, 60)))
        for _ in range(rng.randint(1, 6)):
            queues = pipeline.scheduler.describe()
            most = max(most, len(queues.decoding_seqs))
            ready = set(queues.ready_seqs)
            plan = pipeline.schedule()
            if plan is None:
                if pipeline.plans:
                    pipeline.commit()
                continue
            ran = {row.seq for row in plan.rows}
            waits = {s: waits.get(s, 0) + 1 for s in ready - ran}
            bound = -(-most // max(1, most // stages))
            assert all(wait <= bound for wait in waits.values()), (waits, bound)
