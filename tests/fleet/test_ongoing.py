"""Requests of a router's engines with their progress, for policies that read each of them."""

from gllm.routing.aladdin import AladdinPolicy
from tests.fleet.test_fleet import Rig


def ongoing(rig: Rig, name: str) -> list[tuple[int, int]]:
    """Return prompt and output tokens of each request that the router's policy would see."""
    dispatcher = rig.fleet._dispatcher
    (engine,) = dispatcher.candidates([name], dispatcher._clock())
    return [(each.num_prompt_tokens, each.num_output_tokens) for each in engine.ongoing]


def test_progress_is_followed_until_the_end_an_abort_or_the_loss_of_the_engine() -> None:
    rig = Rig(policy="aladdin")
    a = rig.attach("a")
    rig.submit(1, 2, 3)
    cancelled = rig.submit(1, 2)
    assert ongoing(rig, "a") == [(3, 0), (2, 0)]
    first, second = a.requests
    a.answer(first, 10, 11)
    a.answer(second, 12)
    assert ongoing(rig, "a") == [(3, 2), (2, 1)]
    rig.fleet.client.release(cancelled)
    assert ongoing(rig, "a") == [(3, 2)]
    b = rig.attach("b")
    a.leave()
    # The tokens so far are part of what b prefills.
    assert ongoing(rig, "b") == [(5, 0)]
    b.answer(b.requests[0], 13, reason="length")
    assert ongoing(rig, "b") == []
    policy = rig.fleet._dispatcher.policy
    assert isinstance(policy, AladdinPolicy)
    assert policy.output_lengths.predict(3) == 3


def test_other_policies_follow_no_requests() -> None:
    rig = Rig(policy="least-requests")
    rig.attach("a")
    rig.submit(1, 2, 3)
    assert ongoing(rig, "a") == []
