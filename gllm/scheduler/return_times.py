"""Return times of conversations: when and how likely the next request of a conversation arrives.

A conversation is idle from the end of a request until the next one that continues it. `ReturnTimes`
estimates the distribution of these idle times from those that it has observed, per client (API key)
and per kind of conversation. It bounds its memory whatever names clients send. Pure: time is an
argument.

The estimate is that of Kaplan and Meier ("Nonparametric Estimation from Incomplete Observations",
1958): a conversation that is still idle, or whose record was dropped, counts for the ages that it
has reached. Counting only the conversations that have returned would make all others look certain
to return.
"""

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

FIRST_EDGE_SECONDS = 0.5
"""End of the first bin of idle times."""
BINS_PER_OCTAVE = 2
NUM_BINS = 28
"""Bins of idle times; the last one begins after 4096 s."""
AGE_EDGES = (
    0.0,
    *(FIRST_EDGE_SECONDS * 2 ** (index / BINS_PER_OCTAVE) for index in range(NUM_BINS - 1)),
)
"""First idle time of each bin in seconds."""
BIN_SECONDS = (
    *(end - begin for begin, end in pairwise(AGE_EDGES)),
    AGE_EDGES[-1],
)
"""Width of each bin; the last one is counted as if it ended at twice its begin."""

PRIOR_HAZARDS = (0.15, *[0.05] * (NUM_BINS - 1))
"""Share of the conversations that return within each bin, before anything is observed. Bins grow
with the idle time, so a return per second is the less likely the longer a conversation is idle, as
least-recently-used eviction assumes. The first bin begins at 0 and is wider than the next one."""
PRIOR_COUNT = 4.0
"""Observations that the estimate of the next larger group counts as, in that of a group."""
MAX_COUNT = 512.0
"""Observations after which older ones lose half of their weight, so that estimates follow changes.
"""
KEY_BYTES = 16
"""Size of the digest of a conversation's name."""
MAX_CLIENTS = 64
MAX_CONVERSATIONS = 4096
"""Most idle conversations whose return is awaited, over all clients."""
REFRESH_SECONDS = 1.0
"""Time between two estimates of one group."""

FIRST_REQUEST = -1
"""Kind of a conversation that has not returned yet."""
BINS_PER_KIND = 4
"""Bins of the last idle time that make one kind: two octaves."""


def age_bin(seconds: float) -> int:
    """Return the bin of an idle time."""
    return max(0, bisect_right(AGE_EDGES, seconds) - 1)


class ConversationGroup(NamedTuple):
    """Conversations of one kind, whose idle times are expected to be distributed alike."""

    client: str
    """Name of the client, such as the number of its API key; empty without keys."""
    kind: int
    """FIRST_REQUEST, or a coarse bin of the last idle time: tools that took 30 s take about as long
    again, and people who read for minutes do so again."""


UNKNOWN_GROUP = ConversationGroup("", FIRST_REQUEST)
"""Group of blocks whose conversation is unknown."""


@dataclass
class ReturnCounts:
    """Observed idle times of a group, by bin."""

    returned: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    """Conversations that returned in the bin."""
    reached: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    """Conversations that were still idle at the begin of the bin and known until they returned or
    the bin ended."""

    def observe(self, last_bin: int, has_returned: bool) -> None:
        """Count a conversation that was idle up to a bin.

        Args:
            last_bin: bin in which it returned, or after whose begin nothing is known.
            has_returned: True if it returned.
        """
        for index in range(last_bin + has_returned):
            self.reached[index] += 1
        if has_returned:
            self.returned[last_bin] += 1
        if self.reached[0] > MAX_COUNT:
            self.returned = [count / 2 for count in self.returned]
            self.reached = [count / 2 for count in self.reached]


NO_COUNTS = ReturnCounts()
"""Counts of a kind without observations."""


def estimate_hazards(
    counts: ReturnCounts, open_counts: list[int], prior: list[float]
) -> list[float]:
    """Return the probability by bin that a conversation that is idle at its begin returns in it.

    Args:
        counts: finished observations.
        open_counts: number of idle conversations that have passed the bin.
        prior: hazards of the next larger group. What is known of a bin limits what is assumed of
            the next one: conversations that have not returned for long would otherwise look better
            than those of which there are observations.
    """
    hazards: list[float] = []
    for returned, reached, num_open, share in zip(
        counts.returned, counts.reached, open_counts, prior, strict=True
    ):
        assumed = min(share, hazards[-1]) if hazards else share
        hazards.append((returned + PRIOR_COUNT * assumed) / (reached + num_open + PRIOR_COUNT))
    return hazards


def index_returns(hazards: list[float]) -> list[float]:
    """Return the value of keeping a conversation's blocks by the bin of its idle time so far.

    The value is the largest expected number of returns per second of keeping, over all times after
    which one could give up: max over t of P(return within t) / E[min(return, t)], the index of
    Gittins ("Bandit Processes and Dynamic Allocation Indices", 1979). It is above the plain rate
    of returns where a return becomes more likely later, as shortly before a tool answers.

    Returns:
        Returns per second for each bin, above 0.
    """
    values = []
    for start in range(NUM_BINS):
        idle, seconds, best = 1.0, 0.0, 0.0
        for hazard, width in zip(hazards[start:], BIN_SECONDS[start:], strict=True):
            # Those who return in the bin do so at half of it on average.
            seconds += idle * width * (1 - hazard / 2)
            idle *= 1 - hazard
            best = max(best, (1 - idle) / seconds)
        values.append(best)
    return values


class _IdleConversation(NamedTuple):
    group: ConversationGroup
    begin: float
    """Time at which its last request ended."""


@dataclass
class _Client:
    counts: ReturnCounts = field(default_factory=ReturnCounts)
    """Counts of all kinds."""
    kinds: dict[int, ReturnCounts] = field(default_factory=dict)
    idle: "OrderedDict[bytes, _IdleConversation]" = field(default_factory=OrderedDict)
    """Idle conversations, those that have been idle for longest first."""
    passed: tuple[float, list[int], dict[int, list[int]]] | None = None
    """Last result of `count_passed` and its time."""

    def count_passed(self, now: float) -> tuple[list[int], dict[int, list[int]]]:
        """Return how many idle conversations have passed each bin: all, and those of each kind.

        Counts of the last second are reused.
        """
        if self.passed is None or not 0 <= now - self.passed[0] < REFRESH_SECONDS:
            by_kind: dict[int, list[int]] = {}
            for group, begin in self.idle.values():
                counts = by_kind.setdefault(group.kind, [0] * NUM_BINS)
                counts[age_bin(now - begin)] += 1
            passed = {kind: _count_later(counts) for kind, counts in by_kind.items()}
            total = [sum(counts) for counts in zip([0] * NUM_BINS, *passed.values(), strict=True)]
            self.passed = now, total, passed
        return self.passed[1:]


class ReturnTimes:
    """Learns the idle times of conversations, and values blocks by them.

    A conversation is known by the name that its requests have, or else by the prompt: a request
    whose prompt begins with that of an earlier one continues its conversation.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        """By name, the least recently active one first."""
        self._all = ReturnCounts()
        """Counts of all clients."""
        self._num_idle = 0
        self._values: dict[ConversationGroup, tuple[float, list[float]]] = {}
        """Time of the estimate, and value by bin."""

    @property
    def num_idle(self) -> int:
        """Number of idle conversations whose return is awaited; at most MAX_CONVERSATIONS."""
        return self._num_idle

    @property
    def num_clients(self) -> int:
        """Number of clients with observations; at most MAX_CLIENTS."""
        return len(self._clients)

    def on_arrival(
        self, client: str, session: str, block_hashes: list[bytes], now: float
    ) -> ConversationGroup:
        """Observe the arrival of a request; return the group of its conversation after its end.

        Args:
            client: name of the client.
            session: name of the conversation among those of the client; empty for none.
            block_hashes: prefix-cache hashes of the full blocks of its prompt.
            now: time in seconds.
        """
        state = self._clients.get(client)
        if state is None:
            return ConversationGroup(client, FIRST_REQUEST)
        self._clients.move_to_end(client)
        keys = [_session_key(session)] if session else reversed(block_hashes)
        key = next((key for key in keys if key in state.idle), None)
        if key is None:
            return ConversationGroup(client, FIRST_REQUEST)
        conversation = state.idle.pop(key)
        self._num_idle -= 1
        idle_bin = age_bin(now - conversation.begin)
        self._observe(state, conversation.group, idle_bin, has_returned=True)
        return ConversationGroup(client, idle_bin // BINS_PER_KIND)

    def on_end(
        self, group: ConversationGroup, session: str, last_hash: bytes | None, now: float
    ) -> None:
        """Await the return of a conversation whose request has ended.

        Args:
            group: group of the conversation, from `on_arrival`.
            session: name of the conversation; empty for none.
            last_hash: prefix-cache hash of the last full block of the prompt; None without one.
            now: time in seconds.
        """
        key = _session_key(session) if session else last_hash
        if key is None:
            return
        state = self._clients.get(group.client)
        if state is None:
            state = self._clients[group.client] = _Client()
            if len(self._clients) > MAX_CLIENTS:
                self._forget_client(next(iter(self._clients)))
        if state.idle.pop(key, None) is None:
            self._num_idle += 1
        state.idle[key] = _IdleConversation(group, now)
        while self._num_idle > MAX_CONVERSATIONS:
            # Names of one client never displace more than its share.
            largest = max(self._clients.values(), key=lambda client: len(client.idle))
            _, oldest = largest.idle.popitem(last=False)
            self._num_idle -= 1
            self._observe(largest, oldest.group, age_bin(now - oldest.begin), has_returned=False)

    def hazards(self, group: ConversationGroup, now: float) -> list[float]:
        """Return the probability of a return in each bin, for those idle at its begin; 0 < p < 1.

        Args:
            group: the group.
            now: time in seconds.
        """
        state = self._clients.get(group.client)
        hazards = estimate_hazards(self._all, [0] * NUM_BINS, list(PRIOR_HAZARDS))
        if state is None:
            return hazards
        passed, passed_by_kind = state.count_passed(now)
        hazards = estimate_hazards(state.counts, passed, hazards)
        counts = state.kinds.get(group.kind, NO_COUNTS)
        return estimate_hazards(counts, passed_by_kind.get(group.kind, [0] * NUM_BINS), hazards)

    def values(self, group: ConversationGroup, now: float) -> list[float]:
        """Return the value of keeping blocks of a group by the bin of its idle time.

        See `index_returns`. Estimates of the last second are reused.
        """
        time, values = self._values.get(group, (0.0, []))
        if not values or not 0 <= now - time < REFRESH_SECONDS:
            values = index_returns(self.hazards(group, now))
            if len(self._values) > MAX_CLIENTS * NUM_BINS:
                self._values.clear()
            self._values[group] = now, values
        return values

    def _observe(
        self, state: _Client, group: ConversationGroup, last_bin: int, has_returned: bool
    ) -> None:
        for counts in (self._all, state.counts, state.kinds.setdefault(group.kind, ReturnCounts())):
            counts.observe(last_bin, has_returned)

    def _forget_client(self, name: str) -> None:
        self._num_idle -= len(self._clients.pop(name).idle)


def _session_key(session: str) -> bytes:
    return blake2b(session.encode(errors="replace"), digest_size=KEY_BYTES).digest()


def _count_later(num_at: list[int]) -> list[int]:
    """Return the sum of the later bins' counts for each bin."""
    later, total = [0] * len(num_at), 0
    for index in range(len(num_at) - 1, -1, -1):
        later[index] = total
        total += num_at[index]
    return later
