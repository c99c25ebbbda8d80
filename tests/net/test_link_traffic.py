"""Scripted workers over a slow link, through the data movers of two machines."""

import pytest

from benchmarks.net.link_traffic import (
    DECODE,
    PREFILL,
    HopLatencies,
    LinkSetup,
    RigLink,
    TrafficPattern,
)
from benchmarks.net.rig import NamespaceRig, unsupported_reason
from gllm.transport.base import EdgeLayout

PATTERN = TrafficPattern(
    seconds=1.0, decode_tokens=2, decode_interval=0.05, prefill_tokens=250, prefill_interval=1.2
)
LAYOUT = EdgeLayout(slots=128, max_tokens=250, hidden_size=1024, itemsize=4)
"""A token weighs 4 KB, a prefill 1 MB: 0.4 s at 20 Mbit/s."""
needs_namespaces = pytest.mark.skipif(
    unsupported_reason() is not None, reason=str(unsupported_reason())
)


def measure(setup: LinkSetup) -> HopLatencies:
    """Latencies over 20 Mbit/s and 10 ms, on a connection that is in use already."""
    with NamespaceRig(2, shaped=[1]) as rig:
        rig.hop(1).set_rate(20e6)
        rig.hop(1).set_delay(0.01)
        with RigLink(rig, setup, LAYOUT) as link:
            link.send(TrafficPattern(0.5, 2, 0.05, prefill_tokens=0))
            latencies = link.send(PATTERN)
    assert (len(latencies.decode), len(latencies.prefill)) == (20, 1)
    assert min(latencies.decode) >= 0.01
    # The prefill occupies the link for 0.4 s, in which 8 decodes are sent.
    assert latencies.prefill[0] > 0.4
    return latencies


@pytest.mark.full
@needs_namespaces
def test_decodes_wait_behind_a_prefill_of_their_lane() -> None:
    latencies = measure(LinkSetup(1, "serial", "cubic"))
    assert (latencies.num_overtaken, latencies.num_overtaking) == (0, 0)
    # The first one behind the prefill waits for most of it.
    assert max(latencies.decode) > 0.7 * latencies.prefill[0]


@needs_namespaces
def test_decodes_overtake_a_prefill_of_another_lane() -> None:
    latencies = measure(LinkSetup(2, "molink", "cubic"))
    assert latencies.num_overtaken == 1
    assert latencies.num_overtaking >= 4


def test_steps_of_a_pattern_are_in_order() -> None:
    steps = PATTERN.make_steps()
    assert [step for step in steps if step.kind == PREFILL] == [(0.3, PREFILL, 250)]
    decodes = [step for step in steps if step.kind == DECODE]
    assert len(decodes) == 20
    assert decodes[1] == (0.05, DECODE, 2)
    assert steps == sorted(steps)
    without = TrafficPattern(9.0, prefill_tokens=0).make_steps()
    assert {step.kind for step in without} == {DECODE}
