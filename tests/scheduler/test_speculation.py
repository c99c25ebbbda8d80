"""Speculation: the same texts whatever is guessed, no leaked block, n-grams as described."""

import dataclasses
from array import array
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.config.engine import EngineConfig
from gllm.options.field_types import FieldError
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.ngram_drafter import NgramDrafter
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult
from gllm.scheduler.reported_drafter import ReportedDrafter
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.speculation import (
    DRAFTERS,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    AcceptanceEstimate,
    GuessCost,
    GuessPause,
    MicroBatchYield,
    WaitEstimate,
    verify_guesses,
)
from gllm.scheduler.speculative_config import (
    DRAFT_METHODS,
    SpeculativeConfig,
    parse_speculative_config,
)
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import (
    MAX_WINDOW_STEPS,
    REFIT_INTERVAL_STEPS,
    OnlineStepCurveFit,
    StepTimeCurve,
)
from gllm.serve import make_parser
from tests.scheduler.test_properties import (
    STEPS,
    check_outputs,
    configs,
    drive,
    random_request,
)
from tests.support.examples import further_runs, num_examples
from tests.support.scheduler.lane_pipeline import LanePipeline
from tests.support.scheduler.pipeline import VOCABULARY, Pipeline, generate, next_token


class GuessingDrafter:
    """Knows the next token of the pipeline's texts, and is wrong or silent at random."""

    def __init__(self, rng: Random, acceptance: float, is_silent: bool = True) -> None:
        self._rng, self._acceptance, self._is_silent = rng, acceptance, is_silent

    def draft(self, token_ids: "array[int]", guesses: list[int], num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens."""
        assert num_tokens >= 1
        tokens = [*token_ids, *guesses]
        for _ in range(self._rng.randint(0, num_tokens) if self._is_silent else num_tokens):
            is_right = self._rng.random() < self._acceptance
            tokens.append(next_token(tokens) if is_right else self._rng.randrange(VOCABULARY))
        return tokens[len(token_ids) + len(guesses) :]


def speculating(draw: st.DrawFn, lanes: str) -> tuple[SchedulerConfig, dict[str, Any]]:
    """Any configuration without recurrent layers, and a drafter, of the scheduler or the stage."""
    base = draw(configs(lanes, has_states=False))
    is_on_stage = draw(st.booleans())
    method, windows = "ngram", None
    if is_on_stage:
        method, windows = "mtp", draw(st.integers(1, 3))
    speculation = SpeculativeConfig(draw(st.integers(1, 6)), method, max_windows_in_flight=windows)
    fields: dict[str, Any] = {
        "speculative_config": speculation,
        # `resolve` has set them.
        "async_scheduling": draw(st.booleans()),
        "max_in_flight": draw(st.none() | st.integers(1, 9)),
    }
    options: dict[str, Any] = {
        spec.name: fields.get(spec.name, getattr(base, spec.name))
        for spec in dataclasses.fields(base)
        if "help" in spec.metadata
    }
    config = SchedulerConfig(**options).resolve(base.stages, base.num_blocks, base.max_model_len)
    rng = Random(draw(st.integers(0, 2**32)))
    drafter = GuessingDrafter(rng, draw(st.sampled_from([0.0, 0.5, 0.8, 1.0])))
    return config, {"stage_drafter" if is_on_stage else "drafter": drafter}


@st.composite
def speculating_pipelines(draw: st.DrawFn) -> Pipeline:
    config, drafters = speculating(draw, "1")
    return Pipeline(config, draw(st.booleans()), **drafters)


@st.composite
def speculating_lane_pipelines(draw: st.DrawFn) -> LanePipeline:
    config, drafters = speculating(draw, "2")
    rng = Random(draw(st.integers(0, 2**32)))
    return LanePipeline(config, rng, draw(st.booleans()), draw(st.booleans()), **drafters)


def examples(small: int, large: int) -> settings:
    return settings(
        max_examples=num_examples(small, large),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        database=None,
    )


@further_runs(2)
@examples(10, 200)
@given(pipeline=speculating_pipelines(), seed=st.integers(0, 2**32))
def test_every_request_ends_with_the_tokens_it_would_get_without_guesses(
    run: int, pipeline: Pipeline, seed: int
) -> None:
    drive(pipeline, Random(seed), STEPS)
    pipeline.drain()
    check_outputs(pipeline)


@further_runs(2)
@examples(4, 200)
@given(pipeline=speculating_lane_pipelines(), seed=st.integers(0, 2**32))
def test_two_lanes(run: int, pipeline: LanePipeline, seed: int) -> None:
    """No sequence has rows in both lanes, also where decodes change the lane."""
    drive(pipeline, Random(seed), 200)
    pipeline.drain()
    check_outputs(pipeline)


@further_runs(2)
@examples(4, 100)
@given(pipeline=speculating_pipelines(), seed=st.integers(0, 2**32))
def test_failures_harm_no_other_sequence(run: int, pipeline: Pipeline, seed: int) -> None:
    """Steps that raise, rows that are NaN and sampling that fails, with windows in flight."""
    rng, seq = Random(seed), 0
    for _ in range(200):
        if rng.random() < 0.1 and len(pipeline.alive) < 20:
            request = random_request(rng, seq, pipeline.config.max_model_len)
            pipeline.add(request)
            seq += request.n
        if pipeline.plans and rng.random() < 0.5:
            errors = {seq: "sampling failed" for seq in pipeline.alive if rng.random() < 0.02}
            pipeline.commit(errors)
        else:
            faulty = [seq for seq in pipeline.alive if rng.random() < 0.01]
            pipeline.schedule(fails=rng.random() < 0.03, faulty=faulty)
    pipeline.drain()
    for seq, request in pipeline.requests.items():
        alone = generate(request, pipeline.forces)
        assert pipeline.generated[seq] == alone[: len(pipeline.generated[seq])]
    assert pipeline.scheduler.stats().kv_usage == 0


@pytest.mark.parametrize("method", DRAFT_METHODS)
def test_every_method_keeps_the_text(method: str) -> None:
    model = "draft" if method == "draft_model" else None
    speculation = SpeculativeConfig(3, method, model=model, prompt_lookup_max=1)
    config = SchedulerConfig(speculative_config=speculation)
    pipeline = Pipeline(config.resolve(3, 64, 200), stage_drafter=GuessingDrafter(Random(1), 0.7))
    for seq in range(4):
        pipeline.add(SchedulerRequest(seq, [1, 2, 3, 1, 2], 40))
    pipeline.drain()
    check_outputs(pipeline)
    assert pipeline.scheduler.stats().draft_tokens > 0


def stage_pipeline(windows: int, stages: int, acceptance: float = 1.0, **options: Any) -> Pipeline:
    """A pipeline whose last stage drafts three tokens per window."""
    speculation = SpeculativeConfig(3, "mtp", max_windows_in_flight=windows)
    config = SchedulerConfig(speculative_config=speculation, **options)
    drafter = GuessingDrafter(Random(1), acceptance, is_silent=False)
    return Pipeline(config.resolve(stages, 64, 200), stage_drafter=drafter)


@pytest.mark.parametrize(
    ("windows", "stages", "num_drafts", "num_tokens"),
    [(1, 1, 3, [4]), (1, 3, 3, [4]), (2, 3, 7, [4, 4]), (3, 4, 11, [4, 4])],
)
def test_the_last_stage_drafts_for_all_windows_in_flight(
    windows: int, stages: int, num_drafts: int, num_tokens: list[int]
) -> None:
    """The drafts of a prefill are the windows behind it; async scheduling is off.

    A third window is too likely to continue a wrong guess, as long as none is verified.
    """
    pipeline = stage_pipeline(windows, stages)
    pipeline.add(SchedulerRequest(0, [1, 2, 3], 60))
    prefill = pipeline.schedule()
    assert prefill is not None
    assert prefill.num_next_drafts == num_drafts
    assert pipeline.schedule() is None
    pipeline.commit()
    while pipeline.schedule() is not None:
        pass
    assert [plan.rows[0].num_tokens for plan in pipeline.plans] == num_tokens
    pipeline.drain()
    check_outputs(pipeline)
    stats = pipeline.scheduler.stats()
    assert stats.accepted_tokens == stats.draft_tokens > 30


def test_the_last_stage_drafts_nothing_where_that_is_not_worth_its_time() -> None:
    """Under load, and behind the last token of a text; it tries again later."""
    pipeline = stage_pipeline(1, 1, ridge_tokens=1)
    for seq in range(8):
        pipeline.add(SchedulerRequest(seq, [seq], 100))
    drafts = [plan.num_next_drafts for plan in iter(pipeline.schedule, None)]
    assert drafts == [0]
    alone = stage_pipeline(1, 1)
    alone.add(SchedulerRequest(0, [1, 2, 3], 1))
    plan = alone.schedule()
    assert plan is not None
    assert plan.num_next_drafts == 0


def test_wrong_drafts_of_the_last_stage_become_fewer() -> None:
    shares = []
    for acceptance in (0.0, 0.9):
        pipeline = stage_pipeline(1, 1, acceptance, ridge_tokens=32)
        for seq in range(8):
            pipeline.add(SchedulerRequest(seq, [seq], 100))
        pipeline.drain()
        check_outputs(pipeline)
        shares.append(pipeline.scheduler.stats().draft_tokens / 800)
    assert shares[0] < 0.4 < shares[1]


def test_a_replay_has_the_drafts_of_the_results() -> None:
    """A step log has the results, and with them all that the last stage has guessed."""
    pipeline = stage_pipeline(2, 3, 0.8)
    calls: list[tuple[str, Any]] = []
    schedule, commit = pipeline.scheduler.schedule, pipeline.scheduler.commit

    def log_plan(now: float) -> StepPlan | None:
        plan = schedule(now)
        calls.append(("schedule", (now, plan)))
        return plan

    def log_result(result: StepResult) -> Any:
        calls.append(("commit", msgspec.json.encode(result)))
        return commit(result)

    pipeline.scheduler.schedule = log_plan  # type: ignore[method-assign]
    pipeline.scheduler.commit = log_result  # type: ignore[method-assign]
    request = SchedulerRequest(0, [1, 2, 3], 60)
    pipeline.add(request)
    pipeline.drain()
    replayed = Scheduler(pipeline.config)
    replayed.add(request, 0.0)
    for name, call in calls:
        if name == "commit":
            replayed.commit(msgspec.json.decode(call, type=StepResult))
        else:
            assert replayed.schedule(call[0]) == call[1]
    assert replayed.stats() == pipeline.scheduler.stats()
    assert replayed.stats().accepted_tokens > 20


def test_a_sequence_has_blocks_for_the_drafts_of_the_last_stage() -> None:
    """As long as blocks are spare; the stage computes as many drafts as fit."""
    pipeline = stage_pipeline(1, 1, block_size=4)
    pipeline.add(SchedulerRequest(0, [1, 2, 3], 60))
    pipeline.schedule()
    pipeline.commit()
    plan = pipeline.schedule()
    assert plan is not None
    (row,) = plan.rows
    (sequence,) = pipeline.scheduler.kv_cache.running.values()
    assert row.start + row.num_tokens + plan.num_next_drafts <= 4 * len(sequence.block_ids)


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    drafts=st.lists(st.integers(0, 3), max_size=8),
    in_flight=st.lists(st.integers(0, 3), max_size=4),
    data=st.data(),
)
def test_reported_drafts_count_while_the_text_goes_on_as_they_do(
    tokens: list[int], drafts: list[int], in_flight: list[int], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(tokens)))
    count = data.draw(st.integers(1, 8))
    drafter = ReportedDrafter(SpeculativeConfig(3, "mtp"))
    drafter.report(start, drafts)
    guessed = drafter.draft(array("i", tokens), in_flight, count)
    behind = tokens[start:] + in_flight
    expected = drafts[len(behind) :][:count] if drafts[: len(behind)] == behind else []
    assert guessed == expected


def test_every_method_has_a_drafter() -> None:
    assert set(DRAFTERS) == set(DRAFT_METHODS)


@pytest.mark.parametrize(("acceptance", "fewest", "most"), [(1.0, 9, 16), (0.0, 40, 60)])
def test_several_windows_of_a_sequence_are_in_flight(acceptance, fewest, most) -> None:
    """Four stages verify three guesses each; no window continues guesses that are likely wrong."""
    config = SchedulerConfig(speculative_config=SpeculativeConfig(3)).resolve(4, 64, 200)
    pipeline = Pipeline(config, drafter=GuessingDrafter(Random(1), acceptance, is_silent=False))
    pipeline.add(SchedulerRequest(0, [1, 2, 3], 41))
    while not pipeline.ended:
        while pipeline.schedule() is not None:
            pass
        # A round of the pipeline: one step of each stage.
        assert len(pipeline.plans) <= 4
        pipeline.commit()
    assert pipeline.generated[0] == generate(pipeline.requests[0])
    # The first token is sampled by prefill.
    assert pipeline.scheduler.stats().num_decoded_tokens >= 40
    assert fewest <= pipeline.scheduler.stats().steps <= most


def rows_in_flight(config: SpeculativeConfig) -> list[int]:
    """Tokens of the rows of one sequence that four stages hold after its prefill."""
    resolved = SchedulerConfig(speculative_config=config).resolve(4, 64, 200)
    pipeline = Pipeline(resolved, drafter=GuessingDrafter(Random(1), 1.0, is_silent=False))
    pipeline.add(SchedulerRequest(0, [1, 2, 3], 41))
    pipeline.schedule()
    pipeline.commit()
    while pipeline.schedule() is not None:
        pass
    return [plan.rows[0].num_tokens for plan in pipeline.plans]


def test_windows_in_flight_have_as_many_tokens_as_the_first_up_to_the_limit() -> None:
    """In those behind the first one a guess stands in place of the known token.

    A fourth one would continue eight guesses, which are right at 6 % as long as none is verified.
    """
    assert rows_in_flight(SpeculativeConfig(2)) == [3, 3, 3]
    assert rows_in_flight(SpeculativeConfig(2, max_windows_in_flight=2)) == [3, 3]
    assert rows_in_flight(SpeculativeConfig(2, max_windows_in_flight=1)) == [3]


def test_a_prompt_that_has_to_wait_does_not_count_as_prefill() -> None:
    """Guesses run while another request waits for a place: no prefill is beside them."""
    config = SchedulerConfig(speculative_config=SpeculativeConfig(2), max_num_seqs=1)
    drafter = GuessingDrafter(Random(1), 1.0, is_silent=False)
    pipeline = Pipeline(config.resolve(1, 64, 200), drafter=drafter)
    pipeline.add(SchedulerRequest(0, [1, 2, 3], 10))
    for seq in range(1, 11):
        pipeline.add(SchedulerRequest(seq, list(range(150)), 10))
    pipeline.schedule()
    pipeline.commit()
    plan = pipeline.schedule()
    assert plan is not None
    assert [row.num_draft_tokens for row in plan.rows] == [2]


def async_pipeline(acceptance: float, **options: Any) -> Pipeline:
    """One stage with async scheduling and eight sequences."""
    config = SchedulerConfig(**options).resolve(1, 400, 200)
    assert config.async_scheduling
    pipeline = Pipeline(config, drafter=GuessingDrafter(Random(1), acceptance, is_silent=False))
    for seq in range(8):
        pipeline.add(SchedulerRequest(seq, [seq], 60))
    return pipeline


def count_steps(pipeline: Pipeline) -> int:
    while len(pipeline.ended) < 8:
        while pipeline.schedule() is not None:
            pass
        pipeline.commit()
    check_outputs(pipeline)
    return pipeline.scheduler.stats().steps


def test_guesses_that_are_not_worth_their_time_cost_no_step() -> None:
    """Each token takes as long as a step of none: placeholders follow as without speculation."""
    without = count_steps(async_pipeline(0.5, ridge_tokens=1))
    config = SpeculativeConfig(3)
    pipeline = async_pipeline(0.5, ridge_tokens=1, speculative_config=config)
    assert count_steps(pipeline) == without
    assert pipeline.scheduler.stats().draft_tokens == 0
    # Where tokens cost little, wrong guesses end soon, and right ones save steps.
    wrong = count_steps(async_pipeline(0.0, ridge_tokens=150, speculative_config=config))
    right = count_steps(async_pipeline(1.0, ridge_tokens=150, speculative_config=config))
    assert right < 0.7 * without < without <= wrong < 1.2 * without


@settings(max_examples=num_examples(6, 60), deadline=None, database=None)
@given(
    num_seqs=st.integers(4, 9), length=st.integers(1, 60), acceptance=st.sampled_from([0.0, 0.5])
)
def test_plans_without_guesses_are_those_without_speculation(
    num_seqs: int, length: int, acceptance: float
) -> None:
    """Row by row, where guesses are not worth their time."""
    all_plans = []
    for speculation in (None, SpeculativeConfig(3)):
        config = SchedulerConfig(ridge_tokens=1, speculative_config=speculation)
        drafter = GuessingDrafter(Random(1), acceptance, is_silent=False)
        pipeline = Pipeline(config.resolve(1, 400, 200), drafter=drafter)
        for seq in range(num_seqs):
            pipeline.add(SchedulerRequest(seq, [seq], length))
        plans: list[StepPlan | None] = []
        while len(pipeline.ended) < num_seqs:
            plans += iter(pipeline.schedule, None)
            pipeline.commit()
        all_plans.append(plans)
    assert all_plans[0] == all_plans[1]


def run_batch(pipeline: Pipeline, first_seq: int) -> tuple[int, int]:
    """Run eight sequences; return the steps and draft tokens of these."""
    before = pipeline.scheduler.stats()
    for seq in range(first_seq, first_seq + 8):
        pipeline.add(SchedulerRequest(seq, [seq % VOCABULARY], 100))
    while len(pipeline.ended) < first_seq + 8:
        while pipeline.schedule() is not None:
            pass
        pipeline.commit()
    stats = pipeline.scheduler.stats()
    return stats.steps - before.steps, stats.draft_tokens - before.draft_tokens


def test_an_engine_learns_from_guesses_that_no_step_computes() -> None:
    """Wrong ones end the windows, and right ones bring them back, over all sequences."""
    drafter = GuessingDrafter(Random(1), 0.0, is_silent=False)
    config = SchedulerConfig(speculative_config=SpeculativeConfig(3), ridge_tokens=32)
    pipeline = Pipeline(config.resolve(1, 400, 200), drafter=drafter)
    # The step time is that of the ridge: times of the pipeline vary at random.
    pipeline.scheduler.record_step_times = lambda stage, times: None  # type: ignore[method-assign]
    run_batch(pipeline, 0)
    num_steps, num_drafts = run_batch(pipeline, 8)
    assert num_drafts <= 8
    assert num_steps <= 103
    drafter._acceptance = 1.0
    run_batch(pipeline, 16)
    num_steps, num_drafts = run_batch(pipeline, 24)
    assert num_drafts > 300
    assert num_steps < 80
    check_outputs(pipeline)


@given(loads=st.lists(st.integers(1, 40), min_size=1, max_size=12), start=st.integers(0, 20))
def test_pauses_grow_until_guesses_are_used(loads: list[int], start: int) -> None:
    pause = GuessPause(start)
    assert [pause.is_over(0) for _ in range(start + 1)] == [False] * start + [True]
    length = FIRST_PAUSE
    for load in loads:
        pause.on_unused(load)
        assert [pause.is_over(load) for _ in range(length)] == [False] * length
        assert pause.is_over(load)
        pause.on_unused(load)
        # Where there are fewer rows, guesses cost less.
        assert pause.is_over(int(0.7 * load))
        length = min(LONGEST_PAUSE, 4 * length)
    pause.on_used()
    assert pause.is_over(1000)
    pause.on_unused(8)
    assert [pause.is_over(8) for _ in range(FIRST_PAUSE + 1)].index(True) == FIRST_PAUSE


@given(st.lists(st.integers(0, 1), max_size=6), st.lists(st.integers(0, 1), max_size=8))
def test_guesses_are_verified_up_to_the_first_wrong_one(guesses: list[int], text: list[int]):
    num_verified, num_right = verify_guesses(guesses, text)
    assert guesses[:num_right] == text[:num_right]
    assert num_right <= num_verified <= min(len(guesses), len(text))
    if num_verified > num_right:
        assert num_verified == num_right + 1
        assert guesses[num_right] != text[num_right]
    else:
        assert num_right == min(len(guesses), len(text))


def test_waits_follow_the_windows() -> None:
    """One per window at first, and few in a text that is guessed all the time."""
    waits = WaitEstimate(0.9)
    assert waits.waits_per_window(1.0) == pytest.approx(1)
    waits.on_wait()
    for _ in range(40):
        waits.on_window()
    assert waits.waits_per_window(1.0) < 0.4
    for _ in range(40):
        waits.on_wait()
        waits.on_wait()
        waits.on_window()
    assert waits.waits_per_window(1.0) > 1.4


@given(
    num_rows=st.integers(1, 64),
    acceptance=st.floats(0, 1),
    costs=st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 2)),
    absences=st.floats(0, 3),
    ridge=st.floats(1, 300),
)
def test_guesses_that_are_added_gain_more_than_they_cost(
    num_rows: int, acceptance: float, costs: tuple[float, ...], absences: float, ridge: float
) -> None:
    """Tokens per second rise with them, and none is added where a row less would pay them all."""
    curve = StepTimeCurve.from_ridge(ridge)
    guess_seconds, num_missed, idle_seconds = costs
    micro_batch = MicroBatchYield(curve, num_rows, 0, guess_seconds, num_missed, idle_seconds)
    count, gain = micro_batch.count_useful(5, acceptance, num_absences=absences)
    assert 0 <= count <= 5
    assert gain == pytest.approx(sum(acceptance**n for n in range(1, count + 1)))
    missed = absences * num_missed
    if count:
        seconds = curve.seconds(max(0, num_rows + count - missed)) + count * guess_seconds
        seconds += absences * idle_seconds
        assert (num_rows + gain - missed) / seconds > num_rows / curve.seconds(num_rows)
    dearer = MicroBatchYield(curve, num_rows, 0, guess_seconds, num_missed, idle_seconds + 1)
    assert dearer.count_useful(5, acceptance, num_absences=absences)[0] <= max(
        count, 5 * (not absences)
    )
    assert micro_batch.add(5, acceptance, num_absences=absences) == count


def test_a_missed_row_reads_no_context() -> None:
    """Windows pay where reading the context takes most of the time of a row."""
    curve = StepTimeCurve(1.0, 0.5, 0.0, context_token=0.05)
    sizes = 8, 0, 0.0, 1.0
    assert MicroBatchYield(curve, *sizes, 0.0, 10.0).add(5, 0.4) == 0
    assert MicroBatchYield(curve, *sizes, 0.0, 8000.0).add(5, 0.4) > 0


def test_the_curve_is_that_of_steps_without_windows() -> None:
    """Unless there are no others."""

    def work(num_tokens: int, num_windows: int) -> StageWork:
        chunks = ((10, num_tokens),) if num_windows else ()
        num_decodes = 0 if num_windows else num_tokens
        return StageWork(1, num_tokens, chunks, num_decodes, 10, 1, num_windows=num_windows)

    fits = [OnlineStepCurveFit(150), OnlineStepCurveFit(150)]
    for index in range(4 * REFIT_INTERVAL_STEPS):
        for fit in fits:
            fit.observe_step(work(1 + index % 16, 0), 0.01 + 0.001 * (index % 16))
        if index >= REFIT_INTERVAL_STEPS:
            fits[1].observe_step(work(6, 1), 0.1)
    assert fits[0].curve == fits[1].curve
    for _ in range(MAX_WINDOW_STEPS + 20 * REFIT_INTERVAL_STEPS):
        fits[1].observe_step(work(6, 1), 0.1)
    pairs = work(6, 1).num_query_key_pairs
    assert fits[1].curve.seconds(6, pairs) > 2 * fits[0].curve.seconds(6, pairs)
    assert fits[0].curve.scaled(3.0).seconds(7, 2, 9) == pytest.approx(
        3 * fits[0].curve.seconds(7, 2, 9)
    )


@pytest.mark.parametrize("stages", [1, 3])
def test_the_end_of_a_sequence_has_its_guesses(stages: int) -> None:
    config = SchedulerConfig(speculative_config=SpeculativeConfig(3)).resolve(stages, 400, 200)
    pipeline = Pipeline(config, drafter=GuessingDrafter(Random(1), 0.8, is_silent=False))
    for seq in range(4):
        pipeline.add(SchedulerRequest(seq, [seq], 60))
    outputs = []
    while len(pipeline.ended) < 4:
        while pipeline.schedule() is not None:
            pass
        outputs.append(pipeline.commit())
    ends = [end for output in outputs for end in output.finished]
    assert len(ends) == 4
    assert all(end.num_accepted_guesses > 0 for end in ends)
    stats = pipeline.scheduler.stats()
    assert sum(end.num_accepted_guesses for end in ends) == stats.accepted_tokens
    # Windows that are void when a sequence ends are in the statistics alone.
    num_unused = stats.draft_tokens - stats.accepted_tokens
    assert 0 < sum(end.num_rejected_guesses for end in ends) <= num_unused


def test_async_scheduling_has_no_guess_behind_another() -> None:
    """A sequence waits for its window; one without a window in flight has a known token."""
    pipeline = async_pipeline(0.8, speculative_config=SpeculativeConfig(3))
    while len(pipeline.ended) < 8:
        while pipeline.schedule() is not None:
            rows = [row for plan in pipeline.plans for row in plan.rows]
            windows = [row for row in rows if row.num_draft_tokens]
            assert all(row.num_draft_tokens < row.num_tokens for row in windows)
            seqs = [row.seq for row in rows]
            assert all(seqs.count(row.seq) == 1 for row in windows)
        pipeline.commit()
    assert pipeline.scheduler.stats().draft_tokens > 0


def test_a_sequence_alone_waits_for_the_token_before_its_window() -> None:
    config = SchedulerConfig(speculative_config=SpeculativeConfig(3)).resolve(1, 64, 200)
    pipeline = Pipeline(config, drafter=GuessingDrafter(Random(1), 1.0, is_silent=False))
    pipeline.add(SchedulerRequest(0, [1, 2, 3], 40))
    pipeline.schedule()
    assert pipeline.schedule() is None
    pipeline.commit()
    plan = pipeline.schedule()
    assert plan is not None
    assert [(row.num_tokens, row.num_draft_tokens) for row in plan.rows] == [(4, 3)]


def test_guesses_are_added_while_the_text_grows_faster() -> None:
    """On a device of 150 tokens per doubled step time, and on one whose time is all arithmetic."""
    flat, steep = StepTimeCurve.from_ridge(150), StepTimeCurve(0.0, 0.0, 1.0)
    assert MicroBatchYield(flat, 1, 0).add(5, 0.5) == 5
    assert MicroBatchYield(flat, 200, 0).add(5, 0.5) == 0
    assert 0 < MicroBatchYield(flat, 40, 0).add(64, 0.7) < 10
    assert MicroBatchYield(flat, 1, 400).add(5, 0.7) == 0
    assert MicroBatchYield(steep, 1, 0).add(5, 0.9) == 0
    # Guesses that continue others count by the chance of those; alone they cost no text.
    assert MicroBatchYield(flat, 40, 0).add(5, 0.7, chance=0.05) == 0
    assert MicroBatchYield(steep, 0, 0).add(5, 0.1, chance=0.1) == 1
    assert MicroBatchYield(flat, 0, 0).add(5, 0.5, chance=0.1) == 5
    # A sequence that misses a row has to gain more than that.
    assert MicroBatchYield(flat, 8, 0).add(5, 0.4) == 5
    assert MicroBatchYield(flat, 8, 0, num_missed=1.0).add(5, 0.4) == 0
    assert MicroBatchYield(flat, 8, 0, num_missed=1.0).add(5, 0.8) == 5


def window_work(num_guesses: int) -> StageWork:
    """A decode and a window with some guesses."""
    windows = ((10, num_guesses + 1),) if num_guesses else ()
    num_decodes = 1 if num_guesses else 2
    num_tokens = num_decodes + (num_guesses + 1 if num_guesses else 0)
    return StageWork(1, num_tokens, windows, num_decodes, 20, 2, num_windows=len(windows))


def test_guesses_that_cost_more_than_prefill_are_fewer() -> None:
    """Each takes half of a step longer: the LM head, sampling, the context."""
    curve, cost = StepTimeCurve.from_ridge(150), GuessCost()
    for _ in range(100):
        work = window_work(4)
        cost.observe_step(work, curve.seconds(work.num_tokens) + 4 * 0.5, curve)
    assert cost.seconds == pytest.approx(0.5, rel=0.05)
    assert MicroBatchYield(curve, 1, 0).add(5, 0.9) == 5
    assert MicroBatchYield(curve, 1, 0, cost.seconds).add(5, 0.9) == 3
    assert MicroBatchYield(curve, 8, 0, cost.seconds).add(5, 0.9) == 0


def test_the_cost_of_guesses_is_forgotten_without_windows() -> None:
    curve, cost = StepTimeCurve.from_ridge(150), GuessCost()
    assert cost.seconds == 0
    cost.observe_step(window_work(4), 100.0, curve)
    # A step that something else delays counts as three times the predicted one.
    assert 0 < cost.seconds < 3 / 4
    for _ in range(5000):
        cost.observe_step(window_work(0), 1.0, curve)
    assert cost.seconds < 1e-3


def test_acceptance_follows_the_verified_guesses() -> None:
    estimate = AcceptanceEstimate(0.9)
    assert estimate.share(0.7) == pytest.approx(0.7)
    for _ in range(40):
        estimate.on_verified(4, 0)
    assert estimate.share(0.7) < 0.25
    for _ in range(40):
        estimate.on_verified(4, 4)
    assert estimate.share(0.7) > 0.95
    estimate.forget(0.0)
    assert estimate.share(0.7) == pytest.approx(0.7)


def test_sequences_without_right_guesses_get_few() -> None:
    """Beside others under load."""
    config = SchedulerConfig(speculative_config=SpeculativeConfig(3), ridge_tokens=32)
    shares = []
    for acceptance in (0.0, 0.9):
        drafter = GuessingDrafter(Random(1), acceptance, is_silent=False)
        pipeline = Pipeline(config.resolve(1, 400, 200), drafter=drafter)
        for seq in range(8):
            pipeline.add(SchedulerRequest(seq, [seq], 100))
        pipeline.drain()
        check_outputs(pipeline)
        stats = pipeline.scheduler.stats()
        shares.append(stats.draft_tokens / 800)
        assert sum(stats.accepted_per_position) == stats.accepted_tokens <= stats.draft_tokens
    assert shares[0] < 0.4
    assert shares[1] > 1.5 * shares[0], shares


def scheduler(stages: int = 2, num_blocks: int = 64, **options) -> Scheduler:
    config = SchedulerConfig(
        speculative_config=SpeculativeConfig(3, prompt_lookup_max=2, prompt_lookup_min=1),
        **options,
    )
    return Scheduler(config.resolve(stages, num_blocks, 200))


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return plan


def answer(scheduler: Scheduler, plan: StepPlan, *tokens: int):
    """The plan's result, where only one sequence samples."""
    result = SampledToken(0, 0, tokens[0], "", tokens[1:])
    return scheduler.commit(StepResult(plan.step, [result]))


def test_a_window_has_the_known_token_and_the_guesses_behind_it() -> None:
    made = scheduler()
    made.add(SchedulerRequest(0, [1, 2, 3, 4, 5, 1, 2], 10), 0.0)
    answer(made, plan_of(made), 3)
    (row,) = plan_of(made).rows
    assert (row.start, row.num_tokens, row.token_ids) == (7, 4, [3, 4, 5, 1])
    assert (row.num_draft_tokens, row.num_samples, row.first_sampled_position) == (3, 4, 8)


@pytest.mark.parametrize(
    ("sampled", "start", "known"), [((9,), 8, 9), ((4, 9), 9, 9), ((4, 5, 1, 9), 11, 9)]
)
def test_the_row_after_a_window_begins_at_the_first_wrong_guess(sampled, start, known) -> None:
    made = scheduler()
    made.add(SchedulerRequest(0, [1, 2, 3, 4, 5, 1, 2], 10), 0.0)
    answer(made, plan_of(made), 3)
    assert answer(made, plan_of(made), *sampled).token_ids == [*sampled]
    (row,) = plan_of(made).rows
    assert (row.start, row.token_ids[0]) == (start, known)


def test_a_text_ends_within_a_window() -> None:
    made = scheduler()
    made.add(SchedulerRequest(0, [1, 2, 3, 4, 5, 1, 2], 10, frozenset({4})), 0.0)
    answer(made, plan_of(made), 3)
    outcome = answer(made, plan_of(made), 4, 5)
    assert (outcome.token_ids, outcome.finished[0].finish_reason) == ([4], "stop")
    assert made.stats().kv_usage == 0


def test_the_last_token_of_the_output_is_not_guessed() -> None:
    made = scheduler()
    made.add(SchedulerRequest(0, [1, 2, 3, 4, 5, 1, 2], 3), 0.0)
    answer(made, plan_of(made), 3)
    (row,) = plan_of(made).rows
    assert row.token_ids == [3, 4]
    assert (
        made.commit(StepResult(1, [SampledToken(0, 0, 4, "", (5,))])).finished[0].finish_reason
        == "length"
    )


def test_guesses_take_no_blocks_that_prefill_leaves_to_decodes() -> None:
    made = scheduler(num_blocks=13, block_size=16, kv_threshold=0.9)
    made.add(SchedulerRequest(0, [1, 2] * 7, 20), 0.0)
    answer(made, plan_of(made), 1)
    # Position 14 is that of the known token, 15 the last one of the block.
    assert plan_of(made).rows[0].token_ids == [1, 2]


def draft(tokens: list[int], guesses: tuple[int, ...] = (), **options) -> list[int]:
    return NgramDrafter(SpeculativeConfig(4, **options)).draft(array("i", tokens), guesses, 4)


@pytest.mark.parametrize(
    ("tokens", "guesses", "expected"),
    [
        ([1, 2, 3], (), []),
        ([1, 2, 3, 4, 1, 2], (), [3, 4, 1, 2]),
        ([7, 7], (), [7, 7, 7, 7]),
        ([7, 8, 7, 8, 7], (), [8, 7, 8, 7]),
        # The longest match counts before the latest one.
        ([5, 1, 2, 30, 31, 6, 2, 40, 41, 5, 1, 2], (), [30, 31, 6, 2]),
        # The latest one of equal length.
        ([1, 2, 30, 1, 2, 40, 1, 2], (), [40, 1, 2, 40]),
        ([1, 2, 3, 4, 5, 1], (2, 3), [4, 5, 1, 2]),
        ([1, 2, 3], (9,), []),
        ([1, 2, 3], (1,), [2, 3, 1, 2]),
    ],
)
def test_ngrams(tokens: list[int], guesses: tuple[int, ...], expected: list[int]) -> None:
    assert draft(tokens, guesses, prompt_lookup_max=3, prompt_lookup_min=1) == expected


def test_an_ngram_shorter_than_the_smallest_length_is_no_match() -> None:
    tokens = [1, 2, 3, 9, 2, 3]
    assert draft(tokens, prompt_lookup_max=3, prompt_lookup_min=3) == []
    assert draft(tokens, prompt_lookup_max=3, prompt_lookup_min=2) == [9, 2, 3, 9]


@settings(max_examples=num_examples(40, 400), deadline=None, database=None)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 3), st.integers(0, 3))
def test_an_index_that_grows_finds_what_a_new_one_finds(tokens, shortest, further) -> None:
    lengths = {"prompt_lookup_min": shortest, "prompt_lookup_max": shortest + further}
    growing = NgramDrafter(SpeculativeConfig(4, **lengths))
    for end in range(1, len(tokens) + 1):
        text = array("i", tokens[:end])
        assert growing.draft(text, (), 4) == draft(tokens[:end], **lengths)


def test_the_configuration_has_vllm_s_names() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    config = SpeculativeConfig(5, "ngram", 4, 4)
    assert parse_speculative_config(text) == config
    assert parse_speculative_config("{}") == SpeculativeConfig(5, "ngram", 5, 5)
    values = make_parser().parse_args(["--speculative-config", text])
    assert values.speculative_config == config
    fields = {"num_speculative_tokens": 5, "prompt_lookup_max": 4}
    assert EngineConfig.from_options("demo", speculative_config=fields).scheduler == (
        SchedulerConfig(speculative_config=config)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('{"method": "eagle"}', "method is 'eagle', but has to be one of ngram"),
        ('{"num_speculative_tokens": 0}', "num_speculative_tokens is 0"),
        ('{"num_speculative_tokens": 5.0}', "num_speculative_tokens is 5.0"),
        ('{"prompt_lookup_min": 4, "prompt_lookup_max": 3}', "prompt_lookup_min is 4, above"),
        ('{"draft_tensor_parallel_size": 1}', "no field 'draft_tensor_parallel_size'"),
        ('{"method": "draft_model"}', "method draft_model needs the field model"),
        ('{"method": "mtp", "model": "a"}', "method is mtp: leave model out"),
    ],
)
def test_what_cannot_be_used_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_speculative_config(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "emulated:L20"}, "method mtp drafts with weights, which an emulated device"),
        ({"device": "cuda"}, "method mtp drafts with weights, which GPUs do not compute"),
        ({"kv_transfer": "auto"}, "which kv_transfer does not move"),
        ({"kv_cache_disk": "/tmp/kv:1GiB", "device": "cpu"}, "which kv_cache_disk does not move"),
    ],
)
def test_drafts_with_weights_are_refused_where_they_cannot_be(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(FieldError, match=message):
        EngineConfig.from_options("demo", speculative_config={"method": "mtp"}, **options)


def test_recurrent_states_are_refused() -> None:
    config = SchedulerConfig(speculative_config=SpeculativeConfig())
    with pytest.raises(ValueError, match="speculative_config"):
        config.resolve(1, 64, 100, num_state_slots=8)
