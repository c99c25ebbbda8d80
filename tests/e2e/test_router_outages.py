"""An outage of the network between a router and its engines ends no request: nobody has died."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import NamedTuple

import pytest

from tests.support.network.proxies import Proxy
from tests.support.servers.fleet import Router
from tests.support.servers.recovery_load import REQUESTS, Answer, Load, RepeatedLoad, compare
from tests.support.servers.server import wait_until

pytestmark = pytest.mark.long

EXACT = ["--dtype", "float32", "--threads", "1"]
"""Flags with which a decoded token has the logits of the same token computed in a prefill."""
ROUTER = ["--policy", "round-robin", "--slow-start-seconds", "0", "--ejection-seconds", "0.1"]
"""A returned engine has its share of the requests at once."""
NAMES = "a", "b", "c", "d"
OUTAGE_SECONDS = 20.0
"""More than the time in which an engine is lost, and than the RETURN_SECONDS after which one that
stays away is taken for dead."""
NUM_LOADS = 2
"""Streams of each kind of request at a time."""
NUM_EVENTS = 90 * len(REQUESTS)
"""Events of a load before the outage and after it: about one whole stream of each kind."""


class Fleet(NamedTuple):
    """A router, and the proxy through which each engine dials it."""

    router: Router
    proxies: dict[str, Proxy]

    def losses(self) -> tuple[Counter[str], Counter[str]]:
        """Counters of lost engines and of moved requests, by cause."""
        lost, moved = self.router.losses()
        return Counter(lost), Counter(moved)

    def num_held(self) -> int:
        """Number of requests that the router or an engine still has."""
        with self.router.open("/engines", None) as answer:
            state = json.load(answer)
        num_held: int = state["router"]["num_parked"]
        for row in state["engines"]:
            stats = row["stats"]
            num_held += row["num_requests"] + stats["running"] + stats["waiting"]
        return num_held


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """A router with four engines."""
    with ExitStack() as stack:
        router = stack.enter_context(closing(Router("demo", *ROUTER)))
        proxies = {name: stack.enter_context(closing(Proxy(router.hub))) for name in NAMES}
        for name, proxy in proxies.items():
            router.start_engine(name, *EXACT, routers=proxy.address)
        router.wait_until_ready(*NAMES)
        yield Fleet(router, proxies)


def hold(proxy: Proxy) -> Callable[[], None]:
    """Let a proxy pass nothing, while connections stay open; return what ends that."""
    proxy.is_frozen = True

    def end() -> None:
        proxy.is_frozen = False

    return end


def cut(proxy: Proxy) -> Callable[[], None]:
    """Let a proxy reset and refuse connections; return what ends that."""
    proxy.refuse()
    return proxy.accept


# A cut connection is a presumed death: requests that several of these engines had run alone.
@pytest.mark.parametrize(
    ("begin", "num_engines"),
    [(hold, 4), (hold, 1), (hold, 2), (cut, 4), (cut, 1), (cut, 2), (cut, 3)],
)
def test_an_outage_ends_no_request(
    fleet: Fleet,
    expected: dict[str, Answer],
    begin: Callable[[Proxy], Callable[[], None]],
    num_engines: int,
) -> None:
    """Requests wait or move, texts stay, nothing is taken for a killer of engines."""
    router = fleet.router
    lost_before, moved_before = fleet.losses()
    names = NAMES[:num_engines]
    variant = f"{begin.__name__} {num_engines}"
    loads = [RepeatedLoad(router, f"{variant}, {number}") for number in range(NUM_LOADS)]
    for load in loads:
        load.wait_for_events(NUM_EVENTS)
    wait_until(lambda: all(router.rows()[name]["num_requests"] for name in names))

    start = time.monotonic()
    ends = [begin(fleet.proxies[name]) for name in names]
    wait_until(lambda: not router.rows().keys() & set(names))
    time.sleep(max(0.0, start + OUTAGE_SECONDS - time.monotonic()))
    for end in ends:
        end()
    seconds = time.monotonic() - start
    router.wait_until_ready(*NAMES)
    returned = time.monotonic() - start - seconds
    for load in loads:
        load.wait_for_events(load.num_events + NUM_EVENTS)
    answers = [answer for load in loads for answer in load.stop()]

    lost, moved = fleet.losses()
    gap = max(answer.longest_gap for answer in answers)
    print(
        f"\n{variant}: {len(answers)} streams, worst gap {gap:.1f} s of {seconds:.1f} s, engines "
        f"back after {returned:.1f} s; moved {dict(moved - moved_before)}, "
        f"lost {dict(lost - lost_before)}"
    )
    for answer in answers:
        compare({answer.kind: answer}, expected)
    assert (lost - lost_before).total() >= len(names)
    assert (moved - moved_before).total() > 0
    if len(names) < len(NAMES):
        # Requests move to another engine instead of waiting for the end.
        assert gap < seconds
    # Equal requests are refused after one was found to kill engines.
    compare(Load(router, f"after {variant}").wait(), expected)
    assert all(engine.process.poll() is None for engine in router.engines.values())

    wait_until(lambda: fleet.num_held() == 0)
