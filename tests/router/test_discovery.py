"""Discovery of peers, addresses of hubs, and the delays between attempts."""

import asyncio
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.options.addresses import format_host_port, parse_host_port, resolve_host
from gllm.recovery.backoff import MAX_SECONDS, Backoff
from gllm.runtime.messaging.connection_pool import Discovery, parse_hub_address
from tests.support.routing.links import Links, announcement, until


class Names:
    """A resolver whose answers a test sets."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)
        self.error: OSError | None = None
        self.num_questions = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        self.num_questions += 1
        if self.error is not None:
            raise self.error
        return [each if ":" in each else f"{each}:{port}" for each in self.addresses]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("a:1", "a", 1), ("10.0.0.1:29700", "10.0.0.1", 29700), ("[::1]:65535", "::1", 65535)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_host_port(text) == (host, port)
    assert format_host_port(host, port) == text


@pytest.mark.parametrize("text", ["", "a", ":1", "a:", "a:0", "a:65536", "::1:5", "a:1x", "a:²"])
def test_texts_that_are_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_host_port(text)
    with pytest.raises(ValueError, match="HOST:PORT"):
        Discovery(text)


def test_addresses_of_hubs() -> None:
    assert parse_hub_address("29700", has_secret=False) == "tcp://127.0.0.1:29700"
    assert parse_hub_address("29700", has_secret=True) == "tcp://*:29700"
    assert parse_hub_address("10.1.1.1:0", has_secret=False) == "tcp://10.1.1.1:0"
    assert parse_hub_address("[::]:5", has_secret=True) == "tcp://[::]:5"
    with pytest.raises(ValueError, match="neither a PORT nor HOST:PORT"):
        parse_hub_address("70000", has_secret=True)


def test_kinds_of_entries() -> None:
    assert Discovery("dns:engines:29700").has_many
    # A host of the name of a scheme.
    assert not Discovery("dns:29700").has_many
    assert not Discovery("[::1]:29700").has_many


async def test_hosts_are_resolved() -> None:
    assert "127.0.0.1:80" in await resolve_host("localhost", 80)
    assert await resolve_host("::1", 80) == ["[::1]:80"]
    with pytest.raises(OSError, match=r"not known|resolution"):
        await resolve_host("name.invalid", 80)


async def test_names_are_resolved_again() -> None:
    names = Names("10.0.0.1", "10.0.0.2")
    found: list[frozenset[str]] = []
    watch = asyncio.create_task(Discovery("dns:x:7", names.resolve, 0.001).watch(found.append))
    await until(lambda: found)
    names.error = OSError("no such name")
    questions = names.num_questions
    await until(lambda: names.num_questions > questions + 2)
    names.addresses, names.error = ["10.0.0.2", "10.0.0.3"], None
    await until(lambda: len(found) == 2)
    watch.cancel()
    assert found == [
        {"10.0.0.1:7", "10.0.0.2:7"},
        {"10.0.0.2:7", "10.0.0.3:7"},
    ]


async def test_peers_of_a_name_come_and_go(links: Links) -> None:
    hubs = {}
    for name in ("a", "b"):
        _, attachment = await links.engine(announcement(name), hub="127.0.0.1:0")
        hubs[name] = attachment.hub_address.removeprefix("tcp://")
    names = Names(hubs["a"])
    router = await links.router(
        dial=("dns:localhost:1",), resolve=names.resolve, resolve_seconds=0.01
    )
    await until(lambda: router.attached == ["a"])
    names.addresses = [hubs["b"]]
    await until(lambda: router.attached == ["a", "b"])
    # Heartbeats decide who is lost, not names.
    assert router.lost == []
    assert set(router.links.links) == {"a", "b"}


@given(seed=st.integers(0, 2**32), num_failures=st.integers(1, 30))
def test_delays_grow_up_to_a_limit_and_start_again(seed: int, num_failures: int) -> None:
    backoff = Backoff(Random(seed))
    delays = [backoff.next_delay() for _ in range(num_failures)]
    assert all(0 < delay <= MAX_SECONDS for delay in delays)
    assert all(later > earlier / 2 for earlier, later in pairwise(delays))
    if num_failures > 8:
        assert delays[-1] >= MAX_SECONDS / 2
    backoff.reset()
    assert backoff.next_delay() <= delays[0] * 2
