"""Copies of running requests' KV at other engines, where they continue if their engine is lost."""

import pytest

from gllm.messages.handoff import KeepComputedKv, PrefetchKv, ReleaseKvHolds
from gllm.messages.requests import SubmitRequest
from gllm.routing.checkpoints import LEASE_SECONDS
from tests.router.test_rebalancing import Rig
from tests.support.routing.scripted_links import ScriptedLink

INTERVAL = 8


@pytest.fixture
def rig() -> Rig:
    return Rig(0, kv_checkpoint=INTERVAL)


def copies(link: ScriptedLink) -> list[PrefetchKv]:
    return [message for message in link.sent if isinstance(message, PrefetchKv)]


def kept(link: ScriptedLink) -> list[KeepComputedKv]:
    return [message for message in link.sent if isinstance(message, KeepComputedKv)]


async def test_the_copy_grows_and_its_engine_continues_after_a_loss(rig: Rig) -> None:
    a, b, c = (rig.attach(name) for name in "abc")
    rig.submit(1)
    rig.step(a, 5)
    rig.tick()
    assert not kept(a), "a block of four tokens is computed, and another one nearly"
    rig.step(a, 5)
    rig.tick(2.0)
    (first,), (copy,) = kept(a), copies(b)
    assert (first.num_tokens, copy.source.num_tokens) == (12, 12)
    assert (copy.source.ticket, copy.source.engine) == (first.ticket, "a")
    assert copy.prompt == [1, 2, 3] + [7] * 9
    assert copy.is_checkpoint
    rig.step(a, 8)
    rig.tick(2.0)
    assert [each.num_tokens for each in kept(a)] == [12, 20]
    assert len(copies(b)) == 2
    assert not copies(c), "each request has one copy"
    assert rig.fleet.totals().kv_checkpoints == 2
    rig.tick(LEASE_SECONDS - 2.0)
    for link in (a, b):
        assert [m for m in link.sent if isinstance(m, ReleaseKvHolds)] == [
            ReleaseKvHolds([first.ticket])
        ]
    a.leave()
    assert not [message for message in c.sent if isinstance(message, SubmitRequest)]
    (resumed,) = b.requests
    assert (resumed.prompt, resumed.outputs) == ([1, 2, 3], [[7] * 18])
    # It is copied from there on.
    rig.step(b, 3)
    rig.tick(2.0)
    assert len(kept(b)) == 1
    assert copies(c)[0].source.engine == "b"
    rig.step(b, end="stop")
    rig.tick()
    assert c.sent[-1] == ReleaseKvHolds([kept(b)[0].ticket])


async def test_requests_are_copied_to_engines_that_can_use_the_blocks_alone(rig: Rig) -> None:
    a = rig.attach("a")
    for name, facts in (
        ("old", {"accepts_checkpoints": False}),
        ("other", {"numerics": "other"}),
        ("none", {"kv_endpoint": b""}),
    ):
        rig.attach(name, **facts)
    rig.submit(4)
    rig.submit(4, n=2)
    for _ in range(4):
        for name in ("a", "old", "other", "none"):
            rig.step(rig.links.links[name], 5)
        rig.tick(2.0)
    links = rig.links.links.values()
    assert not any(copies(link) or kept(link) for link in links)
    new = rig.attach("new")
    rig.step(a)
    rig.tick(2.0)
    # The requests with one choice of `a`; what an older engine computes cannot be kept.
    assert len(copies(new)) == len(kept(a)) == 1


async def test_a_lost_copy_is_made_again_elsewhere(rig: Rig) -> None:
    a, b, c = (rig.attach(name) for name in "abc")
    rig.submit(1)
    rig.step(a, 12)
    rig.tick()
    assert len(copies(b)) == 1
    b.leave()
    rig.tick(2.0)
    assert [each.num_tokens for each in kept(a)] == [12, 12]
    assert len(copies(c)) == 1


async def test_there_are_no_copies_by_default() -> None:
    rig = Rig(0)
    a, b = rig.attach("a"), rig.attach("b")
    rig.submit(2)
    rig.step(a, 30)
    rig.tick(2.0)
    assert not kept(a) + copies(b)
