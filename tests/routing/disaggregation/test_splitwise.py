"""Splitwise's pools: S1, S2 and S3 of the specification, on tables of machines."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.routing.disaggregation.policy import EnginePair
from gllm.routing.disaggregation.role_pools import REPURPOSE_SECONDS
from gllm.routing.disaggregation.splitwise import MAX_PENDING_TOKENS, SplitwisePairPolicy
from gllm.routing.state import EngineSnapshot
from tests.support.examples import num_examples
from tests.support.routing.pair_engines import engine, fleet, pair_request


def mixed_pool(policy: SplitwisePairPolicy, engines: list[EngineSnapshot]) -> set[str]:
    return {each.name for each in policy.pools.divide(engines).mixed}


def full(name: str, num_sent_tokens: int = 0) -> EngineSnapshot:
    """A token machine without free KV memory."""
    return engine(name, "decode", num_sent_tokens=num_sent_tokens, kv_usage=1.0)


def overloaded(name: str) -> EngineSnapshot:
    """A prompt machine whose queue is full."""
    return engine(name, "prefill", waiting_tokens=MAX_PENDING_TOKENS)


@settings(max_examples=num_examples(50, 1000), deadline=None)
@given(
    pending=st.lists(st.integers(0, 5000), min_size=1, max_size=5),
    used=st.lists(st.integers(0, 10), min_size=1, max_size=5),
    seed=st.integers(0, 100),
)
def test_both_machines_are_the_least_loaded_and_chosen_at_arrival(
    pending: list[int], used: list[int], seed: int
) -> None:
    """S1."""
    policy = SplitwisePairPolicy(Random(seed))
    prompts = [engine(f"p{i}", "prefill", waiting_tokens=n) for i, n in enumerate(pending)]
    tokens = [engine(f"d{i}", "decode", kv_usage=n / 20) for i, n in enumerate(used)]
    pair = policy.choose(pair_request(1), prompts + tokens, 0.0)
    assert pair is not None
    assert pair.decode is not None
    assert pending[int(pair.prefill[1:])] == min(pending)
    assert used[int(pair.decode[1:])] == min(used)
    assert mixed_pool(policy, prompts + tokens) == set()


def test_requests_on_their_way_count_as_pending_and_reserved() -> None:
    policy = SplitwisePairPolicy(Random(0))
    engines = fleet(2, 2)
    first = policy.choose(pair_request(1, 3000, 500), engines, 0.0)
    assert first is not None
    others = [policy.choose(pair_request(key, 10, 10), engines, 0.0) for key in range(2, 9)]
    assert all(pair is not None and pair.prefill != first.prefill for pair in others)
    assert all(pair is not None and pair.decode != first.decode for pair in others)


def test_a_long_prompt_runs_on_an_idle_machine() -> None:
    policy = SplitwisePairPolicy(Random(0))
    pair = policy.choose(pair_request(1, 2 * MAX_PENDING_TOKENS), fleet(1, 1, 10**6), 0.0)
    assert pair == EnginePair("p0", "d0")


def test_prompts_overflow_to_mixed_then_to_token_machines_then_to_one_for_both() -> None:
    """S2 for prompts: home, mixed, opposite, colocated."""
    policy = SplitwisePairPolicy(Random(0))
    home = [engine("p", "prefill"), engine("m", "mixed"), engine("d", "decode")]
    assert policy.choose(pair_request(1), home, 0.0) == EnginePair("p", "d")
    policy = SplitwisePairPolicy(Random(0))
    engines = [overloaded("p"), engine("m", "mixed"), engine("d", "decode")]
    assert policy.choose(pair_request(1), engines, 0.0) == EnginePair("m", "d")
    engines = [overloaded("p"), engine("d", "decode"), engine("e", "decode", kv_usage=0.5)]
    policy = SplitwisePairPolicy(Random(0))
    pair = policy.choose(pair_request(1), engines, 0.0)
    assert pair is not None
    assert pair.prefill in "de"
    assert pair.decode == "d"
    assert mixed_pool(policy, engines) == {pair.prefill}
    # Without token machines to borrow, the machine with the fewest pending tokens has both.
    policy = SplitwisePairPolicy(Random(0))
    engines = [overloaded("p"), engine("q", "prefill", waiting_tokens=MAX_PENDING_TOKENS - 1)]
    assert policy.choose(pair_request(1), engines, 0.0) == EnginePair("q", "q")


def test_decodes_overflow_to_mixed_then_to_prompt_machines_then_to_one_for_both() -> None:
    """S2 for decodes: home, mixed, opposite, colocated."""
    policy = SplitwisePairPolicy(Random(0))
    engines = [engine("p", "prefill"), engine("m", "mixed"), full("d")]
    assert policy.choose(pair_request(1), engines, 0.0) == EnginePair("p", "m")
    policy = SplitwisePairPolicy(Random(0))
    engines = [engine("p", "prefill"), engine("q", "prefill", kv_usage=0.5), full("d")]
    pair = policy.choose(pair_request(1), engines, 0.0)
    assert pair is not None
    assert pair.decode == "p"
    assert mixed_pool(policy, engines) == {"p"}
    policy = SplitwisePairPolicy(Random(0))
    engines = [full("d"), full("e", num_sent_tokens=5)]
    assert policy.choose(pair_request(1), engines, 0.0) == EnginePair("d", "d")


def test_a_prompt_queue_holds_8192_tokens() -> None:
    engines = fleet(1, 1, num_tokens=10**6)
    policy = SplitwisePairPolicy(Random(0))
    for key in range(8):
        assert policy.choose(pair_request(key, 1024), engines, 0.0) == EnginePair("p0", "d0")
    assert mixed_pool(policy, engines) == set()
    assert policy.choose(pair_request(8, 1), engines, 0.0) == EnginePair("d0", "d0")
    assert mixed_pool(policy, engines) == {"d0"}


def test_a_token_machine_is_full_by_prompt_and_output() -> None:
    engines = fleet(1, 1, num_tokens=1600)
    policy = SplitwisePairPolicy(Random(0))
    assert policy.choose(pair_request(1, 600, 199), engines, 0.0) == EnginePair("p0", "d0")
    assert policy.choose(pair_request(2, 600, 200), engines, 0.0) == EnginePair("p0", "d0")
    # 1,599 of 1,600 tokens are reserved.
    assert policy.choose(pair_request(3, 1, 1), engines, 0.0) == EnginePair("p0", "p0")


def test_a_mixed_machine_returns_home_when_its_foreign_work_ends() -> None:
    """S3."""
    policy = SplitwisePairPolicy(Random(0))
    engines = [overloaded("p"), engine("d", "decode")]
    assert policy.choose(pair_request(1), engines, 0.0) == EnginePair("d", "d")
    assert mixed_pool(policy, engines) == {"d"}
    policy.on_prefill_ended(1, 1.0)
    # Its decode, which is its home's work, goes on.
    assert mixed_pool(policy, engines) == set()
    policy = SplitwisePairPolicy(Random(0))
    engines = [engine("p", "prefill"), full("d")]
    assert policy.choose(pair_request(1), engines, 0.0) == EnginePair("p", "p")
    policy.on_prefill_ended(1, 1.0)
    assert mixed_pool(policy, engines) == {"p"}
    policy.on_ended(1, 2.0)
    assert mixed_pool(policy, engines) == set()


def test_a_machine_that_stays_mixed_changes_its_home() -> None:
    policy = SplitwisePairPolicy(Random(0))
    prompts = [overloaded(name) for name in "pq"]
    engines = [*prompts, engine("d", "decode"), engine("e", "decode")]
    pair = policy.choose(pair_request(1), engines, 10.0)
    assert pair is not None
    lent = pair.prefill
    assert policy.role_changes(engines, 10.0 + REPURPOSE_SECONDS - 0.01) == []
    assert policy.role_changes(engines, 10.0 + REPURPOSE_SECONDS) == [(lent, "prefill")]
    roles = {"d": "decode", "e": "decode", lent: "prefill"}
    announced = [*prompts, *(engine(name, role) for name, role in roles.items())]
    assert mixed_pool(policy, announced) == set()
    assert policy.role_changes(announced, 1000.0) == []


def test_the_last_machine_of_a_phase_keeps_its_home() -> None:
    policy = SplitwisePairPolicy(Random(0))
    engines = [overloaded("p"), engine("d", "decode")]
    policy.choose(pair_request(1), engines, 0.0)
    assert mixed_pool(policy, engines) == {"d"}
    assert policy.role_changes(engines, 10 * REPURPOSE_SECONDS) == []


def test_a_request_that_lost_its_token_machine_gets_another() -> None:
    policy = SplitwisePairPolicy(Random(0))
    engines = fleet(1, 2)
    pair = policy.choose(pair_request(1), engines, 0.0)
    assert pair is not None
    assert pair.decode is not None
    policy.on_prefill_ended(1, 0.5)
    policy.on_engine_lost(pair.decode)
    left = [each for each in engines if each.name != pair.decode]
    assert policy.choose_decode(pair_request(1), left, 1.0) == left[-1].name
    # Without a token machine a prompt machine decodes, in the mixed pool.
    policy.on_engine_lost(left[-1].name)
    assert policy.choose_decode(pair_request(1), left[:1], 2.0) == "p0"
    assert mixed_pool(policy, left[:1]) == {"p0"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_chosen_again_leaves_its_machines(role: str) -> None:
    policy = SplitwisePairPolicy(Random(0))
    engines = fleet(2, 2)
    first = policy.choose(pair_request(1, 500), engines, 0.0)
    assert first is not None
    assert policy.choose(pair_request(1, 500), [engine("x", role)], 1.0) == EnginePair("x", "x")
    assert policy.loads.of(first.prefill).num_prefills == 0
    assert policy.loads.of(first.decode or "").decode_tokens == 0
