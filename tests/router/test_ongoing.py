"""Requests of a router's engines with their progress, for policies that read each of them."""

from collections.abc import Sequence
from random import Random

from gllm.routing.policies.aladdin import AladdinPolicy
from gllm.routing.policies.simple import LeastRequestsPolicy
from gllm.routing.state import EngineSnapshot, RoutingRequest
from tests.router.test_fleet import Rig

Ongoing = dict[str, list[tuple[int, int]]]
"""Prompt and output tokens of each request, by engine."""


def see(engines: Sequence[EngineSnapshot]) -> Ongoing:
    """Return the requests that a policy sees."""
    return {
        engine.name: [(each.num_prompt_tokens, each.num_output_tokens) for each in engine.ongoing]
        for engine in engines
    }


class SeenAladdin(AladdinPolicy):
    """A policy that reads the requests, and notes what it sees at its latest choice."""

    seen: Ongoing

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        self.seen = see(engines)
        return super().choose(request, engines)


class SeenLeastRequests(LeastRequestsPolicy):
    """A policy that does not read them, and notes what it would see."""

    seen: Ongoing

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        self.seen = see(engines)
        return super().choose(request, engines)


def ongoing(rig: Rig, policy: SeenAladdin | SeenLeastRequests) -> Ongoing:
    """Return the requests that the policy sees with another one, which is aborted."""
    rig.fleet.client.release(rig.submit(9))
    return policy.seen


def test_progress_is_followed_until_the_end_an_abort_or_the_loss_of_the_engine() -> None:
    policy = SeenAladdin(Random(0))
    rig = Rig(routing=policy)
    a = rig.attach("a")
    rig.submit(1, 2, 3)
    cancelled = rig.submit(1, 2)
    first, second = a.requests
    assert ongoing(rig, policy) == {"a": [(3, 0), (2, 0)]}
    a.answer(first, 10, 11)
    a.answer(second, 12)
    assert ongoing(rig, policy) == {"a": [(3, 2), (2, 1)]}
    rig.fleet.client.release(cancelled)
    assert ongoing(rig, policy) == {"a": [(3, 2)]}
    b = rig.attach("b")
    a.leave()
    # The tokens so far are part of what b prefills.
    assert ongoing(rig, policy) == {"b": [(5, 0)]}
    b.answer(b.requests[0], 13, reason="length")
    assert ongoing(rig, policy) == {"b": []}
    # The prompt had three tokens, and the output as many.
    assert rig.fleet.totals().length_predictor == "by-prompt"
    rig.submit(4, 5, 6)
    assert b.requests[-1].predicted_output_tokens == 3


def test_other_policies_follow_no_requests() -> None:
    policy = SeenLeastRequests(Random(0))
    rig = Rig(routing=policy)
    rig.attach("a")
    rig.submit(1, 2, 3)
    assert ongoing(rig, policy) == {"a": []}
