"""Policy `deferred`: requests wait at the router until an engine has room."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.routing.policies.deferred import DeferredPolicy
from gllm.routing.state import EngineSnapshot, RoutingRequest
from gllm.scheduler.plan import SchedulerStats
from tests.support.examples import num_examples
from tests.support.routing.snapshots import engine, request

BATCH = EngineSnapshot("").max_num_batched_tokens
CAPACITY = engine("").num_kv_tokens


@st.composite
def snapshots(draw: st.DrawFn, name: str) -> EngineSnapshot:
    """Return an engine anywhere between empty and overloaded."""
    stats = SchedulerStats(
        running=draw(st.integers(0, 5)),
        waiting=draw(st.integers(0, 2)),
        waiting_tokens=draw(st.sampled_from((0, 1, BATCH, 2 * BATCH, 4 * BATCH))),
        kv_usage=draw(st.sampled_from((0.0, 0.4, 0.99, 1.0))),
    )
    return engine(name, draw(st.sampled_from((0.3, 1.0))))._replace(
        stats=stats, max_num_seqs=draw(st.integers(1, 6)), num_stages=draw(st.integers(1, 2)),
        num_sent=draw(st.integers(0, 1)), num_sent_tokens=draw(st.sampled_from((0, 500))),
    )  # fmt: skip


@settings(max_examples=num_examples(100, 3000))
@given(st.data(), st.integers(1, 5000), st.booleans())
def test_a_request_gets_the_emptiest_engine_with_room_or_waits(
    data: st.DataObject, num_tokens: int, is_moved: bool
) -> None:
    engines = [data.draw(snapshots(name)) for name in "abc"[: data.draw(st.integers(0, 3))]]
    policy = DeferredPolicy(Random(0))
    name = policy.choose(RoutingRequest(num_tokens, is_moved=is_moved), engines)
    roomy = [each for each in engines if policy.has_room(each, num_tokens)]
    if not roomy:
        # One that an engine has had does not wait.
        assert (name is not None) == (is_moved and bool(engines))
        return
    chosen = next(each for each in engines if each.name == name)
    assert chosen in roomy
    assert chosen.num_requests < chosen.max_num_seqs
    assert not chosen.num_requests or (
        chosen.num_used_kv_tokens + chosen.num_waiting_tokens + num_tokens <= CAPACITY
    )
    load = (chosen.num_requests + 1) / chosen.weight
    assert all(load <= (each.num_requests + 1) / each.weight for each in roomy)


def test_an_idle_engine_has_room_for_everything() -> None:
    policy = DeferredPolicy(Random(0))
    assert policy.has_room(engine("a", weight=0.001), 10 * CAPACITY)


def test_what_waits_at_an_engine_is_limited_to_a_few_micro_batches() -> None:
    policy = DeferredPolicy(Random(0))
    # A KV cache of a million tokens.
    wide = engine("a", running=1, waiting=1, waiting_tokens=2 * BATCH)._replace(num_blocks=2**16)
    assert policy.has_room(wide, BATCH)
    assert not policy.has_room(wide, BATCH + 1)
    assert policy.has_room(wide._replace(num_stages=2), BATCH + 1)
    assert policy.choose(request(num_prompt_tokens=BATCH + 1), [wide]) is None
