"""Aladdin's policy: its choices are those of the constraints as they are stated, at less work."""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement import MODEL, LoadedFleet
from gllm.options.slo import NO_SLO, Slo
from gllm.routing.placement import (
    PlacedRequest,
    PlacementRules,
    PlacementWorker,
    admits,
    admits_kv_cache,
)
from gllm.routing.policies.aladdin import AladdinPolicy
from gllm.routing.rounds import PlacementRounds
from gllm.routing.state import EngineSnapshot, OngoingRequest, RoutingRequest
from gllm.scheduler.output_lengths import (
    MIN_BUCKET_REQUESTS,
    FixedEstimate,
    LengthQuery,
    OutputHistory,
    PromptLengthPredictor,
)
from gllm.sim.workloads.requests import make_workload
from tests.support.examples import num_examples
from tests.support.routing.best_fit import capacity_norm, place_heartbeat
from tests.support.work import count_calls


def as_workers(
    lengths: PromptLengthPredictor, engines: list[EngineSnapshot]
) -> list[PlacementWorker]:
    """Engines with all their requests, as `placement` states the constraints of them."""
    predict = lengths.predict
    return [
        PlacementWorker(
            engine.name,
            MODEL,
            [
                PlacedRequest(
                    each.num_prompt_tokens,
                    predict(each.num_prompt_tokens, each.num_output_tokens),
                    each.num_output_tokens,
                    engine.time - each.first_token_time,
                    slo=each.slo,
                )
                for each in engine.ongoing
            ],
            engine.num_kv_tokens * engine.weight,
            max(1, int(engine.max_num_seqs * engine.weight)),
        )
        for engine in engines
    ]


def stated_choice(
    lengths: PromptLengthPredictor,
    rng: Random,
    request: RoutingRequest,
    engines: list[EngineSnapshot],
) -> str:
    """The choice by all constraints of every engine, from its requests."""
    rules, workers = PlacementRules(), as_workers(lengths, engines)
    length = request.num_prompt_tokens
    placed = PlacedRequest(length, lengths.predict(length), slo=request.slo)
    rng.shuffle(workers)
    workers.sort(key=lambda each: capacity_norm(each, rules, placed), reverse=True)
    return next((each for each in workers if admits(each, placed, rules)), workers[-1]).name


MIXED = (Slo(1.6, 0.075), Slo(None, 0.065), Slo(0.9), None, NO_SLO)
"""Limits of requests that share engines."""


@pytest.mark.parametrize("slos", [MIXED[:1], MIXED[1:2], [None], MIXED])
def test_choices_are_those_of_the_stated_constraints(slos: Sequence[Slo | None]) -> None:
    rng, ties = Random(5), Random(0)
    policy = AladdinPolicy(Random(0), PlacementRules(), MODEL)
    lengths, chosen = PromptLengthPredictor(), Counter[str]()

    def make_ongoing() -> OngoingRequest:
        num_tokens = rng.randint(1, 1500)
        return OngoingRequest(
            num_tokens, rng.choice((0, rng.randint(1, 900))), rng.uniform(60, 99),
            lengths.estimate(LengthQuery(num_tokens)), rng.choice(slos),
        )  # fmt: skip

    for job in make_workload("sharegpt-like", 150, 4.0, seed=3):
        lengths.record(job.num_prompt_tokens, job.num_output_tokens)
        engines = [
            EngineSnapshot(
                str(index),
                ongoing=[make_ongoing() for _ in range(rng.randint(0, 12))],
                time=100.0,
                num_blocks=rng.choice((200, 3750)),
                max_num_seqs=10,
                weight=rng.choice((0.5, 1.0)),
            )
            for index in range(rng.randint(1, 8))
        ]  # fmt: skip
        estimate = lengths.estimate(LengthQuery(job.num_prompt_tokens))
        request = RoutingRequest(
            job.num_prompt_tokens, slo=rng.choice(slos), length_estimate=estimate
        )
        name = policy.choose(request, engines)
        assert name == stated_choice(lengths, ties, request, engines)
        chosen[name] += 1
    assert len(chosen) >= 6


def test_requests_one_by_one_get_the_engines_of_a_heartbeat() -> None:
    rng, slo, chosen = Random(6), Slo(1.6, 0.075), Counter[str]()
    policy = AladdinPolicy(Random(0), PlacementRules(), MODEL)
    predictor = PromptLengthPredictor()

    def make_ongoing(num_tokens: int, num_generated: int, time: float) -> OngoingRequest:
        estimate = predictor.estimate(LengthQuery(num_tokens))
        return OngoingRequest(num_tokens, num_generated, time, estimate, slo)

    def open_worker(number: int) -> PlacementWorker:
        raise AssertionError("no engine admits a request")

    for job in make_workload("sharegpt-like", 60, 4.0, seed=3):
        predictor.record(job.num_prompt_tokens, job.num_output_tokens)
    for _ in range(20):
        ongoing = {
            str(index): [
                make_ongoing(rng.randint(1, 1500), rng.randint(50, 300), rng.uniform(85, 99))
                # The first one is empty, and admits what the others do not.
                for _ in range(rng.randint(1, 6) if index else 0)
            ]
            for index in range(8)
        }
        engines = [
            EngineSnapshot(name, ongoing=requests, time=100.0, num_blocks=3750, max_num_seqs=10)
            for name, requests in ongoing.items()
        ]
        loaded = as_workers(predictor, engines)
        lengths = sorted((rng.randint(50, 700) for _ in range(6)), reverse=True)
        requests = [PlacedRequest(length, predictor.predict(length), slo=slo) for length in lengths]
        placed = place_heartbeat(loaded, reversed(requests), PlacementRules(), open_worker)
        rounds = PlacementRounds(heartbeat_seconds=0.5)
        rng.shuffle(lengths)
        for length in sorted(lengths, key=lambda each: rounds.rank(0, each, 0.0)):
            estimate = predictor.estimate(LengthQuery(length))
            request = RoutingRequest(length, slo=slo, length_estimate=estimate)
            name = policy.choose(request, engines)
            assert name is not None
            chosen[name] += 1
            ongoing[name].append(make_ongoing(length, 0, 100.0))
        assert placed == as_workers(predictor, engines)
    assert len(chosen) == 8


REQUESTS = st.builds(
    OngoingRequest,
    st.integers(1, 4000),
    st.sampled_from((0, 0, 1, 20, 300)),
    st.floats(60, 100),
    st.builds(FixedEstimate, st.integers(301, 900)),
    st.sampled_from(MIXED),
)


@settings(max_examples=num_examples(60, 2000), deadline=None)
@given(st.lists(st.lists(REQUESTS, max_size=6), min_size=1, max_size=4), REQUESTS)
def test_every_request_keeps_its_own_limits_on_the_chosen_engine(
    fleet: list[list[OngoingRequest]], arriving: OngoingRequest
) -> None:
    """Each limit is computed by itself; one that is broken already does not count."""
    engines = [
        EngineSnapshot(str(index), ongoing=ongoing, time=100.0, num_blocks=3750)
        for index, ongoing in enumerate(fleet)
    ]
    request = RoutingRequest(
        arriving.num_prompt_tokens, slo=arriving.slo, length_estimate=arriving.length_estimate
    )
    name = AladdinPolicy(Random(0), PlacementRules(), MODEL).choose(request, engines)
    assert name is not None

    def is_kept(ongoing: list[OngoingRequest]) -> bool:
        """Constraints b, c and d of each request of a batch with the arriving one."""
        new = OngoingRequest(arriving.num_prompt_tokens, slo=arriving.slo)
        new.length_estimate = arriving.length_estimate
        batch = [*ongoing, new]
        prefill = MODEL.prefill_seconds(
            sum(each.num_prompt_tokens for each in batch if not each.num_output_tokens)
        )
        context = sum(
            each.num_prompt_tokens + 0.5 * each.length_estimate.expected(each.num_output_tokens)
            for each in batch
        )
        for each in batch:
            slo = each.slo or NO_SLO
            if slo.tpot_seconds is not None:
                if context > 0.8 * MODEL.max_context(len(batch), slo.tpot_seconds):
                    return False
                used = 100.0 - each.first_token_time
                slack = slo.tpot_seconds * each.num_output_tokens - used
                if each.num_output_tokens and slack < prefill / 0.8:
                    return False
            waits = slo.ttft_seconds is not None and not each.num_output_tokens
            if waits and prefill > (slo.ttft_seconds or 0):
                return False
        return True

    admitting = {str(index) for index, ongoing in enumerate(fleet) if is_kept(ongoing)}
    # The KV cache holds all of them.
    assert name in admitting or not admitting


def test_predictions_are_those_of_the_recorded_outputs() -> None:
    rng = Random(0)
    predictor = PromptLengthPredictor()
    outputs: dict[int, list[int]] = {}
    for _ in range(1000):
        prompt, generated = rng.randint(1, 3000), rng.randint(0, 400)
        length = rng.randint(1, 300)
        predictor.record(prompt, length)
        outputs.setdefault(predictor.class_of(prompt), []).append(length)
        known = outputs.get(predictor.class_of(asked := rng.randint(1, 3000)), [])
        if len(known) < MIN_BUCKET_REQUESTS:
            known = [each for lengths in outputs.values() for each in lengths]
        mean = sum(known) / len(known)
        if generated >= mean:
            longer = [each for each in known if each > generated]
            mean = sum(longer) / len(longer) if longer else 2.0 * generated
        assert predictor.predict(asked, generated) == max(mean, generated + 1.0)


def test_a_heartbeat_computes_few_predictions_and_profiles() -> None:
    fleet = LoadedFleet(64, 16, rate=25.0)
    jobs = make_workload("azure-conv", 25, 25.0, seed=2)
    targets = {
        "predictions": OutputHistory._compute_mean,
        "requests": PlacedRequest.__new__,
        "profiles": admits_kv_cache,
    }
    counts = count_calls(lambda: fleet.place(jobs), targets)
    # The engines have 1,024 requests, so that predicting each for each choice takes 25,600.
    assert 25 <= counts["predictions"] <= 3000
    # Requests of engines that meet all constraints but the last.
    assert 25 <= counts["requests"] <= 1000
    assert 1 <= counts["profiles"] <= 50
