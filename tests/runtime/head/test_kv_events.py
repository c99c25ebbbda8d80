"""Changes of the prefix cache reach all who watch it, across epochs."""

from random import Random

import pytest

from gllm.messages.kv_cache import KvCacheEvents
from gllm.runtime.head.kv_events import KvEventSource
from gllm.scheduler.cache_events import StoredBlocks
from tests.support.engines.kv_driver import BLOCK_SIZE, KvDriver, KvFollower


@pytest.fixture
def source() -> KvEventSource:
    return KvEventSource()


@pytest.fixture
def driver(source: KvEventSource) -> KvDriver:
    driver = KvDriver(source)
    driver.attach()
    return driver


def test_nothing_is_recorded_while_nobody_watches(source: KvEventSource, driver: KvDriver) -> None:
    driver.run([1] * 9)
    assert driver.digests
    watched = [driver.is_watched]
    unsubscribe = source.subscribe(KvFollower())
    watched.append(driver.is_watched)
    assert source.num_cached_blocks == len(driver.digests)
    unsubscribe()
    unsubscribe()
    assert [*watched, driver.is_watched] == [False, True, False]
    assert source.num_cached_blocks == 0


def test_subscribers_of_any_time_know_the_cache(source: KvEventSource, driver: KvDriver) -> None:
    rng = Random(3)
    followers: list[KvFollower] = []
    for turn in range(120):
        if turn % 30 == 10:
            followers.append(KvFollower())
            source.subscribe(followers[-1], with_tokens=turn == 40)
            assert followers[-1].digests == driver.digests, "the first message is the state"
        prompt = [1] * rng.randrange(20) + [rng.randrange(50) for _ in range(rng.randint(1, 20))]
        driver.run(prompt, rng.randint(1, 10), rng.choice(["", "salt"]))
        if rng.random() < 0.05:
            driver.reset()
        for follower in followers:
            assert follower.digests == driver.digests
    removed = [digest for message in followers[0].messages for digest in message.removed]
    assert removed, "the cache was too small for all"


def test_the_cache_is_empty_from_the_end_of_an_epoch(
    source: KvEventSource, driver: KvDriver
) -> None:
    follower = KvFollower()
    source.subscribe(follower)
    driver.run([1] * 9)
    late = KvCacheEvents(9, [StoredBlocks(b"", [b"late"])], [], False)
    source.detach()
    assert follower.messages[-1].is_cleared
    assert not follower.digests
    source.on_events(late)
    other = KvFollower()
    source.subscribe(other)
    assert not other.messages, "nothing is known without a driver"
    following = KvDriver(source)
    following.attach()
    source.on_events(late)
    following.run([2] * 9)
    assert follower.digests == other.digests == following.digests | {b"late"}
    assert len(following.digests) == 2
    source.detach()
    source.detach()
    assert sum(message.is_cleared for message in follower.messages) == 4


def test_a_driver_is_watched_again_after_all_have_gone(
    source: KvEventSource, driver: KvDriver
) -> None:
    first, second = KvFollower(), KvFollower()
    source.subscribe(first)()
    driver.run([1] * 9)
    source.on_events(KvCacheEvents(1, [StoredBlocks(b"", [b"late"])], [], False))
    assert len(first.messages) == 1
    source.subscribe(second)
    assert second.digests == driver.digests != set()


def test_only_those_who_want_them_get_token_ids(source: KvEventSource, driver: KvDriver) -> None:
    bare, full = KvFollower(), KvFollower()
    source.subscribe(bare)
    driver.run([1] * 9)
    source.subscribe(full, with_tokens=True)
    driver.run([2] * 9)
    assert [each.token_ids for each in bare.messages[-1].stored] == [()]
    assert [each.token_ids for each in full.messages[-1].stored] == [(2,) * 2 * BLOCK_SIZE]
    assert bare.digests == full.digests == driver.digests
    # The tokens of what was there before are not known any more.
    assert [each.token_ids for each in full.messages[0].stored] == [()]


def test_a_subscriber_that_fails_does_not_harm_the_others(
    source: KvEventSource, driver: KvDriver, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(message: KvCacheEvents) -> None:
        raise RuntimeError("full")

    follower = KvFollower()
    source.subscribe(fail)
    source.subscribe(follower)
    driver.run([1] * 9)
    assert follower.digests == driver.digests
    assert "subscriber" in caplog.text


def test_a_subscriber_may_leave_within_its_call(source: KvEventSource, driver: KvDriver) -> None:
    follower = KvFollower()
    messages: list[KvCacheEvents] = []

    def leave(message: KvCacheEvents) -> None:
        messages.append(message)
        if len(messages) == 2:
            unsubscribe()

    unsubscribe = source.subscribe(leave)
    source.subscribe(follower)
    driver.run([1] * 9)
    driver.run([2] * 9)
    assert len(messages) == 2
    assert follower.digests == driver.digests
