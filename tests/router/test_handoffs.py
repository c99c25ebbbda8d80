"""Hand-offs of a router: a message costs what is due, not what is running."""

import copy
import math
from collections import Counter
from functools import partial
from random import Random
from typing import Any

import pytest

from gllm.messages.handoff import HandOffSequence, ReleaseKvHolds, RenewKvHolds
from gllm.messages.requests import EngineOutputs, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.router.client import FleetClient
from gllm.router.dispatch_target import KvPeer
from gllm.router.handoffs import Handoffs, TicketDeadlines
from gllm.routing.engine_losses import LossKind
from gllm.routing.handoff import HandoffLimits, HandoffState, ReleaseHold, RenewHold
from gllm.runtime.head.request_stream import RequestStream
from gllm.scheduler.plan import FinishedSequence, SchedulerStats, StepOutput
from tests.support.engines.kv_engines import FixedPair
from tests.support.work import count_lines

LIMITS = HandoffLimits(renew_seconds=5, read_seconds=1, hold_seconds=12)
READY, TRANSFER = HandoffState.READY, HandoffState.TRANSFER


class Rig:
    """A client with an engine for each phase, and a clock that the test moves."""

    def __init__(self, has_pairs: bool = True) -> None:
        self.now = 0.0
        self.client = FleetClient(
            lambda stream, names: min(names),
            pairs=FixedPair() if has_pairs else None,
            clock=lambda: self.now,
            handoff_limits=LIMITS,
        )
        self.handoffs = self.client.handoffs
        self.commands: list[Any] = []
        """Commands about held blocks, with the names of their engines."""
        self.tickets: dict[int, int] = {}
        """Tickets of prefills by wire id."""
        self.submitted: list[SubmitRequest] = []
        for name in "PD":
            self.attach(name)

    def attach(self, name: str, numerics: str = "x", accepts_moves: bool = True) -> None:
        def note(command: Any) -> None:
            self.commands.append((name, command))

        peer = KvPeer(
            1, lambda: b"address", note, accepts_prefetches=True, accepts_moves=accepts_moves
        )
        self.client.attach(name, numerics, self._on_submission, peer)

    def _on_submission(self, message: Any) -> None:
        if isinstance(message, SubmitRequest):
            self.tickets[message.seq] = message.kv_ticket
            self.submitted.append(message)

    def submit(self) -> RequestStream:
        return self.client.submit([1, 2, 3], SequenceSamplingParams(), 8, [])

    def report(self, engine: str, stream: RequestStream, ticket: int = 0) -> None:
        """Report a token, and the end of the prefill if there is a ticket."""
        (seq,) = stream.entry.seqs.values()
        ends = [FinishedSequence(seq, "length", kv_ticket=ticket)] if ticket else []
        step = StepOutput([seq], [7], [], ends)
        self.client.on_outputs(engine, EngineOutputs(step, SchedulerStats()))

    def prefill(self, stream: RequestStream) -> None:
        """Let P report token 1, which is not read."""
        (seq,) = stream.entry.seqs.values()
        self.report("P", stream, self.tickets[seq])

    def streams_in(self, state: HandoffState) -> list[RequestStream]:
        return [s for s, each in self.handoffs.running.items() if each.state is state]


NUM_LINES = 300
"""More lines than a message needs that visits a hand-off, fewer than visits to all of a state."""


def test_messages_visit_due_hand_offs_alone() -> None:
    rig = Rig()
    streams = [rig.submit() for _ in range(1000)]
    for stream in streams[:500]:
        rig.prefill(stream)
        stream.pop_deltas()
    rig.client.continue_handoffs()
    for stream in streams[:200]:
        rig.report("D", stream)
    assert len(rig.streams_in(HandoffState.PREFILL)) == 500
    assert len(rig.streams_in(TRANSFER)) == 300
    assert len(rig.streams_in(HandoffState.DECODE)) == 200

    def has_unread() -> bool:
        return rig.handoffs.has_unread

    def continue_at(now: float) -> int:
        rig.now = now
        return count_lines(rig.client.continue_handoffs)

    # The deadline of the readers, who have read: once for all that had one.
    assert continue_at(LIMITS.read_seconds) > 500
    for i in range(100):
        assert continue_at(LIMITS.read_seconds + 0.01 * i) < NUM_LINES
    assert not has_unread()
    for stream in streams[500:503]:
        assert count_lines(partial(rig.prefill, stream)) < NUM_LINES
    assert has_unread()
    assert continue_at(2.5) < NUM_LINES, "nobody has read"
    streams[501].pop_deltas()
    assert continue_at(2.6) < NUM_LINES
    assert rig.handoffs.state_of(streams[501]) is TRANSFER
    assert len(rig.streams_in(READY)) == 2
    assert continue_at(4.0) < 2 * NUM_LINES
    assert not has_unread(), "two readers are late"
    assert continue_at(LIMITS.renew_seconds) > 300
    assert len([c for _, c in rig.commands if isinstance(c, RenewKvHolds)]) == 300
    assert continue_at(LIMITS.renew_seconds + 0.01) < NUM_LINES


def end_prefill(rig: Rig, stream: RequestStream, reason: str) -> None:
    """Let P report the token and the end of the first choice of a request."""
    seq = stream.entry.seqs[0]
    ends = [FinishedSequence(seq, reason, kv_ticket=rig.tickets[seq])]
    rig.client.on_outputs("P", EngineOutputs(StepOutput([seq], [7], [], ends), SchedulerStats()))


def test_a_prompt_of_several_choices_is_prefilled_once_and_all_are_sampled_where_they_decode() -> (
    None
):
    rig = Rig()
    stream = rig.client.submit([1, 2, 3], SequenceSamplingParams(), 8, [], 2)
    end_prefill(rig, stream, "length")
    assert not stream.deltas, "the token is that of one choice"
    rig.client.continue_handoffs()
    assert rig.streams_in(TRANSFER) == [stream]
    assert (stream.entry.engine, set(stream.entry.seqs)) == ("D", {0, 1})


def test_an_error_of_a_prompt_is_that_of_all_choices() -> None:
    rig = Rig()
    stream = rig.client.submit([1, 2, 3], SequenceSamplingParams(), 8, [], 2)
    end_prefill(rig, stream, "error")
    ends = {choice: delta.end for choice, delta in stream.pop_deltas().items()}
    assert [end and end.finish_reason for end in ends.values()] == ["error"] * 2
    assert not stream.alive
    assert not rig.handoffs.running
    assert not rig.handoffs.tickets


def expected_actions(handoffs: Handoffs, now: float) -> tuple[Counter[str], set[RequestStream]]:
    """Return commands and continued requests of a visit to every hand-off."""
    commands: Counter[str] = Counter()
    streams = set()
    for stream, each in handoffs.running.items():
        handoff = copy.copy(each)
        was_reading = handoff.state is READY
        is_read = was_reading and not stream.deltas
        actions = [] if is_read and handoff.on_read() else handoff.on_tick(now)
        for action in actions:
            match action:
                case RenewHold(engine, ticket):
                    commands[f"renew {engine} {ticket}"] += 1
                case ReleaseHold(engine, ticket):
                    commands[f"release {engine} {ticket}"] += 1
        if was_reading and handoff.state is TRANSFER:
            streams.add(stream)
    return commands, streams


def sent_actions(commands: list[Any]) -> Counter[str]:
    sent: Counter[str] = Counter()
    for engine, command in commands:
        if isinstance(command, RenewKvHolds | ReleaseKvHolds):
            kind = "renew" if isinstance(command, RenewKvHolds) else "release"
            sent[f"{kind} {engine} {command.tickets[0]}"] += 1
    return sent


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(n, marks=pytest.mark.full) for n in range(5, 20))]
)
def test_due_hand_offs_do_what_a_visit_to_all_does(
    seed: int,
) -> None:
    rig, rng = Rig(), Random(seed)
    streams: list[RequestStream] = []
    seen: Counter[str] = Counter()
    for _ in range(400):
        rig.now += rng.choice([0.0, 0.01, 0.4, 2.0])
        alive = [stream for stream in streams if stream.alive]
        match rng.randrange(8):
            case 0 | 1:
                streams.append(rig.submit())
            case 2 if prefills := rig.streams_in(HandoffState.PREFILL):
                rig.prefill(rng.choice(prefills))
            case 3 if alive:
                rng.choice(alive).pop_deltas()
            case 4 if transfers := [s for s in rig.streams_in(TRANSFER) if s.entry.seqs]:
                rig.report(transfers[0].entry.engine, transfers[0])
            case 5 if prefills := rig.streams_in(HandoffState.PREFILL):
                ticket = rig.handoffs.running[rng.choice(prefills)].ticket
                rig.handoffs.on_readable("P", ticket, rig.now)
            case 6 if alive and rng.random() < 0.5:
                rig.client.abort(rng.choice(alive), [0])
            case 7 if rng.random() < 0.1:
                name = rng.choice("PD")
                rig.client.detach(name, "killed", LossKind.PLANNED)
                rig.attach(name)
        assert rig.handoffs.has_unread == bool(rig.streams_in(READY))
        expected, continued = expected_actions(rig.handoffs, rig.now)
        rig.commands.clear()
        read = rig.handoffs.pop_read(rig.now)
        assert set(read) == continued
        assert len(read) == len(continued)
        assert sent_actions(rig.commands) == expected
        seen.update({kind.split()[0]: n for kind, n in expected.items()}, read=len(read))
        if read:
            rig.client.dispatch_parked()
    assert seen["read"], "hand-offs went on"
    assert seen["renew"], "holds were renewed"
    assert seen["release"], "holds were released"


def test_deadlines_are_those_set_last() -> None:
    rng = Random(0)
    deadlines, expected = TicketDeadlines(), dict[int, float]()
    num_due = 0
    for now in range(300):
        for _ in range(rng.randrange(6)):
            ticket = rng.randrange(20)
            deadline = rng.choice([math.inf, float(now), now + rng.random() * 30])
            deadlines.set(ticket, deadline)
            expected[ticket] = deadline
        due = [each for each in expected if expected[each] <= now]
        assert deadlines.pop_due(now) == sorted(due, key=lambda each: (expected[each], each))
        num_due += len(due)
        for each in due:
            del expected[each]
    assert num_due > 100
    deadlines.pop_due(math.inf)
    assert deadlines.pop_due(math.inf) == []


def start_move(rig: Rig, stream: RequestStream) -> HandOffSequence:
    """Let D, the only engine so far, get a token of the request, and drain it."""
    rig.report("D", stream)
    stream.pop_deltas()
    rig.attach("E")
    assert rig.client.migrate("D") == 1
    (name, command) = rig.commands[-1]
    assert (name, type(command)) == ("D", HandOffSequence)
    assert [command.seq] == list(stream.entry.seqs.values()), "it goes on meanwhile"
    return command


def moving_rig() -> tuple[Rig, RequestStream]:
    """Return a rig without pairs whose engine D computes a request."""
    rig = Rig(has_pairs=False)
    rig.client.detach("P", "left", LossKind.PLANNED)
    return rig, rig.submit()


def test_a_running_request_moves_with_its_blocks_after_its_next_token() -> None:
    rig, stream = moving_rig()
    command = start_move(rig, stream)
    assert rig.client.migrate("D") == 0, "it moves already"
    rig.report("D", stream, command.ticket)
    assert (stream.entry.is_parked, rig.streams_in(READY)) == (True, [stream])
    assert stream.pop_deltas()[0].tokens == [7]
    rig.client.continue_handoffs()
    assert stream.entry.engine == "E"
    message = rig.submitted[-1]
    assert message.outputs == [[7, 7]]
    assert message.kv_source is not None
    # Prompt and first token: the KV of the last one is not computed.
    assert (message.kv_source.ticket, message.kv_source.num_tokens) == (command.ticket, 4)
    assert not [each for _, each in rig.commands if isinstance(each, ReleaseKvHolds)]
    rig.report("E", stream)
    assert rig.commands[-1] == ("D", ReleaseKvHolds([command.ticket]))
    assert rig.client.num_migrations == {"moved": 1}
    # It can move again.
    assert rig.client.migrate("E") == 1
    (name, again) = rig.commands[-1]
    assert (name, again.seq) == ("E", *stream.entry.seqs.values())
    rig.report("E", stream, again.ticket)
    stream.pop_deltas()
    rig.client.continue_handoffs()
    assert (stream.entry.engine, rig.submitted[-1].outputs) == ("D", [[7] * 4])
    assert rig.submitted[-1].kv_source is not None
    assert rig.submitted[-1].kv_source.num_tokens == 6
    assert rig.client.num_migrations == {"moved": 2}
    assert rig.handoffs.num_ended == {"transferred": 1}


def test_a_request_that_ends_before_its_move_ends_once() -> None:
    rig, stream = moving_rig()
    command = start_move(rig, stream)
    for _ in range(6):
        rig.report("D", stream)
    # Its eighth token is its last one; the engine has not known of the move.
    rig.report("D", stream, command.ticket)
    assert not stream.alive
    end = stream.pop_deltas()[0].end
    assert end is not None
    assert end.finish_reason == "length"
    assert (rig.handoffs.num_running, rig.client.num_parked) == (0, 0)
    assert rig.commands[-1] == ("D", ReleaseKvHolds([command.ticket]))


@pytest.mark.parametrize("lost", ["D", "E"])
def test_a_move_whose_engine_is_lost_continues_elsewhere(lost: str) -> None:
    rig, stream = moving_rig()
    command = start_move(rig, stream)
    if lost == "E":
        rig.report("D", stream, command.ticket)
    rig.client.detach(lost, "killed", LossKind.DIED)
    stream.pop_deltas()
    rig.client.continue_handoffs()
    rig.client.dispatch_parked()
    other = {"D": "E", "E": "D"}[lost]
    assert (stream.entry.engine, stream.alive) == (other, {0})
    assert rig.submitted[-1].kv_source is None, "nobody else has the blocks"


@pytest.mark.parametrize(
    ("n", "numerics", "accepts_moves"), [(2, "x", True), (1, "y", True), (1, "x", False)]
)
def test_requests_that_cannot_move_with_their_blocks_are_computed_again(
    n: int, numerics: str, accepts_moves: bool
) -> None:
    rig = Rig(has_pairs=False)
    rig.client.detach("P", "left", LossKind.PLANNED)
    rig.attach("D", numerics, accepts_moves)
    stream = rig.client.submit([1, 2, 3], SequenceSamplingParams(), 8, [], n)
    seqs = list(stream.entry.seqs.values())
    step = StepOutput(seqs, [7] * n, [], [])
    rig.client.on_outputs("D", EngineOutputs(step, SchedulerStats()))
    rig.attach("E")
    rig.now += 100.0
    moved = rig.client.migrate("D")
    assert not [each for _, each in rig.commands if isinstance(each, HandOffSequence)]
    # On other numerics its tokens might go on otherwise, so it stays.
    assert moved == (numerics == "x")
    assert stream.entry.engine == ("E" if numerics == "x" else "D")
