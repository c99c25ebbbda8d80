"""Policy `throttle`: the step time curve, the averages of the load, and the chunk size by both."""

import itertools
import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.latency_model import ChunkLatencyModel
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_averages import StepAverager, StepAverages
from gllm.scheduler.step_cost import OnlineStepCurveFit, StepTimeCurve
from gllm.scheduler.throttle_policy import EFFICIENCY_LIMIT, ThrottlePolicy
from gllm.sim.costs.base import CostModel
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.metrics.report import summarize_run
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from tests.scheduler.test_policy import load
from tests.support.examples import num_examples

TimeByTokens = Callable[[int], float]


def roofline(ridge: int) -> TimeByTokens:
    return lambda n: 0.02 * math.hypot(n, ridge) / ridge


def line(ridge: int) -> TimeByTokens:
    return lambda n: 0.005 * (1 + n / ridge)


def step(number: int, chunk: int, decodes: int, ends_prompt: bool = False) -> StageWork:
    chunks = ((0, chunk),) if chunk else ()
    return StageWork(number, chunk + decodes, chunks, decodes, 0, decodes + ends_prompt)


def fit_steps(
    time: TimeByTokens, rng: Random, noise: float = 0.0, slow_share: float = 0.0
) -> OnlineStepCurveFit:
    """Fit steps of 1 to 60 decodes, half of them with a chunk; some take five to fifty times."""
    fit = OnlineStepCurveFit(150)
    for number in range(640):
        chunk = rng.choice((0, 0, 0, rng.randint(2, 500), 256, 400))
        work = step(number, chunk, rng.randint(1, 60))
        seconds = time(work.num_tokens) * rng.lognormvariate(0, noise)
        if rng.random() < slow_share:
            seconds *= rng.uniform(5, 50)
        fit.observe_step(work, seconds)
    return fit


@pytest.mark.parametrize(
    "time", [roofline(16), roofline(40), roofline(150), roofline(400), line(16), line(100)]
)
@pytest.mark.parametrize(("noise", "slow_share"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.05)])
def test_the_curve_converges_from_a_wrong_ridge(
    time: TimeByTokens, noise: float, slow_share: float
) -> None:
    """Also on a busy machine, where one step in twenty takes five to fifty times as long."""
    curve = fit_steps(time, Random(1), noise, slow_share).curve
    tolerance = 0.02 if not noise else 0.12
    for tokens in (5, 30, 100, 250, 400, 500):
        assert curve.seconds(tokens) == pytest.approx(time(tokens), rel=tolerance), tokens


def test_slow_first_steps_leave_time_that_does_not_depend_on_tokens() -> None:
    """Steps of 60 to 250 tokens, the larger ones first, while the process is still slow."""
    fit = OnlineStepCurveFit(150)
    for number in range(64):
        tokens = 250 - 3 * number
        fit.observe_step(step(number, tokens, 0), line(100)(tokens) * (1 + 6 / (1 + number / 4)))
    assert fit.curve.seconds(5) > 0.25 * line(100)(5)


def test_the_curve_includes_context_and_attention() -> None:
    rng, fit = Random(2), OnlineStepCurveFit(150)
    for number in range(640):
        decodes, chunk = rng.randint(1, 60), rng.choice((0, 300))
        work = step(number, chunk, decodes)._replace(
            num_decode_context_tokens=decodes * rng.randint(10, 4000)
        )
        seconds = roofline(150)(work.num_tokens) + 1e-7 * work.num_decode_context_tokens
        fit.observe_step(work, seconds)
    for tokens in (30, 330):
        short, long = (fit.curve.seconds(tokens, 0, context) for context in (0, 100_000))
        assert 0.5 < (long - short) / 0.01 < 1.5


def test_a_given_ridge_is_kept_and_scaled() -> None:
    fit = OnlineStepCurveFit(80, is_fixed=True)
    for number in range(64):
        fit.observe_step(step(number, 0, 1 + number % 50), roofline(80)(1 + number % 50))
    assert fit.curve.seconds(300) == pytest.approx(roofline(80)(300), rel=1e-6)
    assert fit.most_tokens == math.inf


@given(
    st.floats(1e-8, 1),
    st.floats(0, 1e-2),
    st.floats(1e-12, 1e-3),
    st.floats(0.5, 0.99),
)
def test_tokens_at_an_efficiency_have_it(
    constant: float, linear: float, square: float, efficiency: float
) -> None:
    curve = StepTimeCurve(constant, linear, square)
    tokens = curve.tokens_at_efficiency(efficiency)
    assert math.sqrt(square) * tokens / curve.seconds(tokens) == pytest.approx(efficiency, rel=1e-4)
    assert StepTimeCurve(constant, linear, 0.0).tokens_at_efficiency(efficiency) == math.inf


def test_averages_by_hand() -> None:
    averager = StepAverager(stages=2)
    averager.on_load(load(waiting=100, decoding=6, prompts=3))
    for number, work in enumerate(
        [step(0, 0, 4), step(1, 50, 3, ends_prompt=True), step(2, 0, 2), step(3, 0, 1)]
    ):
        averager.on_schedule(float(number))
        averager.observe_step(work, 0.5)
    averages = averager.read()
    assert averager.num_steps == 4
    assert averages.seconds == pytest.approx(0.5)
    assert (averages.running, averages.waiting) == pytest.approx((6, 3))
    assert averages.decodes == pytest.approx(2.5, rel=0.01)
    assert averages.prefill_tokens == pytest.approx(12.5, rel=0.01)
    assert averages.prefill_steps == pytest.approx(0.25, rel=0.01)
    assert averages.prompts == pytest.approx(0.25, rel=0.01)
    # Beside the chunk, and in the micro-batch behind it while the second stage computes it.
    assert averages.delayed_decodes == pytest.approx((3 + 2) / 4, rel=0.01)
    # The first step has no predecessor; its own time counts.
    assert averages.elapsed_seconds == pytest.approx((0.5 + 1 + 1 + 1) / 4, rel=0.01)


def test_idle_time_is_no_time_under_load() -> None:
    averager = StepAverager(stages=1)
    for now in (0.0, 1.0, 3601.0):
        averager.on_schedule(now)
        averager.observe_step(step(0, 0, 1), 1.0)
    assert averager.read().elapsed_seconds == pytest.approx((1 + 1 + 10) / 3, rel=0.01)


def test_averages_do_not_depend_on_when_stages_report() -> None:
    """Workers report several steps at a time, the simulator each one at its end."""
    load_by_step = [load(waiting=100, decoding=n % 7, prompts=n % 3) for n in range(240)]

    def read(steps_per_report: int) -> StepAverages:
        averager = StepAverager(stages=2)
        averager.observe_step(step(0, 0, 4), 0.5)
        for number, each in enumerate(load_by_step):
            averager.on_load(each)
            averager.on_schedule(0.4 * number)
            if (number + 1) % steps_per_report == 0:
                for reported in range(number + 1 - steps_per_report, number + 1):
                    averager.observe_step(step(reported, 50 * (reported % 2), 4), 0.5)
        return averager.read()

    assert read(12) == pytest.approx(read(1), rel=0.01)


def best_chunk(averages: StepAverages, stages: int = 4, curve: StepTimeCurve | None = None) -> int:
    """Return the chunk size of the shortest mean latency, from a mean size of 200."""
    cost = ChunkLatencyModel(averages, curve or StepTimeCurve.from_ridge(150, 0.02), stages)
    return min(range(16, 1200, 4), key=cost)


AVERAGES = StepAverages(
    seconds=0.03,
    elapsed_seconds=0.03,
    prefill_tokens=100.0,
    prefill_steps=0.5,
    prompts=0.1,
    decodes=20.0,
    delayed_decodes=14.0,
    pairs=0.0,
    context_tokens=0.0,
    running=80.0,
    waiting=4.0,
)


def test_chunks_grow_with_the_queue_and_shrink_with_the_decodes() -> None:
    sizes = [best_chunk(AVERAGES._replace(waiting=waiting)) for waiting in (1, 4, 16, 64)]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 1.3 * sizes[0]
    sizes = [best_chunk(AVERAGES._replace(running=running)) for running in (5, 20, 80, 320)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.3 * sizes[-1]


def test_chunks_grow_with_the_utilization() -> None:
    """With 150 prefill tokens per micro-batch small chunks cannot keep up."""
    sizes = [
        best_chunk(
            AVERAGES._replace(
                prefill_tokens=tokens, prefill_steps=tokens / 200, prompts=tokens / 1000
            )
        )
        for tokens in (25, 50, 100, 150)
    ]
    assert sizes == sorted(sizes)
    seconds = roofline(150)(20 + sizes[-1])
    assert 150 / AVERAGES.elapsed_seconds * seconds / sizes[-1] < 0.98


@settings(max_examples=num_examples(30, 300), deadline=None)
@given(
    overheads=st.lists(st.floats(0, 0.05), min_size=2, max_size=5),
    ridge=st.sampled_from((16, 40, 150)),
    stages=st.sampled_from((1, 2, 4)),
    utilization=st.floats(0.2, 0.9),
    prompt_tokens=st.integers(200, 4000),
    waiting=st.floats(0.1, 30),
    running=st.integers(4, 100),
)
def test_chunks_are_never_smaller_with_more_overhead(
    overheads: list[float],
    ridge: int,
    stages: int,
    utilization: float,
    prompt_tokens: int,
    waiting: float,
    running: int,
) -> None:
    """With time that each micro-batch takes whatever its size, at a load that all can carry."""
    decodes, fits = running // stages, []
    for overhead in sorted(overheads):
        fits.append(OnlineStepCurveFit(150))
        for number in range(320):
            work = step(number, (number % 5) * 100, decodes)
            fits[-1].observe_step(work, roofline(ridge)(work.num_tokens) + overhead)
    sizes = []
    for fit in fits:
        averages = AVERAGES._replace(
            seconds=(fit.curve.seconds(decodes) + fit.curve.seconds(decodes + 200)) / 2,
            elapsed_seconds=fits[-1].curve.seconds(decodes + 200) / 2 / utilization,
            prompts=100 / prompt_tokens,
            decodes=decodes,
            delayed_decodes=0.7 * decodes,
            running=running,
            waiting=waiting,
        )
        sizes.append(best_chunk(averages, stages, fit.curve))
    # The sizes that the policy compares are further apart.
    assert all(after >= 0.9 * before for before, after in itertools.pairwise(sizes)), sizes


def test_slow_steps_count_in_the_utilization() -> None:
    """Means have the slow steps of a busy machine, of which the fit of the typical time has few."""
    busy = AVERAGES._replace(seconds=0.045, elapsed_seconds=0.05)
    assert best_chunk(busy) > 1.1 * best_chunk(AVERAGES._replace(elapsed_seconds=0.05))


@settings(max_examples=num_examples(50, 500), deadline=None)
@given(
    times=st.lists(
        st.tuples(st.integers(0, 2000), st.integers(0, 250), st.floats(0, 1e3)), max_size=20
    ),
    stages=st.sampled_from((1, 2, 8)),
    waiting=st.integers(1, 10**6),
    prompts=st.integers(1, 300),
    decoding=st.integers(0, 500),
    free=st.floats(0.06, 1),
)
def test_neither_phase_starves(
    times: list[tuple[int, int, float]],
    stages: int,
    waiting: int,
    prompts: int,
    decoding: int,
    free: float,
) -> None:
    """Whatever the steps took: at least #MinP or the free cache's share, never above #MaxP."""
    config = SchedulerConfig().resolve(stages, 1000, 1000)
    policy = ThrottlePolicy(config)
    for number, (chunk, decodes, seconds) in enumerate(times * 5):
        policy.observe_step(step(number, chunk, decodes, ends_prompt=True), seconds)
    scheduled = decoding // stages
    given_load = load(
        waiting, decoding, free=free, scheduled=scheduled, depth=stages, prompts=prompts
    )
    assert policy.decode_budget(given_load) >= min(1, decoding)
    for _ in range(3):
        budget = policy.prefill_budget(given_load)
        assert config.min_prefill_tokens <= budget <= config.max_prefill_tokens


class TokenTime(CostModel):
    """Time by tokens on each stage; a share of the micro-batches takes ten times as long."""

    def __init__(self, time: TimeByTokens, slow_share: float = 0.0) -> None:
        self._time, self._slow_share, self._rng = time, slow_share, Random(7)

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of a micro-batch."""
        is_slow = self._rng.random() < self._slow_share
        return self._time(work.num_tokens) * (10 if is_slow else 1)


def serve(
    cost: CostModel, stages: int, jobs: list[WorkloadRequest], policy: str = "throttle"
) -> RunRecord:
    config = SchedulerConfig(policy=policy).resolve(stages, 20_000, 16384)
    return simulate(Deployment("model", [1] * stages, cost, config), jobs)


@pytest.mark.parametrize(
    ("time", "largest"),
    [
        (roofline(150), 150 * math.sqrt(1 / (EFFICIENCY_LIMIT**-2 - 1))),
        (line(16), 16 * EFFICIENCY_LIMIT / (1 - EFFICIENCY_LIMIT)),
    ],
)
def test_at_the_limit_micro_batches_grow_to_the_efficient_size(
    time: TimeByTokens, largest: float
) -> None:
    """Eighty prompts of about 2,000 tokens wait, with little output."""
    rng = Random(5)
    jobs = [WorkloadRequest(0.0, rng.randint(200, 4000), rng.randint(4, 40)) for _ in range(80)]
    run = serve(TokenTime(time), 2, jobs)
    sizes = [batch.work.num_tokens for batch in run.micro_batches]
    half = sizes[len(sizes) // 2 : -40]
    # Larger where all steps are alike, so that prior knowledge of the device still counts.
    assert 0.75 * largest < sum(half) / len(half) < 1.4 * largest
    assert max(sizes[64:]) <= 1.4 * largest


def test_slow_steps_of_a_busy_machine_change_little() -> None:
    jobs = make_workload("azure-conv", 100, 3.0, "poisson", 3)
    means = []
    for slow_share in (0.0, 0.02):
        run = serve(TokenTime(roofline(150), slow_share), 1, jobs)
        chunks = [tokens for batch in run.micro_batches for _, tokens in batch.work.prefill_chunks]
        means.append(sum(chunks) / len(chunks))
    assert 0.6 < means[1] / means[0] < 1.7


def test_one_stage_has_shorter_gaps_than_sarathi_and_no_longer_latency() -> None:
    jobs = make_workload("azure-code", 100, 2.5, "poisson", 3)
    ours, other = (
        summarize_run(serve(TokenTime(roofline(150)), 1, jobs, policy))
        for policy in ("auto", "sarathi")
    )
    assert ours["itl"]["p99"] < 0.5 * other["itl"]["p99"]
    assert ours["e2el"]["mean"] < 0.9 * other["e2el"]["mean"]


def test_balance_learns_the_load_as_throttle_does() -> None:
    """If time depends on the number of tokens alone, both have the same micro-batches."""
    jobs = make_workload("azure-conv", 40, 2.0, "poisson", 3)
    ours, other = (
        summarize_run(serve(TokenTime(roofline(150)), 2, jobs, policy))
        for policy in ("throttle", "balance")
    )
    for name, statistic in (("itl", "p99"), ("tpot", "mean"), ("e2el", "mean")):
        assert other[name][statistic] == pytest.approx(ours[name][statistic], rel=0.1)
