"""Scripted workers that send steps through the data movers of two machines of a rig.

The data movers are real `gllm-link` processes; the workers write and read their rings at fixed
times and compute nothing, so that the times of the steps are those of the link alone.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

from benchmarks.net.rig import NamespaceRig
from gllm.runtime.head.link_process import LinkProcess
from gllm.transport.base import EdgeLayout
from gllm.transport.edge import create_edge
from gllm.transport.link.commands import LinkPeer, OpenLinkEdge
from gllm.transport.ring import Ring

RUN, EPOCH, EDGE = 1, 1, 0
DECODE, PREFILL = 0, 1
"""Lanes; with one lane both are lane 0."""
TIMEOUT_SECONDS = 60.0
"""Limit for the start of a process, and for the steps that are under way at the end."""
START_SECONDS = 0.01
"""Time between the start of the receivers and the first step."""
log = logging.getLogger(__name__)

T = TypeVar("T")


class ScriptedStep(NamedTuple):
    """A step that is sent at a fixed time."""

    seconds: float
    """Time after the beginning."""
    kind: int
    """DECODE or PREFILL."""
    num_tokens: int


@dataclass(frozen=True)
class TrafficPattern:
    """Decodes and prefills at fixed intervals."""

    seconds: float
    decode_tokens: int = 4
    decode_interval: float = 0.06
    """Seconds."""
    decode_seconds: float = 0.005
    """Time for which the worker computes before it sends a decode."""
    prefill_tokens: int = 1000
    """Tokens per prefill; 0: no prefills."""
    prefill_interval: float = 4.0
    """Seconds; the first prefill is sent a quarter of it after the beginning."""

    def make_steps(self) -> list[ScriptedStep]:
        """Return the steps in the order of their times."""
        interval = self.decode_interval
        steps = [
            ScriptedStep(number * interval, DECODE, self.decode_tokens)
            for number in range(round(self.seconds / interval))
        ]
        begin = self.prefill_interval / 4
        while self.prefill_tokens and begin < self.seconds:
            steps.append(ScriptedStep(begin, PREFILL, self.prefill_tokens))
            begin += self.prefill_interval
        return sorted(steps)


@dataclass
class HopLatencies:
    """Seconds from the signal of each step to its arrival in the other machine's ring."""

    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    num_overtaken: int = 0
    """Prefills that were overtaken by a decode."""
    num_overtaking: int = 0
    """Decodes that were sent after a prefill and arrived before it."""
    drop_share: float = 0.0
    """Packets that the hop dropped because its queue was full, of all packets."""


class LinkSetup(NamedTuple):
    """Options of an edge under test."""

    num_lanes: int
    """1: all steps in their order; 2: decodes and prefills apart."""
    policy: str
    """A name of LINK_POLICIES."""
    congestion: str
    """Congestion control of TCP."""


class RigLink:
    """An edge from machine 0 to machine 1 of a rig, from entering the context to leaving it.

    Args:
        rig: two machines; the hop of machine 1 is shaped, that of machine 0 is not.
        setup: options of the edge.
        layout: of both rings, or of the ring of both lanes.
    """

    def __init__(self, rig: NamespaceRig, setup: LinkSetup, layout: EdgeLayout) -> None:
        self.setup = setup
        self._rig, self._layout = rig, layout
        self._cleanup = ExitStack()
        self._sources: list[Ring] = []
        self._targets: list[Ring] = []
        self._next_turns = [0] * setup.num_lanes

    def __enter__(self) -> Self:
        try:
            machines = [_LinkMachine(self._rig, number, self.setup) for number in range(2)]
            for machine in machines:
                self._cleanup.callback(machine.close)
            self._connect(machines)
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._cleanup.close()

    def send(self, pattern: TrafficPattern) -> HopLatencies:
        """Send the steps of a pattern and wait until all have arrived.

        Raises:
            TimeoutError: a step has not arrived TIMEOUT_SECONDS after the last one was sent.
            RuntimeError: the link falls behind by more steps than the ring has slots.
        """
        steps = pattern.make_steps()
        lanes = [step.kind if self.setup.num_lanes > 1 else DECODE for step in steps]
        before = self._count_packets()
        receivers = []
        for lane, first in enumerate(self._next_turns):
            sizes = [step.num_tokens for step, own in zip(steps, lanes, strict=True) if own == lane]
            receivers.append(_LaneReceiver(self._targets[lane], first, sizes))
        sent, begin = [], time.monotonic() + START_SECONDS
        for step, lane in zip(steps, lanes, strict=True):
            turn, self._next_turns[lane] = self._next_turns[lane], self._next_turns[lane] + 1
            if step.kind == DECODE:
                _sleep_until(begin + step.seconds - pattern.decode_seconds)
                self._sources[DECODE].mark_begin(turn)
            _sleep_until(begin + step.seconds)
            receivers[lane].check_slot(turn)
            sent.append((step.kind, lane, turn, time.monotonic()))
            self._sources[lane].signal(turn, step.num_tokens)
        for receiver in receivers:
            receiver.join()
        times = [(kind, at, receivers[lane].times[turn]) for kind, lane, turn, at in sent]
        return _summarize(times, before, self._count_packets())

    def _connect(self, machines: "list[_LinkMachine]") -> None:
        """Open the edge and its rings. Raises TimeoutError."""
        for number, machine in enumerate(machines):
            num_lanes = self.setup.num_lanes
            edge = create_edge(f"rig-{number}", is_remote=True, num_lanes=num_lanes)
            self._cleanup.callback(edge.close)
            other = machines[1 - number]
            peer = LinkPeer(other.name, other.address, b"")
            is_sender = number == 0
            command = OpenLinkEdge(EPOCH, EDGE, is_sender, is_sender, peer, num_lanes)
            machine.call(partial(machine.link.open, command, edge))
            rings = self._sources if is_sender else self._targets
            for lane in range(num_lanes):
                memory, event = edge.lane_descriptors(lane)[:2]
                rings.append(Ring(memory, event, self._layout))
        if not machines[1].has_opened.wait(TIMEOUT_SECONDS):
            raise TimeoutError("the edge is not connected")

    def _count_packets(self) -> tuple[int, int]:
        """Return the numbers of packets that the hop has dropped and forwarded so far."""
        rows = self._rig.hop(1).counters().values()
        return sum(row["overflown"] for row in rows), sum(row["packets"] for row in rows)


class _LaneReceiver:
    """Worker that waits for the next steps of a lane and notes their times, on a thread."""

    def __init__(self, ring: Ring, first: int, sizes: Sequence[int]) -> None:
        self.times: dict[int, float] = {}
        """Times of arrival by turn."""
        self._ring, self._first, self._sizes = ring, first, sizes
        self._thread = threading.Thread(target=self._run, name="scripted-worker", daemon=True)
        self._thread.start()

    def check_slot(self, turn: int) -> None:
        """Check that the slot of a turn is free. Raises RuntimeError."""
        slots = self._ring.shape.slots
        if turn - self._first >= slots and turn - slots not in self.times:
            raise RuntimeError(f"more than {slots} steps are under way: the link is too slow")

    def join(self) -> None:
        """Wait for the last step. Raises TimeoutError."""
        self._thread.join(TIMEOUT_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"a step has not arrived after {TIMEOUT_SECONDS:.0f} s")

    def _run(self) -> None:
        for turn, num_tokens in enumerate(self._sizes, self._first):
            self._ring.wait(turn, num_tokens)
            self.times[turn] = time.monotonic()


def _sleep_until(moment: float) -> None:
    """Sleep until a time of time.monotonic."""
    time.sleep(max(0.0, moment - time.monotonic()))


def _summarize(
    times: "Sequence[tuple[int, float, float]]", before: tuple[int, int], after: tuple[int, int]
) -> HopLatencies:
    """Return the latencies of steps, from (kind, sent, arrived), and the share of drops."""
    latencies = HopLatencies()
    for kind, sent, arrived in times:
        (latencies.decode if kind == DECODE else latencies.prefill).append(arrived - sent)
    pairs = {
        (first, second)
        for first, (kind, sent, arrived) in enumerate(times)
        for second, (other, begin, end) in enumerate(times)
        if (kind, other) == (PREFILL, DECODE) and sent < begin and end < arrived
    }
    latencies.num_overtaken = len({prefill for prefill, _ in pairs})
    latencies.num_overtaking = len({decode for _, decode in pairs})
    dropped, forwarded = (new - old for new, old in zip(after, before, strict=True))
    latencies.drop_share = dropped / max(1, dropped + forwarded)
    return latencies


class _LinkMachine:
    """A data mover and the event loop of its owner, on a thread inside a machine of the rig."""

    def __init__(self, rig: NamespaceRig, machine: int, setup: LinkSetup) -> None:
        self.name = f"machine-{machine}"
        self.has_opened = threading.Event()
        self._rig, self._machine = rig, machine
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name=self.name, daemon=True).start()
        address = rig.addresses[machine]
        self.link = LinkProcess(
            self.name, f"{address}:0", congestion=setup.congestion, policy=setup.policy
        )
        self.call(partial(self.link.begin_run, RUN, self._on_opened, self._on_lost))
        port = self._wait_for(self.link.listen())
        self.address = f"{address}:{port}"

    def call(self, function: Callable[[], object]) -> None:
        """Run a function inside the machine."""

        async def run() -> None:
            function()

        self._wait_for(run())

    def close(self) -> None:
        """End the process and the thread."""
        self.call(self.link.close)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        with self._rig.inside(self._machine):
            self._loop.run_forever()
        self._loop.close()

    def _wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_SECONDS)

    def _on_opened(self, epoch: int, edge: int) -> None:
        self.has_opened.set()

    def _on_lost(self, epoch: int, edge: int, cause: str) -> None:
        log.error("the link between the machines is lost: %s", cause)
