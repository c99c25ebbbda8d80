"""Return times of conversations: when and how likely the next request of a conversation arrives.

A conversation is idle from the end of a request until the next one that continues it. `ReturnTimes`
estimates the distribution of these idle times from those that it has observed, per client (API key)
and per kind of conversation. It bounds its memory whatever names clients send. Pure: time is an
argument.

As with Kaplan and Meier ("Nonparametric Estimation from Incomplete Observations", 1958), a
conversation that is still idle, or whose record was dropped, counts for the idle times that it has
reached. Counting only the conversations that have returned would make all others look certain to
return.

A rate of returns that rises with the idle time, or differs between kinds, departs from the order of
least-recently-used eviction. It is believed where the observations show it, and not where it may be
chance: a few hundred observations in dozens of bins would otherwise order conversations by noise.
Where the rate falls with the idle time, bins are pooled until it does (the pool of adjacent
violators: Ayer and others, "An Empirical Distribution Function for Sampling with Incomplete
Information", 1955).
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from math import log, sqrt
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
"""Conversations that the estimate of the next larger group counts as, in that of a group."""
MIN_DEVIATIONS = 3.0
"""Standard deviations above chance from which on the rate of returns rises with the idle time."""
MIN_EVIDENCE = 10.0
"""Logarithm of the likelihood ratio from which on a group differs from the next larger one."""
MAX_HAZARD = 0.999
"""Largest probability of a return within one bin."""
ROUNDING = 1e-9
"""Relative difference of two values below which they are equal."""
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
RETURNED = -2
"""All kinds of conversations that have returned, together. Those that never have are none of them:
single requests say nothing about agents."""
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
NO_BINS = (0,) * NUM_BINS
"""Counts by bin of no conversations."""


class _Exposure(NamedTuple):
    """Returns, and the idle time in which they happened."""

    returned: float
    seconds: float
    """Idle time of all conversations, those without a return included."""
    num_bins: int = 1

    def join(self, other: "_Exposure") -> "_Exposure":
        """Return the exposure in the bins of both."""
        return _Exposure(
            self.returned + other.returned,
            self.seconds + other.seconds,
            self.num_bins + other.num_bins,
        )

    @property
    def rate(self) -> float:
        """Returns per second."""
        return self.returned / self.seconds

    def is_exceeded_by(self, later: "_Exposure") -> bool:
        """Return True if the rate of later bins is above this one by more than chance."""
        if later.rate <= self.rate:
            return False
        # With equal rates each return falls into the later bins with this probability.
        share = later.seconds / (self.seconds + later.seconds)
        total = self.returned + later.returned
        excess = later.returned - total * share
        return excess > MIN_DEVIATIONS * sqrt(total * share * (1 - share))


def estimate_rates(
    counts: ReturnCounts, open_counts: Sequence[int], prior: Sequence[float]
) -> list[float]:
    """Return the returns per second of idle conversations in each bin.

    The rate never rises from a bin to the next one unless the observations show it beyond chance.

    Args:
        counts: finished observations of a group.
        open_counts: number of idle conversations of the group that have passed the bin.
        prior: rates of the next larger group, or those that are assumed of all. They are returned
            unless the observations contradict them.
    """
    exposures = _count_exposures(counts, open_counts)
    blocks: list[_Exposure] = []
    for exposure, rate, width in zip(exposures, prior, BIN_SECONDS, strict=True):
        num_returned = PRIOR_COUNT * hazard_in(rate, width)
        assumed = _Exposure(num_returned, (PRIOR_COUNT - num_returned / 2) * width, num_bins=0)
        blocks.append(exposure.join(assumed))
        while len(blocks) > 1 and blocks[-1].rate > blocks[-2].rate:
            if blocks[-2].is_exceeded_by(blocks[-1]):
                break
            blocks[-2:] = [blocks[-2].join(blocks[-1])]
    own = [block.rate for block in blocks for _ in range(block.num_bins)]
    evidence = sum(
        exposure.returned * log(rate / other) - exposure.seconds * (rate - other)
        for exposure, rate, other in zip(exposures, own, prior, strict=True)
    )
    return own if evidence > MIN_EVIDENCE else list(prior)


def _count_exposures(counts: ReturnCounts, open_counts: Sequence[int]) -> list[_Exposure]:
    """Return the observations of each bin; a return is at half of its bin on average."""
    return [
        _Exposure(returned, (reached + num_open - returned / 2) * width)
        for returned, reached, num_open, width in zip(
            counts.returned, counts.reached, open_counts, BIN_SECONDS, strict=True
        )
    ]


def hazard_in(rate: float, width: float) -> float:
    """Return the probability of a return within a bin of a width in seconds; below 1."""
    return min(rate * width / (1 + rate * width / 2), MAX_HAZARD)


def index_returns(rates: Sequence[float]) -> list[float]:
    """Return the value of keeping a conversation's blocks by the bin of its idle time so far.

    The value is the largest expected number of returns per second of keeping, over all times after
    which one could give up: max over t of P(return within t) / E[min(return, t)], the index of
    Gittins ("Bandit Processes and Dynamic Allocation Indices", 1979). It is above the rate of
    returns where a return becomes more likely later, as shortly before a tool answers, and equals
    it elsewhere.

    Args:
        rates: returns per second in each bin, above 0.

    Returns:
        Returns per second for each bin.
    """
    values = []
    for start, rate in enumerate(rates):
        idle, seconds, best = 1.0, 0.0, rate
        for later, width in zip(rates[start:], BIN_SECONDS[start:], strict=True):
            hazard = hazard_in(later, width)
            seconds += idle * width * (1 - hazard / 2)
            idle *= 1 - hazard
            # Equal rates give equal values, whatever their rounding.
            if (value := (1 - idle) / seconds) > best * (1 + ROUNDING):
                best = value
        values.append(best)
    return values


PRIOR_RATES = tuple(
    hazard / (width * (1 - hazard / 2))
    for hazard, width in zip(PRIOR_HAZARDS, BIN_SECONDS, strict=True)
)
"""Returns per second in each bin, before anything is observed."""


class _IdleConversation(NamedTuple):
    group: ConversationGroup
    begin: float
    """Time at which its last request ended."""


@dataclass
class _Client:
    kinds: dict[int, ReturnCounts] = field(default_factory=dict)
    """Counts by kind, RETURNED included."""
    idle: "OrderedDict[bytes, _IdleConversation]" = field(default_factory=OrderedDict)
    """Idle conversations, those that have been idle for longest first."""
    passed: tuple[float, dict[int, list[int]]] | None = None
    """Last result of `count_passed` and its time."""

    def count_passed(self, now: float) -> dict[int, list[int]]:
        """Return how many idle conversations of each kind have passed each bin.

        RETURNED is included. Counts of the last second are reused.
        """
        if self.passed is None or not 0 <= now - self.passed[0] < REFRESH_SECONDS:
            by_kind: dict[int, list[int]] = {}
            for group, begin in self.idle.values():
                counts = by_kind.setdefault(group.kind, [0] * NUM_BINS)
                counts[age_bin(now - begin)] += 1
            passed = {kind: _count_later(counts) for kind, counts in by_kind.items()}
            passed[RETURNED] = _add_up(
                counts for kind, counts in passed.items() if kind != FIRST_REQUEST
            )
            self.passed = now, passed
        return self.passed[1]


class ReturnTimes:
    """Learns the idle times of conversations, and values blocks by them.

    A conversation is known by the name that its requests have, or else by the prompt: a request
    whose prompt begins with that of an earlier one continues its conversation.
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        """By name, the least recently active one first."""
        self._all = {FIRST_REQUEST: ReturnCounts(), RETURNED: ReturnCounts()}
        """Counts of all clients by kind."""
        self._num_idle = 0
        self._common_rates: dict[int, tuple[float, list[float]]] = {}
        """Time of the last estimate for all clients, and rate by bin, by kind as in `_all`."""
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

    def rates(self, group: ConversationGroup, now: float) -> list[float]:
        """Return the returns per second of a group's idle conversations in each bin, above 0.

        They are those of all clients unless the observations of the client contradict them. For
        conversations that have returned before, they are then those of all kinds unless the
        observations of the kind contradict them.

        Args:
            group: the group.
            now: time in seconds.
        """
        common = FIRST_REQUEST if group.kind == FIRST_REQUEST else RETURNED
        rates = self._estimate_common_rates(common, now)
        state = self._clients.get(group.client)
        if state is not None:
            passed = state.count_passed(now)
            for kind in dict.fromkeys((common, group.kind)):
                counts = state.kinds.get(kind, NO_COUNTS)
                rates = estimate_rates(counts, passed.get(kind, NO_BINS), rates)
        return rates

    def _estimate_common_rates(self, kind: int, now: float) -> list[float]:
        """Return the rates of all clients; estimates of the last second are reused."""
        time, rates = self._common_rates.get(kind, (0.0, []))
        if not rates or not 0 <= now - time < REFRESH_SECONDS:
            passed = (client.count_passed(now) for client in self._clients.values())
            num_open = _add_up(counts[kind] for counts in passed if kind in counts)
            rates = estimate_rates(self._all[kind], num_open, PRIOR_RATES)
            self._common_rates[kind] = now, rates
        return rates

    def values(self, group: ConversationGroup, now: float) -> list[float]:
        """Return the value of keeping blocks of a group by the bin of its idle time.

        See `index_returns`. Estimates of the last second are reused.
        """
        time, values = self._values.get(group, (0.0, []))
        if not values or not 0 <= now - time < REFRESH_SECONDS:
            values = index_returns(self.rates(group, now))
            if len(self._values) > MAX_CLIENTS * NUM_BINS:
                self._values.clear()
            self._values[group] = now, values
        return values

    def _observe(
        self, state: _Client, group: ConversationGroup, last_bin: int, has_returned: bool
    ) -> None:
        common = FIRST_REQUEST if group.kind == FIRST_REQUEST else RETURNED
        self._all[common].observe(last_bin, has_returned)
        for kind in {common, group.kind}:
            state.kinds.setdefault(kind, ReturnCounts()).observe(last_bin, has_returned)

    def _forget_client(self, name: str) -> None:
        self._num_idle -= len(self._clients.pop(name).idle)


def _session_key(session: str) -> bytes:
    return blake2b(session.encode(errors="replace"), digest_size=KEY_BYTES).digest()


def _add_up(counts: Iterable[Sequence[int]]) -> list[int]:
    """Return the sum of counts by bin."""
    return [sum(values) for values in zip(NO_BINS, *counts, strict=True)]


def _count_later(num_at: list[int]) -> list[int]:
    """Return the sum of the later bins' counts for each bin."""
    later, total = [0] * len(num_at), 0
    for index in range(len(num_at) - 1, -1, -1):
        later[index] = total
        total += num_at[index]
    return later
