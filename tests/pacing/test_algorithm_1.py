"""Algorithm 1 of MoLink: a trace by hand, starvation, and the sizes of chunks."""

import random
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.link_policies.concurrent import ConcurrentPolicy
from experiments.link_policies.fixed_chunk import FixedChunkPolicy
from experiments.link_policies.molink_paper import MolinkPaperPolicy
from gllm.pacing.policies.molink import (
    FLUSH_FACTOR,
    MAX_BYTES,
    PATIENCE,
    DecodeFirstPolicy,
    MolinkPolicy,
    clamp_chunk,
)
from gllm.pacing.policies.serial import SerialPolicy
from gllm.pacing.policy_registry import make_link_policy
from gllm.pacing.traffic import Chunk, LinkView, TrafficClass
from tests.support.examples import num_examples
from tests.support.scheduler.link_messages import EVERY_LINK_POLICY, Message, Queue

DECODE, PREFILL, KV_CACHE = TrafficClass
CLASSES = {"D": DECODE, "P": PREFILL, "K": KV_CACHE}

PAPER_TRACE = """
    D1=40                    |  -     | D1 40
    D2=40 P1=1000            |  0.2   | D2 40
                             |  0.2   | P1 200
                             |  0.35  | P1 350
                             |  0.05  | P1 100
    D3=40                    |  0.2   | D3 40
    D4=40                    |  0.2   | D4 40
    D5=40                    |  0.2   | P1 350
                             |  -     | D5 40
    P2=500 P3=300            | -1     | P2 100
                             |  0     | P2 100
    D6=30 D7=30              |  0.3   | D6 30
                             |  0.3   | D7 30
                             |  0.3   | P2 300
                             |  5     | P3 300
    D8=20                    |  -     | D8 20
    P4=2000 D9=9 D10=9 D11=9 |  0.2   | D9 9
                             |  0.2   | D10 9
    D12=9                    |  0.2   | P4 2000
                             |  -     | D11 9
    P5=600                   |  0.2   | D12 9
                             |  -     | P5 600
    P6=250                   |  0.1   | P6 100
    D13=8                    |  0.1   | D13 8
                             |  0.1   | P6 100
                             |  0.01  | P6 50
    D14=7 P7=900             |  1     | D14 7
    D15=7                    |  1     | D15 7
                             |  0.4   | P7 400
    D16=7                    |  1     | D16 7
    D17=7                    |  1     | D17 7
    D18=7                    |  1     | P7 500
    P8=120                   |  1     | D18 7
                             |  0.119 | P8 119
    D19=6                    |  1     | D19 6
    D20=6                    |  1     | D20 6
    D21=6                    |  1     | P8 1
                             |  1     | D21 6
    P9=100                   |  0.099 | P9 100
    D22=5                    |  1     | D22 5
"""
"""Arrivals | slack in seconds | chunk sent, at 1,000 bytes/s, N = 3 and a smallest chunk of 100."""

BOUNDED_TRACE = """
    P1=2000 D1=9 D2=9 D3=9   |  -     | D1 9
                             |  0.5   | D2 9
                             |  0.5   | P1 400
                             |  0.5   | D3 9
                             |  0.5   | P1 500
                             |  5     | P1 600
    D4=9                     |  -     | D4 9
    P2=300                   |  -     | P1 500
    D5=9                     |  -     | D5 9
    D6=9                     |  -     | D6 9
    D7=9                     |  -     | P2 300
                             |  -     | D7 9
"""
"""The same of `molink` with a largest chunk of 600 and a forced one of 400."""

KV_TRACE = """
    K1=500                   |  -     | K1 100
    P1=250 D1=9              |  1     | D1 9
                             |  1     | P1 100
    D2=9                     |  1     | K1 100
                             |  1     | D2 9
                             |  1     | P1 100
                             |  1     | K1 100
                             |  1     | P1 50
                             |  1     | K1 100
    D3=9                     |  1     | D3 9
                             |  1     | K1 100
"""
"""KV blocks of `fixed-chunk` with chunks of 100 and N = 3: alone, and each third time at last."""


@pytest.mark.parametrize(
    ("policy", "trace", "num_events"),
    [
        (MolinkPaperPolicy(min_bytes=100, patience=3), PAPER_TRACE, 40),
        (MolinkPolicy(min_bytes=100, max_bytes=600, patience=3), BOUNDED_TRACE, 12),
        (FixedChunkPolicy(chunk_bytes=100, patience=3), KV_TRACE, 11),
    ],
    ids=["as printed", "bounded", "KV blocks"],
)
def test_policy_repeats_a_trace_by_hand(
    policy: DecodeFirstPolicy, trace: str, num_events: int
) -> None:
    queue = Queue(policy)
    names: dict[int, str] = {}
    lines = [line.split("|") for line in trace.strip().splitlines()]
    assert len(lines) == num_events
    for number, (arrivals, slack, expected) in enumerate(lines):
        for arrival in arrivals.split():
            name, size = arrival.split("=")
            names[queue.add(CLASSES[name[0]], int(size)).number] = name
        message, num_bytes = queue.send(None if slack.strip() == "-" else float(slack))
        sent = f"{names[message.number]} {num_bytes}"
        assert sent == expected.strip(), f"event {number + 1}"
    assert not queue.waiting


def test_cancelled_prefill_strands_no_decode() -> None:
    """At W >= N without a prefill Algorithm 1 as printed sends nothing; every policy here does."""
    for name in EVERY_LINK_POLICY:
        queue = Queue(make_link_policy(EVERY_LINK_POLICY[name]))
        prefill = queue.add(PREFILL, 10**6)
        for _ in range(PATIENCE):
            queue.add(DECODE, 10)
        for _ in range(PATIENCE - 1):
            queue.send(0.0)
        if prefill in queue.waiting:
            queue.waiting.remove(prefill)
        while queue.waiting:
            assert queue.send(0.0)[0].traffic_class is DECODE


@pytest.mark.parametrize("name", ["fixed-chunk", "molink-paper", "molink"])
@pytest.mark.parametrize("with_kv", [False, True])
def test_prefill_waits_for_at_most_30_decodes(name: str, with_kv: bool) -> None:
    """A decode always waits; prefills, and KV blocks beside them, advance nevertheless."""
    queue = Queue(make_link_policy(EVERY_LINK_POLICY[name]), 12.5e6)
    for _ in range(4):
        queue.add(PREFILL, 10**6)
        if with_kv:
            queue.add(KV_CACHE, 10**6)
    waits = dict.fromkeys(CLASSES.values(), 0)
    longest = dict(waits)
    for _ in range(3000):
        if not any(each.traffic_class is DECODE for each in queue.waiting):
            queue.add(DECODE, 57_344)
        present = {each.traffic_class for each in queue.waiting}
        sent = queue.send(0.004)[0].traffic_class
        for each in present:
            waits[each] = 0 if each is sent else waits[each] + 1
            longest[each] = max(longest[each], waits[each])
    # KV blocks may take one turn of a prefill, and a prefill one of KV blocks.
    assert longest[PREFILL] == PATIENCE - 1 + with_kv
    assert longest[KV_CACHE] in ((PATIENCE - 1, PATIENCE) if with_kv else (0,))
    assert longest[DECODE] <= 2


@settings(max_examples=num_examples(50, 2000), deadline=None)
@given(
    least=st.integers(1, 100_000),
    patience=st.integers(1, 40),
    arrivals=st.lists(
        st.tuples(st.sampled_from(TrafficClass), st.integers(1, 10**8)), min_size=1, max_size=40
    ),
)
def test_no_forced_chunk_exceeds_four_times_the_smallest(
    least: int, patience: int, arrivals: list[tuple[TrafficClass, int]]
) -> None:
    """Forced: a more urgent message waits."""
    queue = Queue(MolinkPolicy(least, max(least, MAX_BYTES), patience))
    for traffic_class, num_bytes in arrivals:
        queue.add(traffic_class, num_bytes)
        most_urgent = min(each.traffic_class for each in queue.waiting)
        message, sent_bytes = queue.send(inf)
        if message.traffic_class > most_urgent:
            assert sent_bytes <= FLUSH_FACTOR * least


def random_view(rng: random.Random) -> LinkView:
    """Return a link with any rate and slack, the impossible ones included."""
    rate = rng.choice([0.0, inf, nan, rng.uniform(1, 1e4), 10 ** rng.uniform(0, 11)])
    slack = rng.choice(
        [None, 0.0, -0.0, inf, -inf, nan, rng.uniform(-1, 1), 10 ** rng.uniform(-9, 3)]
    )
    return LinkView(rng.uniform(0, 1e6), rate, slack)


def test_chunk_is_within_the_message_in_100000_random_cases() -> None:
    rng = random.Random(20251105)
    policies: list[DecodeFirstPolicy] = [MolinkPaperPolicy(), FixedChunkPolicy(), MolinkPolicy()]
    for number in range(100_000):
        policy = policies[number % len(policies)]
        left = rng.choice([1, rng.randint(1, 100), int(10 ** rng.uniform(0, 12))])
        chunk = policy.chunk_bytes(left, random_view(rng))
        forced = policy.forced_bytes(left)
        assert 1 <= chunk <= left
        assert 1 <= forced <= left
        assert type(chunk) is type(forced) is int


def test_chunk_is_the_budget_between_its_bounds() -> None:
    view = LinkView(0.0, 12.5e6, 0.01)
    assert MolinkPolicy().chunk_bytes(10**7, view) == 125_000
    assert MolinkPaperPolicy().chunk_bytes(10**7, view) == 125_000
    assert MolinkPolicy().chunk_bytes(10**7, LinkView(0.0, 12.5e6, -0.5)) == 16_384
    idle = LinkView(0.0, 12.5e6, None)
    assert MolinkPolicy().chunk_bytes(10**7, idle) == MAX_BYTES
    assert MolinkPaperPolicy().chunk_bytes(10**7, idle) == 10**7
    assert clamp_chunk(99.9, 1, 100) == 99


@settings(max_examples=num_examples(60, 3000), deadline=None)
@given(
    name=st.sampled_from(sorted(EVERY_LINK_POLICY)),
    arrivals=st.lists(
        st.tuples(st.sampled_from(TrafficClass), st.integers(1, 300_000), st.integers(0, 3)),
        min_size=1,
        max_size=30,
    ),
    slack=st.one_of(st.none(), st.floats(-1, 1)),
)
def test_every_policy_sends_each_byte_once_and_each_class_in_order(
    name: str, arrivals: list[tuple[TrafficClass, int, int]], slack: float | None
) -> None:
    queue = Queue(make_link_policy(EVERY_LINK_POLICY[name]), 1e6)
    messages: list[Message] = []
    finished: list[Message] = []

    def send() -> None:
        message, _ = queue.send(slack)
        if not message.remaining_bytes:
            finished.append(message)

    for traffic_class, num_bytes, num_sends in arrivals:
        messages.append(queue.add(traffic_class, num_bytes))
        for _ in range(num_sends):
            if queue.waiting:
                send()
    while queue.waiting:
        send()
    assert sorted(finished, key=messages.index) == messages
    if name != "concurrent":  # Shares of the link end with the shorter message first.
        for traffic_class in TrafficClass:
            numbers = [each.number for each in finished if each.traffic_class is traffic_class]
            assert numbers == sorted(numbers)


def test_concurrent_gives_each_message_a_turn() -> None:
    queue = Queue(ConcurrentPolicy(turn_bytes=100))
    queue.add(PREFILL, 250)
    queue.add(DECODE, 120)
    sent = [queue.send() for _ in range(2)]
    queue.add(KV_CACHE, 100)
    sent += [queue.send() for _ in range(4)]
    assert [(message.number, num_bytes) for message, num_bytes in sent] == [
        (0, 100), (1, 100), (2, 100), (0, 100), (1, 20), (0, 50)
    ]  # fmt: skip


def test_serial_sends_whole_messages_in_order() -> None:
    view = LinkView(0.0, 1.0, None)
    waiting = [Message(PREFILL, 900, 0), Message(DECODE, 10, 1)]
    assert SerialPolicy().select(waiting, view) == Chunk(0, 900)


def test_unknown_names_and_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="'lifo' is none of serial, molink"):
        make_link_policy("lifo")
    with pytest.raises(ValueError, match=r"has no class Serial: choose from SerialPolicy"):
        make_link_policy("gllm.pacing.policies.serial:Serial")
    with pytest.raises(ValueError, match=r"Message of module .* lacks uses_slack, .*: give it"):
        make_link_policy("tests.support.scheduler.link_messages:Message")
    for make in (
        lambda: ConcurrentPolicy(0),
        lambda: FixedChunkPolicy(0),
        lambda: FixedChunkPolicy(patience=0),
        lambda: MolinkPaperPolicy(0),
        lambda: MolinkPolicy(min_bytes=9, max_bytes=8),
    ):
        with pytest.raises(ValueError, match="give "):
            make()
