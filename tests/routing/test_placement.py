"""Constraints of Aladdin's placement, its online best fit, and re-balancing."""

from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.options.slo import Slo
from gllm.routing.ongoing import OngoingRequests
from gllm.routing.placement import (
    LatencyModel,
    PlacedRequest,
    PlacementRules,
    PlacementWorker,
    admits,
    peak_kv_tokens,
)
from gllm.routing.policies.aladdin import AladdinPolicy
from gllm.routing.policy_registry import make_policy
from gllm.routing.rebalancing import (
    PredictionError,
    PredictionErrors,
    line_distance,
    rebalance,
    saved_seconds,
    subtract_mean,
)
from gllm.routing.state import EngineSnapshot, OngoingRequest, RoutingRequest
from gllm.scheduler.output_lengths import FixedEstimate, PromptLengthPredictor
from gllm.scheduler.step_cost import StepCostCoefficients
from gllm.sim.workloads.traces import TRACES, load_trace
from tests.support.examples import num_examples
from tests.support.routing.best_fit import capacity_norm, place_best_fit
from tests.support.routing.snapshots import REQUEST, engine

MODEL = LatencyModel(k1=0.3635e-3, c1=4e-3, k2=9.62e-8, c2=0.173e-3, c3=55.8e-3)
"""Llama-2-70B at TP 2 on A100, as planning by Vidur's tables fits it."""
SLO = Slo(1.6, 0.075)
RULES = PlacementRules(SLO, theta=0.8)


def placed(prompt: int, expected: float = 200, output: int = 0, seconds: float = 0.0):
    return PlacedRequest(prompt, expected, output, seconds)


def worker(*requests: PlacedRequest, name: str = "a", kv: float = 60000, seqs: int = 128):
    return PlacementWorker(name, MODEL, requests, kv, seqs)


def held_by_step(batch: list[PlacedRequest]) -> list[int]:
    """KV tokens of a batch in each future step, counted request by request."""
    left = [int(each.num_expected_tokens) - each.num_output_tokens for each in batch]
    return [
        sum(
            each.num_prompt_tokens + each.num_output_tokens + step
            for each, remaining in zip(batch, left, strict=True)
            if remaining >= step
        )
        for step in range(1, max(left) + 1)
    ]


def test_check_of_the_kv_cache_agrees_with_each_future_step() -> None:
    rng = Random(0)
    only_e = PlacementRules(constraints=frozenset("e"))
    verdicts = []
    for _ in range(500):
        batch = []
        for _ in range(rng.randint(1, 12)):
            output = rng.choice((0, rng.randint(1, 80)))
            expected = output + rng.randint(1, 120)
            batch.append(placed(rng.randint(1, 200), expected, output, 0.1))
        peak = max(held_by_step(batch))
        # Close to the peak, where one token decides.
        memory = peak + rng.choice((-1, 0, rng.randint(-peak // 4, peak // 4)))
        is_admitted = admits(worker(*batch[1:], kv=memory), batch[0], only_e)
        assert is_admitted == all(held <= memory for held in held_by_step(batch))
        assert peak_kv_tokens(batch) == peak
        verdicts.append(is_admitted)
    assert 150 < sum(verdicts) < 350


def test_each_constraint_refuses_by_itself() -> None:
    slow = placed(1000, 300, output=10, seconds=0.74)
    cases = {
        "b": ([placed(158_000, 100, 99, 0.1)], placed(100), 1e9),
        "c": ([placed(3000)], placed(3000), 1e9),
        "d": ([slow], placed(500), 1e9),
        "e": ([placed(1000, 1000, 999, 0.1)], placed(1000, 500), 2400),
    }
    for name, (ongoing, request, kv) in cases.items():
        loaded = worker(*ongoing, kv=kv)
        only = PlacementRules(SLO, 0.8, constraints=frozenset(name))
        others = PlacementRules(SLO, 0.8, constraints=frozenset("bcde") - {name})
        assert not admits(loaded, request, only), name
        assert admits(loaded, request, others), name
        assert admits(worker(kv=kv), request, only), name


def test_a_full_batch_admits_none() -> None:
    assert admits(worker(seqs=1), placed(10), RULES)
    assert not admits(worker(placed(10), seqs=1), placed(10), RULES)


def test_slack_is_saved_up_by_fast_tokens() -> None:
    # 84 ms of prefill need 105 ms of slack: 10 tokens save 75 ms each, less what they took.
    prompt = placed(220)
    assert not admits(worker(placed(100, 300, 10, 0.70)), prompt, RULES)
    assert admits(worker(placed(100, 300, 10, 0.60)), prompt, RULES)


def test_best_fit_fills_the_fullest_that_admits() -> None:
    full = worker(placed(40_000, 100, 50, 0.1), name="full", kv=41_000)
    half = worker(placed(20_000, 100, 50, 0.1), name="half")
    empty = worker(name="empty")
    assert place_best_fit([empty, half, full], placed(100, 100), RULES) == full
    assert place_best_fit([empty, half, full], placed(2000, 100), RULES) == half
    assert place_best_fit([full], placed(2000, 100), RULES) is None
    assert (
        capacity_norm(empty, RULES) == 0 < capacity_norm(half, RULES) < capacity_norm(full, RULES)
    )


@pytest.mark.parametrize(("field", "value"), [("theta", 0.0), ("theta", 1.1), ("gamma", -1.0)])
def test_rules_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        PlacementRules(**{field: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none of b, c, d and e"):
        PlacementRules(constraints=frozenset("x"))


COSTS = StepCostCoefficients(0.01, 1e-4, 0.0, 1e-4, 1e-7)


def snapshot(name: str, *ongoing: OngoingRequest, weight: float = 1.0) -> EngineSnapshot:
    return engine(name, weight, coefficients=COSTS, ongoing=ongoing)


def test_policy_packs_engines_and_falls_back_to_the_least_load() -> None:
    policy = make_policy("aladdin", Random(0))
    request = RoutingRequest(100, slo=Slo(1.0, 0.05))
    # Their first tokens came 0.5 and 2.6 s ago.
    slo = Slo(1.0, 0.05)
    fast, slow = (OngoingRequest(100, 50, since, slo=slo) for since in (-0.5, -2.6))
    assert policy.choose(request, [snapshot("a"), snapshot("b", fast)]) == "b"
    # Its request is late already: a prefill there would make it later.
    assert policy.choose(request, [snapshot("a"), snapshot("b", slow)]) == "a"
    # Also where the new request has no limits, but not where the late one has none.
    assert policy.choose(REQUEST, [snapshot("a"), snapshot("b", slow)]) == "a"
    free = OngoingRequest(100, 50, -2.6)
    assert policy.choose(request, [snapshot("a"), snapshot("b", free)]) == "b"
    both = [snapshot("a", slow, slow), snapshot("b", slow)]
    assert policy.choose(request, both) == "b"
    # The KV cache of 4,096 tokens binds without an SLO too.
    full = snapshot("b", OngoingRequest(3900, 10, -0.1))
    assert policy.choose(REQUEST, [snapshot("a"), full]) == "a"
    light = snapshot("b", fast, weight=0.01)
    assert policy.choose(REQUEST, [snapshot("a"), light]) == "a"


def test_policy_chooses_before_any_engine_has_a_cost_model() -> None:
    policy = make_policy("aladdin", Random(0))
    engines = [engine(name, coefficients=None) for name in "ab"]
    assert policy.choose(RoutingRequest(100, slo=SLO), engines) in ("a", "b")


def test_ongoing_requests_follow_their_tokens() -> None:
    ongoing = OngoingRequests()
    ongoing.on_sent(1, 10)
    ongoing.on_sent(2, 20)
    ongoing.on_tokens([1, 7], now=5.0)
    ongoing.on_tokens([1], now=6.0)
    assert ongoing.list() == [OngoingRequest(10, 2, 5.0), OngoingRequest(20)]
    ongoing.on_ended([1, 7])
    assert len(ongoing) == 1


@pytest.mark.parametrize(
    "workload", ["azure-conv", pytest.param("sharegpt", marks=pytest.mark.full)]
)
def test_predicted_outputs_are_unbiased(workload: str) -> None:
    lengths = load_trace(TRACES[workload]).lengths
    half = len(lengths) // 2
    predictor = PromptLengthPredictor()
    for pair in lengths[:half]:
        predictor.record(*pair)
    predicted, actual = 0.0, 0
    for prompt, output in lengths[half:]:
        predicted += predictor.predict(prompt)
        actual += output
        predictor.record(prompt, output)
    assert predicted / actual == pytest.approx(1, abs=0.05)


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 5000), st.integers(0, 300))
def test_new_prediction_exceeds_the_tokens_so_far(outputs, prompt, generated) -> None:
    predictor = PromptLengthPredictor()
    for output in outputs:
        predictor.record(prompt, output)
    assert predictor.predict(prompt, generated) > generated
    longer = [each for each in outputs if each > generated]
    if outputs and longer and generated >= fmean(outputs):
        assert predictor.predict(prompt, generated) == pytest.approx(fmean(longer))


def test_predictions_depend_on_the_prompt() -> None:
    predictor = PromptLengthPredictor(prior=77)
    assert predictor.predict(100) == 77
    for _ in range(20):
        predictor.record(100, 10)
        predictor.record(1000, 200)
    assert predictor.predict(100) == 10
    assert predictor.predict(1000) == 200
    assert predictor.predict(5000) == 105


@settings(max_examples=num_examples(60, 500))
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(10, 900), st.booleans()), max_size=5),
            st.floats(-2000, 2000),
            st.integers(-4, 4),
        ),
        min_size=2,
        max_size=5,
    )
)
def test_rebalancing_lowers_distances_and_moves_unstarted_requests_only(rows) -> None:
    workers = [
        worker(
            *(placed(p, 100 + p, output=20 * begun, seconds=0.1 * begun) for p, begun in parts),
            name=str(index),
        )
        for index, (parts, _, _) in enumerate(rows)
    ]
    errors = {str(i): PredictionError(tokens, count) for i, (_, tokens, count) in enumerate(rows)}
    before = sum(line_distance(errors[each.name], MODEL) for each in workers)
    for request, source, target in rebalance(workers, errors, RULES):
        assert request.is_new
        assert source != target
        errors[source] = errors[source].moved(request, -1)
        errors[target] = errors[target].moved(request, 1)
        after = sum(line_distance(errors[each.name], MODEL) for each in workers)
        assert after < before
        before = after


def test_rebalancing_moves_from_the_largest_error_to_the_smallest() -> None:
    early = PredictionError().with_early_end(50, 400)
    late = PredictionError().with_underestimate(400)
    assert tuple(early) == (-350, -1)
    assert tuple(late) == (400, 1)
    loaded = [worker(placed(100, 300), name="late"), worker(name="exact"), worker(name="early")]
    moves = rebalance(loaded, {"late": late, "early": early}, RULES)
    assert [(each.source, each.target) for each in moves] == [("late", "early")]
    # One whose prompt is being computed stays.
    loaded[0] = worker(PlacedRequest(100, 300, is_begun=True), name="late")
    assert not rebalance(loaded, {"late": late, "early": early}, RULES)


@settings(max_examples=num_examples(60, 500))
@given(
    st.lists(
        st.lists(st.tuples(st.integers(10, 900), st.integers(1, 300)), max_size=5),
        min_size=2, max_size=4,
    ),
    st.lists(st.tuples(st.floats(-2000, 2000), st.integers(-4, 4)), min_size=4, max_size=4),
    st.floats(0, 0.5),
)  # fmt: skip
def test_running_requests_move_only_where_more_time_is_saved_than_lost(rows, errors, cost) -> None:
    workers = [
        worker(*(placed(p, output + 100, output) for p, output in parts), name=str(index))
        for index, parts in enumerate(rows)
    ]
    state = {each.name: each for each in workers}
    known = {str(index): PredictionError(*error) for index, error in enumerate(errors)}
    moves = rebalance(workers, known, RULES, lambda *move: saved_seconds(*move) > cost)

    def step_seconds(each: PlacementWorker) -> float:
        """Return the time of a step, summed over the requests that wait for it."""
        context = sum(one.num_prompt_tokens + one.num_output_tokens for one in each.requests)
        return len(each.requests) * MODEL.decode_seconds(len(each.requests), context)

    for request, source, target in moves:
        before = step_seconds(state[source]) + step_seconds(state[target])
        remaining = list(state[source].requests)
        remaining.remove(request)
        state[source] = state[source]._replace(requests=remaining)
        state[target] = state[target]._replace(requests=[*state[target].requests, request])
        saved = before - step_seconds(state[source]) - step_seconds(state[target])
        assert saved * 100 > cost * 0.999


def test_a_running_request_needs_no_time_for_its_prompt_at_another_engine() -> None:
    late = PlacementRules(Slo(1e-3, 10.0))
    assert not admits(worker(), placed(1000), late)
    assert admits(worker(), placed(1000, 300, 20), late)
    assert not admits(worker(kv=1200), placed(1000, 300, 20), late)


class Progress:
    """Engines and tokens of requests, and their prediction errors, also counted by hand."""

    def __init__(self) -> None:
        self.errors: PredictionErrors[int] = PredictionErrors()
        self.engine: dict[int, str] = {}
        self.num_tokens: dict[int, int] = {}
        self.by_hand: dict[str, tuple[float, float]] = {}

    def add(self, engine: str, num_tokens: float, num_requests: float) -> None:
        tokens, requests = self.by_hand.get(engine, (0.0, 0.0))
        self.by_hand[engine] = tokens + num_tokens, requests + num_requests


@settings(max_examples=num_examples(60, 500))
@given(st.data())
def test_errors_are_those_of_late_and_early_requests_wherever_they_are(data) -> None:
    """The error of an engine follows from each request's prediction, end and last engine."""
    predicted, rig = 10, Progress()
    estimate = FixedEstimate(predicted)
    for key in range(data.draw(st.integers(1, 8))):
        engine = data.draw(st.sampled_from("ab"))
        rig.errors.on_placed(key, estimate.expected())
        num_tokens, latest = 0, float(predicted)
        is_late = False
        for _ in range(data.draw(st.integers(0, 4))):
            num_tokens += data.draw(st.integers(0, 12))
            rig.errors.on_progress(key, engine, num_tokens, estimate)
            if num_tokens + 1 > latest:
                is_late, latest = True, estimate.expected(num_tokens)
            if data.draw(st.booleans()):
                other = "b" if engine == "a" else "a"
                request = placed(5, latest, num_tokens)
                rig.errors.on_moved(key, request, engine, other)
                if not is_late:
                    rig.add(engine, -latest, -1)
                    rig.add(other, latest, 1)
                engine = other
        assert rig.errors.expected(key) == latest
        is_ended = data.draw(st.booleans())
        if is_ended:
            rig.errors.on_finished(key, engine, num_tokens)
        if is_late:
            rig.add(engine, latest, 1)
        elif is_ended and num_tokens < predicted:
            rig.add(engine, num_tokens - predicted, -1)
    found = rig.errors.by_worker()
    for engine in "ab":
        expected = rig.by_hand.get(engine, (0.0, 0.0))
        assert tuple(found.get(engine, PredictionError())) == pytest.approx(expected)


def test_old_errors_fade_and_those_of_running_requests_stay() -> None:
    errors: PredictionErrors[str] = PredictionErrors()
    for key in ("early", "late"):
        errors.on_placed(key, 10)
    errors.on_finished("early", "a", 4)
    errors.on_progress("late", "b", 10, FixedEstimate(10))
    assert errors.by_worker() == {"a": (-6, -1), "b": (20, 1)}
    errors.fade(0.5, ["a", "b"])
    assert errors.by_worker() == {"a": (-3, -0.5), "b": (20, 1)}
    errors.fade(1.0, ["b"])
    assert errors.by_worker() == {"b": (20, 1)}
    assert subtract_mean(errors.by_worker(), ["a", "b"]) == {"a": (-10, -0.5), "b": (10, 0.5)}


def test_policy_packs_by_its_own_model() -> None:
    policy = AladdinPolicy(Random(0), PlacementRules(theta=0.5), MODEL)
    short = FixedEstimate(20)
    engines = [snapshot("a"), snapshot("b", OngoingRequest(100, 10, -0.2, short))]
    request = RoutingRequest(100, slo=SLO, length_estimate=short)
    assert policy.choose(request, engines) == "b"
