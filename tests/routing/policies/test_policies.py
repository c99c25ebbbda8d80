"""Choices of the routing policies, on tables of engines."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from gllm.options.slo import Slo
from gllm.routing.policies.session_affinity import MAX_EXTRA_REQUESTS
from gllm.routing.policy import RoutingPolicy
from gllm.routing.policy_registry import POLICIES, make_policy
from gllm.routing.prefix_index import PromptBlockHashes
from gllm.routing.state import EngineSnapshot, OngoingRequest, RoutingRequest
from gllm.scheduler.step_cost import StepCostCoefficients
from tests.support.routing.snapshots import COSTS, REQUEST, engine
from tests.support.routing.snapshots import request as make_request

POLICIES_BY_STATISTICS = sorted(
    set(POLICIES) - {"random", "round-robin", "aladdin", "pending-tokens"}
)
"""Policies that read statistics, or numbers of requests, of the engines."""


def choose(
    policy: RoutingPolicy, engines: list[EngineSnapshot], request: RoutingRequest = REQUEST
) -> str | None:
    return policy.choose(request, engines)


def count_choices(
    policy: RoutingPolicy,
    engines: list[EngineSnapshot],
    count: int,
    request: RoutingRequest = REQUEST,
) -> Counter[str | None]:
    return Counter(choose(policy, engines, request) for _ in range(count))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("session", ["", "s"])
def test_every_policy_chooses_one_of_the_engines(name: str, session: str) -> None:
    policy = make_policy(name, Random(0))
    request = make_request(session=session, slo=Slo(1.0, 1e-9))
    assert choose(policy, [], request) is None
    assert choose(policy, [engine("a", running=9)], request) == "a"
    names = {choose(policy, [engine("a"), engine("b"), engine("c")], request) for _ in range(50)}
    assert names <= {"a", "b", "c"}
    # Equal engines share the requests that nothing binds to one of them.
    assert session or len(names) == 3


def test_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'best' is none of predict, prefix-aware"):
        make_policy("best", Random(0))


@pytest.mark.parametrize("name", POLICIES_BY_STATISTICS)
def test_idle_engine_is_preferred(name: str) -> None:
    policy = make_policy(name, Random(0))
    busy: dict[str, Any] = {
        "running": 30,
        "waiting": 5,
        "waiting_tokens": 2000,
        "decode_context_tokens": 9000,
    }
    engines = [engine("a", **busy), engine("b")]
    assert choose(policy, engines, make_request(session="s")) == "b"


@pytest.mark.parametrize("name", POLICIES_BY_STATISTICS)
def test_requests_on_their_way_count(name: str) -> None:
    policy = make_policy(name, Random(0))
    busy = engine("a", num_sent=20, num_sent_tokens=2000)
    assert choose(policy, [busy, engine("b")], make_request(session="s")) == "b"


def test_round_robin_takes_turns_by_weight() -> None:
    policy = make_policy("round-robin", Random(0))
    engines = [engine("a"), engine("b", weight=0.5), engine("c")]
    # Their order does not matter: it may differ from call to call.
    names = [choose(policy, engines[number % 3 :] + engines[: number % 3]) for number in range(5)]
    assert names == ["a", "c", "b", "a", "c"]
    assert count_choices(policy, engines, 500) == {"a": 200, "b": 100, "c": 200}


def test_random_follows_weights() -> None:
    counts = count_choices(
        make_policy("random", Random(0)), [engine("a"), engine("b", weight=0.25)], 5000
    )
    assert counts["a"] / counts["b"] == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("name", ["least-requests", "power-of-two"])
def test_least_requests_scales_load_by_weight(name: str) -> None:
    policy = make_policy(name, Random(0))
    engines = [engine("a", running=5), engine("b", running=2, weight=0.5)]
    # (5 + 1) / 1 is as much as (2 + 1) / 0.5.
    assert set(count_choices(policy, engines, 50)) == {"a", "b"}
    assert choose(policy, [engines[0], engine("b", running=3, weight=0.5)]) == "a"
    assert choose(policy, [engines[0], engine("b", running=1, weight=0.5)]) == "b"


def test_least_tokens_counts_tokens_not_requests() -> None:
    policy = make_policy("least-tokens", Random(0))
    many_short = engine("a", running=8, decode_context_tokens=400)
    one_long = engine("b", running=1, decode_context_tokens=3000)
    assert choose(policy, [many_short, one_long]) == "a"


@pytest.mark.parametrize("name", ["least-tokens", "prefix-aware", "predict"])
def test_a_prompt_counts_while_it_is_computed(name: str) -> None:
    policy = make_policy(name, Random(0))
    computes = engine("a", running=1, in_flight_prefill_tokens=2000)
    waits = engine("b", running=1, waiting_tokens=1000)
    assert choose(policy, [computes, waits]) == "b"
    assert choose(policy, [computes, engine("c", running=1)]) == "c"
    assert choose(policy, [engine("d", running=1, waiting_tokens=3000), computes]) == "a"


def test_pending_tokens_count_a_prompt_until_its_first_token() -> None:
    policy = make_policy("pending-tokens", Random(0))
    computes = engine("a", ongoing=[OngoingRequest(2000)])
    decoded = [OngoingRequest(2000, 1) for _ in range(50)]
    assert choose(policy, [computes, engine("b", ongoing=decoded)]) == "b"
    assert choose(policy, [computes, engine("b", ongoing=decoded, weight=0.01)]) == "a"


def test_power_of_two_sometimes_misses_the_best_but_never_takes_the_worst() -> None:
    policy = make_policy("power-of-two", Random(0))
    engines = [engine("a", running=1), engine("b", running=2), engine("c", running=3)]
    counts = count_choices(policy, engines, 3000)
    assert set(counts) == {"a", "b"}
    assert counts["a"] / counts["b"] == pytest.approx(2, rel=0.15)


def test_sessions_stay_and_only_those_of_a_lost_engine_move() -> None:
    policy = make_policy("session", Random(0))
    engines = [engine(name) for name in "abcde"]
    sessions = [make_request(session=str(number)) for number in range(500)]
    before = [choose(policy, engines, each) for each in sessions]
    assert [choose(policy, engines[::-1], each) for each in sessions] == before
    assert min(Counter(before).values()) > 60
    after = [choose(policy, engines[1:], each) for each in sessions]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "a")
    assert len({new for old, new in zip(before, after, strict=True) if old == "a"}) == 4


def test_session_leaves_an_overloaded_engine() -> None:
    policy = make_policy("session", Random(0))
    request = make_request(session="s")
    engines = [engine("a"), engine("b"), engine("c")]
    home = choose(policy, engines, request)
    some = [engine(name, num_sent=MAX_EXTRA_REQUESTS * (name == home)) for name in "abc"]
    assert choose(policy, some, request) == home
    many = [engine(name, num_sent=20 * (name == home)) for name in "abc"]
    assert choose(policy, many, request) != home


@pytest.mark.parametrize("name", ["prefix-aware", "predict"])
def test_cached_prefix_is_weighed_against_waiting_tokens(name: str) -> None:
    policy = make_policy(name, Random(0))
    assert policy.uses_prefixes
    hashes = PromptBlockHashes(range(1000), 16)
    request = RoutingRequest(1000, hashes)
    prefixes = policy.prefixes
    prefixes.on_events("a", 0, hashes[:50], [], is_cleared=True)
    prefixes.on_events("b", 0, hashes[:10], [], is_cleared=True)

    def chosen(waiting_tokens: int) -> str | None:
        engines = [engine("a", waiting_tokens=waiting_tokens), engine("b"), engine("c")]
        return policy.choose(request, engines)

    assert chosen(0) == chosen(300) == "a"
    assert chosen(1500) == "b"
    prefixes.forget("a")
    prefixes.forget("b")
    assert {chosen(0) for _ in range(30)} == {"a", "b", "c"}


def test_predict_prefers_the_faster_engine_until_its_queue_takes_longer() -> None:
    policy = make_policy("predict", Random(0))
    slow = StepCostCoefficients(
        4 * COSTS.step, 4 * COSTS.token, COSTS.pair, COSTS.decode, COSTS.context_token
    )

    def chosen(waiting_tokens: int) -> str | None:
        fast = engine("a", waiting_tokens=waiting_tokens)
        return choose(policy, [fast, engine("b", coefficients=slow)])

    assert chosen(0) == chosen(200) == "a"
    assert chosen(1000) == "b"


def test_predict_takes_the_chunks_of_a_queue_from_the_engine() -> None:
    policy = make_policy("predict", Random(0))
    small = engine("a", running=4, in_flight=4, in_flight_prefill_tokens=400, waiting_tokens=9600)
    large = engine("b", running=6, in_flight=4, in_flight_prefill_tokens=4000, waiting_tokens=6000)
    assert choose(policy, [small, large]) == "b"


def test_predict_respects_the_objective_for_tokens() -> None:
    policy = make_policy("predict", Random(0))
    # Decodes hardly delay the first token but all later ones.
    busy = engine("a", running=100, decode_context_tokens=2000)
    slow = engine("b", waiting_tokens=2000)
    request = make_request(slo=Slo(None, 0.015))
    assert choose(policy, [busy, slow]) == "a"
    assert choose(policy, [busy, slow], request) == "b"
    # Nobody meets it: the closest one.
    assert choose(policy, [busy, slow], make_request(slo=Slo(None, 1e-6))) == "b"
