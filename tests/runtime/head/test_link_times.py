"""Times of links between machines: from the nodes' reports to the driver."""

import asyncio

import pytest

from gllm.messages.base import WireMessage
from gllm.messages.nodes import LinkState
from gllm.messages.reports import LinkTime, LinkTimes
from gllm.recovery.placement import LOCAL_NODE, Placement, RankWorker, make_placement
from gllm.runtime.head.node_group import LinkTimesReporter, collect_link_times


def place(*nodes: str, degrees: list[int] | None = None) -> Placement:
    """Return a placement with a worker on each node, in the order of the places."""
    num_stages = len(degrees or nodes)
    layers = [(stage, stage + 1) for stage in range(num_stages)]
    slots = [RankWorker(sender, node) for sender, node in enumerate(nodes, start=1)]
    return make_placement(1, layers, slots, degrees)


def link(
    edge: int,
    rate: float | None,
    round_trip: float | None,
    is_open: bool = True,
    least: float | None = None,
) -> LinkState:
    return LinkState(
        edge,
        "peer",
        "tcp",
        is_open,
        0,
        bytes_per_second=rate,
        min_bytes_per_second=least or rate,
        round_trip_seconds=round_trip,
    )


def test_links_of_a_pipeline() -> None:
    """The sending end's measurements count; stages of one machine have no link."""
    placement = place(LOCAL_NODE, LOCAL_NODE, "b", "c")
    links = {
        LOCAL_NODE: [link(1, 12e6, 0.04)],
        "b": [link(1, 1e6, 0.5), link(2, 5e6, 0.02)],
        "c": [link(2, 1e6, 0.5)],
    }
    assert collect_link_times(placement, links, {"b": 0.05, "c": 0.07}) == LinkTimes(
        [LinkTime(), LinkTime(12e6, 0.04, 12e6), LinkTime(5e6, 0.02, 5e6)], [0.0, 0.0, 0.05, 0.07]
    )


def test_a_rate_that_nothing_has_measured_limits_nothing() -> None:
    placement = place(LOCAL_NODE, "b")
    times = collect_link_times(placement, {LOCAL_NODE: [link(0, None, 0.04)]}, {"b": 0.05})
    assert times == LinkTimes([LinkTime(None, 0.04, 0.0)], [0.0, 0.05])
    links = {LOCAL_NODE: [link(0, None, 0.04, least=3e6)]}
    times = collect_link_times(placement, links, {"b": 0.05})
    assert times == LinkTimes([LinkTime(None, 0.04, 3e6)], [0.0, 0.05])


@pytest.mark.parametrize(
    ("links", "round_trips"),
    [
        ({}, {"b": 0.05}),
        ({LOCAL_NODE: [link(0, 1e6, None)]}, {"b": 0.05}),
        ({LOCAL_NODE: [link(0, 1e6, 0.04, is_open=False)]}, {"b": 0.05}),
        ({LOCAL_NODE: [link(1, 1e6, 0.04)]}, {"b": 0.05}),
        ({LOCAL_NODE: [link(0, 1e6, 0.04)]}, {"b": None}),
        ({LOCAL_NODE: [link(0, 1e6, 0.04)]}, {}),
    ],
)
def test_nothing_is_reported_before_all_is_measured(
    links: dict[str, list[LinkState]], round_trips: dict[str, float | None]
) -> None:
    assert collect_link_times(place(LOCAL_NODE, "b"), links, round_trips) is None


def test_the_slowest_of_several_edges_counts() -> None:
    placement = place(LOCAL_NODE, "b", "b", degrees=[1, 2])
    links = {LOCAL_NODE: [link(0, 3e6, 0.04), link(1, 2e6, 0.05)]}
    times = collect_link_times(placement, links, {"b": 0.06})
    assert times == LinkTimes([LinkTime(2e6, 0.05, 2e6)], [0.0, 0.06])
    links = {LOCAL_NODE: [link(0, None, 0.04), link(1, 2e6, 0.01)]}
    times = collect_link_times(placement, links, {"b": 0.06})
    assert times == LinkTimes([LinkTime(2e6, 0.04, 0.0)], [0.0, 0.06])


def test_a_driver_on_another_machine_is_reached_through_the_head() -> None:
    placement = place("b", LOCAL_NODE, "c")
    links = {"b": [link(0, 1e6, 0.01)], LOCAL_NODE: [link(1, 1e6, 0.02)]}
    times = collect_link_times(placement, links, {"b": 0.03, "c": 0.05})
    assert times is not None
    assert times.driver_round_trips == pytest.approx([0.0, 0.03, 0.08])


def test_only_changes_are_sent() -> None:
    def times(rate: float, round_trip: float) -> LinkTimes:
        return LinkTimes([LinkTime(rate, round_trip)], [0.0, 0.02])

    first, close, other = times(1e6, 0.05), times(1.01e6, 0.0505), times(1.1e6, 0.05)
    longer = LinkTimes([LinkTime()] * 2, [0.0] * 3)
    readings = [None, first, first, close, other, None, other, longer]
    sent: list[WireMessage] = []

    async def report() -> None:
        left, done = iter(readings), asyncio.Event()

        def read() -> LinkTimes | None:
            reading = next(left, "end")
            if isinstance(reading, str):
                done.set()
                return None
            return reading

        reporter = LinkTimesReporter(read, sent.append, 0.001)
        await done.wait()
        reporter.close()

    asyncio.run(report())
    # A driver that begins has none.
    assert sent == [first, other, other, longer]
