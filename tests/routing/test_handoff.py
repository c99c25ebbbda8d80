"""State machine of a hand-off: no state waits for ever, and holds are always released."""

import math
from copy import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gllm.routing.disaggregation.policy import EnginePair
from gllm.routing.handoff import (
    Handoff,
    HandoffAction,
    HandoffLimits,
    HandoffState,
    ReleaseHold,
    RenewHold,
)
from tests.support.examples import num_examples

LIMITS = HandoffLimits(renew_seconds=3, read_seconds=1, hold_seconds=10)
LEASE_SECONDS = 7.0
TICKET = 9


def prefilled(decode: str = "D", is_held: bool = True) -> Handoff:
    """Return a hand-off whose token 1 arrived at time 0."""
    handoff = Handoff(EnginePair("P", decode), TICKET, LIMITS)
    handoff.on_prefilled(0.0, is_held)
    return handoff


def test_the_states_of_a_transfer() -> None:
    handoff = prefilled()
    assert (handoff.state, handoff.waits_for) == (HandoffState.READY, "")
    assert handoff.on_read()
    assert (handoff.decode, handoff.is_held) == ("D", True)
    assert handoff.on_submitted("D") == []
    assert (handoff.state, handoff.waits_for) == (HandoffState.TRANSFER, "D")
    assert handoff.on_decoded() == [ReleaseHold("P", TICKET)]
    assert handoff.state is HandoffState.DECODE
    assert handoff.on_end() == []
    assert (handoff.state, handoff.outcome) == (HandoffState.DONE, "transferred")


def test_an_end_at_token_1_asks_nobody() -> None:
    handoff = prefilled()
    assert handoff.on_end() == [ReleaseHold("P", TICKET)]
    assert handoff.outcome == "ended"
    assert not handoff.on_read()
    assert handoff.on_decoded() == []


def test_a_slow_reader_and_a_slow_transfer_have_deadlines() -> None:
    handoff = prefilled()
    assert handoff.on_tick(0.9) == []
    assert handoff.on_tick(1.0) == []
    assert handoff.state is HandoffState.TRANSFER
    handoff.on_submitted("D")
    assert handoff.on_tick(3.0) == [RenewHold("P", TICKET)]
    assert handoff.on_tick(5.9) == []
    assert handoff.on_tick(6.0) == [RenewHold("P", TICKET)]
    assert handoff.on_tick(10.0) == [ReleaseHold("P", TICKET)]
    assert handoff.on_tick(20.0) == []
    assert handoff.state is HandoffState.TRANSFER


def test_blocks_that_are_gone_are_computed() -> None:
    handoff = prefilled()
    handoff.on_lost("P")
    assert handoff.on_read()
    assert (handoff.decode, handoff.is_held) == ("D", False)
    handoff = prefilled(is_held=False)
    assert handoff.on_read()
    assert (handoff.decode, handoff.is_held) == ("D", False)


def test_a_lost_decode_engine_is_replaced() -> None:
    handoff = prefilled()
    handoff.on_lost("D")
    assert handoff.on_given_back("D") == []
    assert handoff.on_read()
    assert (handoff.decode, handoff.is_held) == ("", True)
    # The engine that has the blocks in its prefix cache needs no transfer.
    assert handoff.on_submitted("P") == [ReleaseHold("P", TICKET)]


def test_blocks_are_fetched_again_after_the_death_of_their_receiver() -> None:
    handoff = prefilled()
    handoff.on_read()
    handoff.on_submitted("D")
    for engine in ("D", "E"):
        handoff.on_lost(engine)
        assert handoff.on_given_back(engine) == []
        assert (handoff.state, handoff.is_held) == (HandoffState.TRANSFER, True)
        assert (handoff.decode, handoff.waits_for) == ("", "")
        # The hold is kept while nobody has the request.
        assert handoff.on_tick(4.0 if engine == "D" else 8.0) == [RenewHold("P", TICKET)]
        assert handoff.on_submitted("E" if engine == "D" else "F") == []
    assert handoff.waits_for == "F"
    assert handoff.on_decoded() == [ReleaseHold("P", TICKET)]
    assert (handoff.state, handoff.outcome) == (HandoffState.DECODE, "transferred")


@pytest.mark.parametrize("event", ["P is lost", "too old", "decoding"])
def test_no_blocks_are_fetched_again_that_nobody_holds(event: str) -> None:
    """After the first token of the decode engine, the prefill engine has released them."""
    handoff = prefilled()
    handoff.on_read()
    handoff.on_submitted("D")
    match event:
        case "P is lost":
            handoff.on_lost("P")
        case "too old":
            assert handoff.on_tick(LIMITS.hold_seconds) == [ReleaseHold("P", TICKET)]
        case _:
            handoff.on_decoded()
    handoff.on_lost("D")
    assert handoff.on_given_back("D") == []
    outcome = "transferred" if event == "decoding" else "decode_failed"
    assert (handoff.state, handoff.outcome) == (HandoffState.DONE, outcome)


def test_a_prefetch_begins_with_the_prefill_and_is_adopted() -> None:
    handoff = Handoff(EnginePair("P", "D"), TICKET, LIMITS)
    assert not handoff.start_prefetch(0.0)
    handoff.on_readable()
    assert handoff.start_prefetch(0.0)
    assert handoff.decode == "D"
    assert not handoff.start_prefetch(0.0)
    assert handoff.on_tick(3.0) == [RenewHold("D", TICKET)]
    handoff.on_prefilled(4.0)
    assert handoff.on_read()
    assert (handoff.decode, handoff.is_held) == ("D", True)
    assert handoff.on_submitted("D") == []
    assert handoff.on_tick(7.0) == [RenewHold("P", TICKET)]
    assert handoff.on_decoded() == [ReleaseHold("P", TICKET)]


def test_a_prefetch_that_nobody_needs_is_released() -> None:
    for event in ("end", "given back", "elsewhere"):
        handoff = Handoff(EnginePair("P", "D"), TICKET, LIMITS)
        handoff.on_readable()
        handoff.start_prefetch(0.0)
        both = [ReleaseHold("D", TICKET), ReleaseHold("P", TICKET)]
        match event:
            case "end":
                assert handoff.on_end() == both
            case "given back":
                assert handoff.on_given_back("P") == both
            case _:
                handoff.on_prefilled(0.0)
                handoff.on_read()
                assert handoff.on_submitted("E") == both[:1]


@pytest.mark.parametrize("is_pushed_first", [True, False])
def test_a_prefetch_begins_once_the_decode_engine_is_chosen(is_pushed_first: bool) -> None:
    handoff = Handoff(EnginePair("P", None), TICKET, LIMITS)
    events = [handoff.on_readable, lambda: handoff.on_decode_chosen("D")]
    for event in events if is_pushed_first else events[::-1]:
        assert not handoff.start_prefetch(0.0)
        event()
    handoff.on_decode_chosen("E")
    assert handoff.start_prefetch(0.0)
    assert handoff.decode == "D"
    assert handoff.decode == "D"


def test_a_chosen_engine_that_is_lost_is_chosen_again() -> None:
    handoff = Handoff(EnginePair("P", None), TICKET, LIMITS)
    handoff.on_readable()
    handoff.on_decode_chosen("D")
    handoff.start_prefetch(0.0)
    handoff.on_lost("D")
    assert handoff.decode == ""
    handoff.on_decode_chosen("E")
    assert handoff.start_prefetch(0.0)
    assert handoff.decode == "E"


def test_an_engine_that_decodes_its_own_prompt_prefetches_nothing() -> None:
    handoff = Handoff(EnginePair("P", None), TICKET, LIMITS)
    handoff.on_readable()
    handoff.on_decode_chosen("P")
    assert not handoff.start_prefetch(0.0)
    handoff.on_prefilled(0.0)
    # Too late: `choose` decides.
    handoff.on_decode_chosen("E")
    assert handoff.on_read()
    assert (handoff.decode, handoff.is_held) == ("P", True)


class HandoffMachine(RuleBasedStateMachine):
    """Any order of events; a model of the prefill engine knows what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.held_until: float | None = None
        self.prefetched_until: dict[str, float] = {}
        """Ends of the leases of prefetches that no request has adopted, by engine."""
        self.alive = {"P", "D", "E"}
        self.has_request = "P"
        """Engine that has the request; empty while it is parked."""
        self.is_parked = False
        """True if the caller submits the request as any other one."""
        self.num_first_tokens = 0
        self.handoff = Handoff(EnginePair("P", "D"), TICKET, LIMITS)

    def execute(self, actions: list[HandoffAction]) -> None:
        for action in actions:
            match action:
                case ReleaseHold("P", ticket):
                    assert ticket == TICKET
                    self.held_until = None
                case ReleaseHold(engine, ticket):
                    assert ticket == TICKET
                    self.prefetched_until.pop(engine, None)
                case RenewHold("P", ticket):
                    assert ticket == TICKET
                    if self.held_until is not None:
                        self.held_until = self.now + LEASE_SECONDS
                case RenewHold(engine, ticket):
                    assert ticket == TICKET
                    self.prefetched_until[engine] = self.now + LEASE_SECONDS

    def start_prefetch(self) -> None:
        if self.handoff.start_prefetch(self.now):
            assert self.handoff.decode in self.alive
            self.prefetched_until[self.handoff.decode] = self.now + LEASE_SECONDS

    def start_decode(self) -> None:
        assert self.num_first_tokens == 1
        # A source is named only while the router may trust the hold.
        assert not self.handoff.is_held or "P" in self.alive
        self.submit(self.handoff.decode or min(self.alive, default=""))

    def submit(self, engine: str) -> None:
        self.is_parked = engine not in self.alive
        if not self.is_parked:
            self.has_request = engine
            self.prefetched_until.pop(engine, None)
            self.execute(self.handoff.on_submitted(engine))

    def acts(self, time: float) -> bool:
        """Return True if a tick at a time has commands, or lets the request go on."""
        handoff = copy(self.handoff)
        return bool(handoff.on_tick(time)) or handoff.state is not self.handoff.state

    @property
    def is_over(self) -> bool:
        return self.handoff.state is HandoffState.DONE

    @precondition(lambda self: self.handoff.state is HandoffState.PREFILL and "P" in self.alive)
    @rule(is_last=st.booleans(), is_held=st.booleans())
    def prefill(self, is_last: bool, is_held: bool) -> None:
        self.num_first_tokens += 1
        self.has_request = ""
        self.held_until = self.now + LEASE_SECONDS if is_held else None
        if is_last:
            self.execute(self.handoff.on_end())
            return
        self.handoff.on_prefilled(self.now, is_held)

    @rule()
    def start_push(self) -> None:
        self.handoff.on_readable()
        self.start_prefetch()

    @precondition(lambda self: self.alive - {"P"})
    @rule(data=st.data())
    def choose_decode(self, data: st.DataObject) -> None:
        self.handoff.on_decode_chosen(data.draw(st.sampled_from(sorted(self.alive - {"P"}))))
        self.start_prefetch()

    @rule()
    def read(self) -> None:
        if self.handoff.on_read():
            self.start_decode()

    @precondition(lambda self: self.is_parked and not self.is_over and self.alive)
    @rule()
    def dispatch_parked(self) -> None:
        self.submit(min(self.alive))

    @precondition(lambda self: self.handoff.state is HandoffState.TRANSFER and self.has_request)
    @rule()
    def decode(self) -> None:
        self.execute(self.handoff.on_decoded())

    @rule(seconds=st.floats(0.0, 4.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        was_ready = self.handoff.state is HandoffState.READY
        self.execute(self.handoff.on_tick(self.now))
        if was_ready and self.handoff.state is HandoffState.TRANSFER:
            self.start_decode()

    @rule(engine=st.sampled_from("PDE"))
    def lose(self, engine: str) -> None:
        self.alive.discard(engine)
        if engine == "P":
            self.held_until = None
        self.prefetched_until.pop(engine, None)
        self.handoff.on_lost(engine)
        self.give_back(engine)

    @rule(engine=st.sampled_from("PDE"))
    def give_back(self, engine: str) -> None:
        """The engine refuses the request, drains, or recovers for too long."""
        if self.has_request == engine:
            self.has_request = ""
            was_transfer = self.handoff.state is HandoffState.TRANSFER
            self.execute(self.handoff.on_given_back(engine))
            self.is_parked = was_transfer and self.handoff.is_held
            assert self.is_parked != self.is_over

    @rule()
    def abort(self) -> None:
        self.has_request = ""
        self.execute(self.handoff.on_end())

    @invariant()
    def holds_are_released(self) -> None:
        """No lease ends while its hold is of use, and nothing is held afterwards."""
        state = self.handoff.state
        if state in (HandoffState.DECODE, HandoffState.DONE):
            assert self.held_until is None
            assert not self.handoff.is_held
            assert not self.prefetched_until
        assert all(self.now <= each for each in self.prefetched_until.values())
        if self.held_until is not None and self.handoff.is_held:
            assert self.now <= self.held_until

    @invariant()
    def the_next_tick_is_the_first_one_that_acts(self) -> None:
        tick = self.handoff.next_tick
        assert not self.acts(math.nextafter(tick, -math.inf))
        assert self.acts(tick) == (tick < math.inf)

    @invariant()
    def an_engine_or_the_router_acts_next(self) -> None:
        """READY has a deadline; in other states the engine that is waited for has the request."""
        if self.handoff.state in (HandoffState.PREFILL, HandoffState.TRANSFER):
            assert self.is_parked or self.handoff.waits_for == self.has_request != ""

    def teardown(self) -> None:
        """Time alone releases the hold; the loss of all engines ends the hand-off."""
        for _ in range(8):
            self.wait(4.0)
        assert self.handoff.state is not HandoffState.READY
        if self.handoff.state is not HandoffState.PREFILL:
            assert self.held_until is None
        for engine in "PDE":
            self.lose(engine)
        assert self.held_until is None
        assert self.is_over or self.is_parked


TestHandoffMachine = HandoffMachine.TestCase
TestHandoffMachine.settings = settings(
    max_examples=num_examples(40, 1500), stateful_step_count=25, deadline=None
)
