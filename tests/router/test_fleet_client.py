"""Rules by which a router's client moves requests between engines."""

from typing import Any

import pytest

from gllm.messages.codec import encode
from gllm.messages.requests import (
    AbortSequences,
    EngineOutputs,
    ErrorKind,
    PoisonRequestError,
    SubmitRequest,
)
from gllm.messages.sampling import SequenceSamplingParams
from gllm.router.client import FleetClient
from gllm.routing.engine_losses import RETURN_SECONDS, TOGETHER_SECONDS, LossKind
from gllm.routing.rounds import PlacementRounds
from gllm.runtime.head.request_stream import RequestStream
from gllm.scheduler.plan import FinishedSequence, SchedulerStats, StepOutput

SAMPLING = SequenceSamplingParams()


class Rig:
    """A client whose requests go to the engine of the lowest name that is not closed."""

    def __init__(self, *engines: str) -> None:
        self.now = 100.0
        """Time in seconds."""
        self.client = FleetClient(self.choose, clock=lambda: self.now)
        self.sent: dict[str, list[Any]] = {}
        self.closed: set[str] = set()
        self.num_runs = 0
        """Number of starts of engines."""
        for engine in engines:
            self.attach(engine)

    def choose(self, stream: RequestStream, names: frozenset[str]) -> str | None:
        return min(names - self.closed, default=None)

    def attach(self, engine: str, numerics: str = "x", run: int | None = None) -> None:
        """Attach an engine, another start of it unless there is a run."""
        self.num_runs += 1
        sent = self.sent[engine] = list[Any]()

        def send(message: SubmitRequest | AbortSequences) -> None:
            encode(message)
            sent.append(message)

        self.client.attach(engine, numerics, send, run=self.num_runs if run is None else run)

    def submit(self, *prompt: int, n: int = 1, max_tokens: int = 8) -> RequestStream:
        return self.client.submit(list(prompt), SAMPLING, max_tokens, [], n, request_id="id")

    def submitted(self, engine: str) -> list[int]:
        """Return the first tokens of the prompts that an engine got."""
        return [each.prompt[0] for each in self.sent[engine] if isinstance(each, SubmitRequest)]

    def report(
        self,
        engine: str,
        *tokens: tuple[int, int],
        ends: tuple[int, ...] = (),
        kind: ErrorKind = "",
    ) -> None:
        """Report tokens, as pairs of wire id and token, and ends."""
        outcome = StepOutput(
            [seq for seq, _ in tokens],
            [token for _, token in tokens],
            [],
            [FinishedSequence(seq, "error" if kind else "length") for seq in ends],
        )
        kinds: list[tuple[int, ErrorKind]] = [(seq, kind) for seq in ends if kind]
        self.client.on_outputs(engine, EngineOutputs(outcome, SchedulerStats(), [], kinds))

    def lose(self, engine: str, kind: LossKind = LossKind.DIED) -> None:
        """Lose an engine, and no other one of the same cause."""
        self.client.detach(engine, "killed", kind)
        self.tick(TOGETHER_SECONDS)

    def lose_together(self, engines: str, kind: LossKind) -> None:
        for engine in engines:
            self.client.detach(engine, "killed", kind)

    def tick(self, seconds: float) -> None:
        """Let time pass and the router decide about losses."""
        self.now += seconds
        self.client.check_losses()
        self.client.dispatch_parked()


def seq_of(stream: RequestStream, choice: int = 0) -> int:
    return stream.entry.seqs[choice]


def end_of(stream: RequestStream) -> tuple[str, str, str]:
    delta = stream.pop_deltas()[0]
    assert delta.end is not None
    return delta.end.finish_reason, delta.error_kind, delta.end.error


def test_a_request_continues_elsewhere_with_the_tokens_that_it_has() -> None:
    rig = Rig("a", "b")
    stream = rig.submit(1, n=2)
    rig.report("a", (0, 7), (1, 8), (0, 9))
    rig.lose("a")
    (again,) = rig.sent["b"]
    assert (again.seq, again.outputs, again.request_id) == (2, [[7, 9], [8]], "id")
    rig.report("b", (2, 3), (3, 4), ends=(2, 3))
    deltas = stream.pop_deltas()
    assert [deltas[choice].tokens for choice in (0, 1)] == [[7, 9, 3], [8, 4]]
    assert (stream.num_resumptions, rig.client.num_migrations) == (1, {"lost": 1})
    assert rig.client.num_dispatched == {"a": 1, "b": 1}
    assert rig.client.num_running("b") == 0


def test_late_tokens_of_a_migrated_request_are_dropped_and_aborted() -> None:
    rig = Rig("a", "b")
    stream = rig.submit(1)
    rig.report("a", (0, 7))
    assert rig.client.migrate("a") == 1
    assert rig.sent["a"][1:] == [AbortSequences([0])]
    rig.report("a", (0, 66))
    assert rig.sent["a"][2:] == [AbortSequences([0])]
    rig.report("a", (0, 67), ends=(0,))
    rig.report("gone", (0, 68))
    rig.report("b", (0, 69))
    assert rig.sent["b"][1:] == [AbortSequences([0])], "the wire id is that of another engine"
    assert stream.pop_deltas()[0].tokens == [7]
    assert rig.client.num_stale_tokens == 4
    assert len(rig.sent["a"]) == 3, "what has ended needs no abort"


def test_a_request_stays_where_no_other_engine_is_chosen_instead() -> None:
    rig = Rig("a", "b")
    rig.closed = {"b"}
    stream = rig.submit(1)
    assert rig.client.migrate("a") == 0
    assert rig.client.migrate("a", is_planned=False) == 0
    assert rig.client.migrate("nobody") == 0
    rig.report("a", (0, 7))
    assert stream.pop_deltas()[0].tokens == [7]
    rig.closed = {"a"}
    assert rig.client.migrate("a", is_planned=False) == 1
    assert rig.submitted("b") == [1]
    assert rig.client.num_migrations == {"recovering": 1}


def test_tokens_are_continued_only_with_equal_numerics() -> None:
    rig = Rig()
    rig.attach("a", "x")
    rig.attach("b", "y")
    with_token, without = rig.submit(1), rig.submit(2)
    rig.report("a", (0, 7))
    rig.lose("a")
    assert rig.submitted("b") == [2]
    assert (rig.client.num_parked, with_token.entry.numerics) == (1, "x")
    rig.attach("c", "x")
    assert rig.submitted("c") == [1]
    rig.lose("c")
    rig.attach("d", "y")
    assert rig.client.num_parked == 1
    assert without.entry.numerics == ""
    rig.attach("a", "x")
    assert rig.submitted("a") == [1]


def test_other_numerics_continue_a_request_that_has_waited_for_equal_ones() -> None:
    rig = Rig("a")
    rig.attach("b", "y")
    rig.attach("c", "y")
    stream = rig.submit(1)
    rig.report("a", (0, 7))
    rig.now = 104.0
    rig.lose("a")
    rig.now = 108.9
    rig.client.dispatch_parked()
    assert rig.client.num_parked == 1
    rig.now = 109.0
    rig.client.dispatch_parked()
    assert rig.submitted("b") == [1]
    assert (rig.client.numerics.num_inexact_migrations, stream.entry.numerics) == (1, "y")
    rig.lose("b")
    assert rig.submitted("c") == [1], "its numerics are those of the engine that had it last"
    assert rig.client.numerics.num_inexact_migrations == 1


def test_equal_numerics_are_preferred_after_any_wait() -> None:
    rig = Rig("c")
    rig.closed = {"a", "b"}
    rig.attach("a", "y")
    rig.attach("b", "x")
    rig.submit(1)
    rig.report("c", (0, 7))
    rig.lose("c")
    rig.now = 200.0
    rig.closed.clear()
    rig.client.dispatch_parked()
    assert (rig.submitted("a"), rig.submitted("b")) == ([], [1])
    assert rig.client.numerics.num_inexact_migrations == 0


def test_a_migration_of_tokens_needs_equal_numerics_too() -> None:
    rig = Rig()
    rig.attach("b", "x")
    with_token, without = rig.submit(1), rig.submit(2)
    rig.report("b", (0, 7))
    rig.attach("a", "y")
    assert rig.client.migrate("b") == 1
    assert rig.submitted("a") == [2]
    rig.attach("c", "x")
    assert rig.client.migrate("b") == 1
    assert rig.submitted("c") == [1]
    assert (with_token.entry.numerics, without.entry.numerics) == ("x", "")


def test_parked_requests_are_dispatched_in_order_of_arrival() -> None:
    rig = Rig("a")
    for name in (1, 2, 3):
        rig.submit(name)
    rig.lose("a", LossKind.PLANNED)
    rig.submit(4)
    assert rig.client.num_parked == 4
    rig.attach("b")
    assert rig.submitted("b") == [1, 2, 3, 4]
    assert rig.client.num_migrations == {"drained": 3}
    rig.closed = {"b", "c"}
    rig.submit(5)
    rig.attach("c")
    rig.closed.clear()
    assert rig.submitted("c") == []
    rig.client.dispatch_parked()
    assert rig.submitted("b")[4:] == [5]


def test_what_waits_too_long_ends() -> None:
    rig = Rig()
    first = rig.submit(1)
    rig.now = 130.0
    second = rig.submit(2)
    assert rig.client.parked_since == 100.0
    rig.now = 160.0
    rig.client.reject_parked("nobody came", parked_for=60.0)
    assert end_of(first) == ("error", "unavailable", "nobody came")
    assert (rig.client.parked_since, rig.client.num_parked) == (130.0, 1)
    rig.attach("a")
    rig.now = 500.0
    rig.client.reject_parked("nobody came", parked_for=60.0)
    assert second.alive
    assert rig.client.parked_since is None


def test_a_request_that_is_given_back_goes_elsewhere() -> None:
    rig = Rig("a", "b")
    stream = rig.submit(1, n=2)
    rig.report("a", (0, 7), (1, 8), ends=(1,), kind="unavailable")
    assert rig.sent["a"][1:] == [AbortSequences([0, 1])]
    (again,) = rig.sent["b"]
    assert again.outputs == [[7], [8]]
    assert (rig.client.num_migrations, stream.entry.num_refusals) == ({"unavailable": 1}, 1)
    assert all(delta.end is None for delta in stream.pop_deltas().values())


def test_the_wait_of_a_request_goes_on_while_engines_give_it_back() -> None:
    rig = Rig("a")
    stream = rig.submit(1)
    for number in range(3):
        rig.now += 10.0
        rig.report("a", ends=(number,), kind="unavailable")
        assert rig.client.parked_since == 100.0
        assert rig.submitted("a") == [1] * (number + 1), "not to the same engine at once"
        rig.client.dispatch_parked()
    rig.report("a", (3, 7))
    rig.now += 10.0
    rig.report("a", ends=(3,), kind="unavailable")
    assert rig.client.parked_since == rig.now
    assert stream.entry.num_refusals == 1


def test_a_bad_request_is_refused_whether_an_engine_is_there_or_not() -> None:
    for rig in (Rig(), Rig("a")):
        bad: Any = 2**70
        with pytest.raises(OverflowError):
            rig.submit(1, max_tokens=bad)
        assert (rig.client.num_requests, rig.client.num_parked) == (0, 0)
        assert rig.client.num_running("a") == 0


def test_everything_ends_with_the_router() -> None:
    rig = Rig("a")
    running = rig.submit(1)
    rig.closed = {"a"}
    parked = rig.submit(2)
    rig.client.fail_all("the router stops")
    assert end_of(running) == end_of(parked) == ("error", "", "the router stops")
    assert rig.sent["a"][1:] == [AbortSequences([0])]


def test_choices_that_nobody_reads_are_aborted_at_their_engine() -> None:
    rig = Rig("a", "b")
    rig.closed = {"a"}
    stream = rig.submit(1, n=3)
    rig.client.abort(stream, [1])
    assert rig.sent["b"][1:] == [AbortSequences([1])]
    rig.lose("b")
    rig.client.abort(stream, [0])
    rig.closed.clear()
    rig.client.dispatch_parked()
    (again,) = rig.sent["a"]
    assert again.choices == [2]
    rig.client.release(stream)
    assert rig.sent["a"][1:] == [AbortSequences([3])]
    assert (rig.client.num_requests, rig.client.num_running("a")) == (0, 0)


def test_engines_do_not_pass_a_request_around() -> None:
    rig = Rig("a", "b")
    rig.submit(1)
    rig.report("a", ends=(0,), kind="unavailable")
    assert rig.submitted("b") == [1]
    rig.report("b", ends=(1,), kind="unavailable")
    assert (rig.client.num_parked, rig.submitted("a")) == (1, [1])
    rig.client.dispatch_parked()
    assert rig.submitted("a") == [1, 1]


# Requests that kill engines.


def test_a_request_that_kills_engines_ends_after_the_third_one() -> None:
    rig = Rig("a", "b", "c", "d")
    poison, other = rig.submit(1), rig.submit(2)
    rig.lose("a")
    assert rig.submitted("b") == [1, 2], "the first death is nobody's fault"
    rig.lose("b")
    assert (rig.submitted("c"), rig.submitted("d")) == ([1], []), "one suspect runs at a time"
    rig.lose("c")
    reason, kind, error = end_of(poison)
    assert (reason, kind) == ("error", "poison")
    assert error.endswith("killed")
    assert rig.submitted("d") == [2], "the deaths are explained"
    with pytest.raises(PoisonRequestError):
        rig.submit(1)
    rig.lose("d")
    rig.attach("e")
    assert other.entry.engine == "e"


def test_a_suspect_with_a_token_is_one_no_more() -> None:
    rig = Rig("a", "b", "c", "d")
    first, second = rig.submit(1), rig.submit(2)
    rig.lose("a")
    rig.lose("b")
    assert rig.submitted("c") == [1]
    third = rig.submit(3)
    assert third.entry.engine == "d", "engines without a suspect take requests"
    rig.report("c", (seq_of(first), 7))
    assert rig.submitted("c") == [1, 2], "both engines had one request, and the first name wins"
    assert rig.submitted("d") == [3, 1], "the first one made room"
    rig.report("c", (seq_of(second), 7))
    assert rig.submit(4).entry.engine == "c"
    rig.lose("d")
    assert all(stream.alive for stream in (first, second, third))


def test_a_suspect_has_the_only_engine_for_itself() -> None:
    rig = Rig("a", "b", "c")
    rig.closed = {"a", "b"}
    other = rig.submit(2)
    rig.report("c", (seq_of(other), 7))
    rig.closed = {"c"}
    suspect = rig.submit(1)
    rig.lose("a")
    rig.lose("b")
    assert suspect.entry.is_parked
    rig.closed.clear()
    rig.client.dispatch_parked()
    assert rig.submitted("c") == [2, 1]
    assert rig.sent["c"][1] == AbortSequences([0])
    late = rig.submit(3)
    assert rig.client.num_parked == 2
    rig.report("c", (seq_of(suspect), 7))
    assert rig.submitted("c") == [2, 1, 2, 3]
    assert rig.client.num_migrations == {"lost": 2, "isolation": 1}
    assert late.entry.engine == "c"


@pytest.mark.parametrize("how", ["abort", "end", "unavailable", "leave"])
def test_a_suspect_that_leaves_its_engine_frees_it(how: str) -> None:
    rig = Rig("a", "b", "c")
    suspect, other = rig.submit(1), rig.submit(2)
    rig.lose("a")
    rig.lose("b")
    assert rig.submitted("c") == [1]
    seq = seq_of(suspect)
    if how == "abort":
        rig.client.release(suspect)
    elif how == "end":
        rig.report("c", ends=(seq,))
    elif how == "unavailable":
        rig.report("c", ends=(seq,), kind="unavailable")
        assert rig.client.num_parked == 2
        rig.client.dispatch_parked()
        assert rig.submitted("c") == [1, 2], "the next suspect is first"
        return
    else:
        rig.lose("c", LossKind.PLANNED)
        rig.attach("c")
        assert suspect.alive
        assert rig.submitted("c") == [2]
        return
    assert rig.submitted("c") == [1, 2]
    assert other.alive


@pytest.mark.parametrize("kind", [LossKind.SILENT, LossKind.CLOSED])
def test_engines_that_are_out_of_reach_for_a_while_have_not_died(kind: LossKind) -> None:
    rig = Rig("a", "b", "c")
    stream = rig.submit(1)
    for _ in range(3):
        for engine in "abc":
            rig.lose(engine, kind)
            rig.tick(0.5)
            assert stream.alive
        for run, engine in enumerate("abc", 1):
            rig.attach(engine, run=run)
        assert stream.entry.seqs, "it goes on at once"
    assert rig.submit(1).alive, "an equal request is not refused"


@pytest.mark.parametrize("kind", [LossKind.DIED, LossKind.CLOSED])
def test_engines_that_die_together_are_no_requests_fault(kind: LossKind) -> None:
    """Their machine ends, for example: no engine has computed what it got from a dead one."""
    rig = Rig("a", "b", "c", "d")
    streams = [rig.submit(1), rig.submit(2)]
    rig.lose_together("abc", kind)
    for stream in streams:
        rig.tick(TOGETHER_SECONDS)
        assert stream.entry.engine == "d", "it runs alone, on an engine that lives"
        rig.report("d", (seq_of(stream), 7))
    rig.tick(RETURN_SECONDS)
    assert all(stream.alive for stream in streams)
    assert rig.submit(1).alive, "an equal request is not refused"


def test_a_suspect_waits_until_it_is_known_if_its_engine_has_died() -> None:
    rig = Rig("a", "b", "c", "d")
    poison = rig.submit(1)
    for engine in "abc":
        rig.lose(engine, LossKind.CLOSED)
    assert (rig.submitted("d"), rig.client.num_parked) == ([], 1), "no further engine is risked"
    rig.tick(1.0)
    rig.client.reject_parked("too long")
    assert poison.alive
    rig.tick(RETURN_SECONDS)
    assert end_of(poison)[:2] == ("error", "poison")


def test_the_reader_hears_of_a_death_that_another_start_proves() -> None:
    rig = Rig("a", "b", "c", "d")
    poison = rig.submit(1)
    ends: list[tuple[str, str, str]] = []
    poison.set_listener(lambda: ends.append(end_of(poison)))
    rig.lose("a")
    rig.lose("b")
    rig.lose("c", LossKind.CLOSED)
    assert not ends
    rig.attach("c")
    assert [end[:2] for end in ends] == [("error", "poison")]


def test_a_suspect_does_not_wait_for_ever_if_no_engine_is_left() -> None:
    rig = Rig("a", "b", "c")
    suspect = rig.submit(1)
    for engine in "abc":
        rig.lose(engine, LossKind.CLOSED)
    rig.tick(60.0)
    rig.client.reject_parked("too long", parked_for=60.0)
    assert end_of(suspect) == ("error", "unavailable", "too long")


def test_a_refused_connection_proves_a_death() -> None:
    rig = Rig("a", "b", "c", "d")
    poison = rig.submit(1)
    for run, engine in enumerate("abc", 1):
        rig.lose(engine, LossKind.CLOSED)
        rig.client.on_refused(run)
    assert end_of(poison)[:2] == ("error", "poison")
    assert rig.submitted("d") == []


def test_planned_departures_are_nobodys_fault() -> None:
    rig = Rig("a", "b")
    stream = rig.submit(1)
    for engine in "abababab":
        rig.lose(engine, LossKind.PLANNED)
        rig.attach(engine)
    assert stream.alive
    other = rig.submit(2)
    assert other.entry.engine == "a", "nobody is a suspect"


def test_a_request_that_an_engine_found_to_be_poison_is_refused_everywhere() -> None:
    rig = Rig("a", "b")
    stream = rig.submit(1)
    rig.report("a", ends=(0,), kind="poison")
    assert end_of(stream)[:2] == ("error", "poison")
    with pytest.raises(PoisonRequestError):
        rig.submit(1)
    assert rig.submit(1, 2).alive


def test_one_trial_is_too_few() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        FleetClient(lambda stream, names: None, migration_limit=1)


def hold(rig: Rig, rounds: PlacementRounds) -> None:
    """Let new requests wait as `rounds` decides."""
    rig.client.rounds = rounds


def test_requests_of_a_heartbeat_are_placed_together_longest_first() -> None:
    rig = Rig("a")
    times: list[float] = []
    hold(rig, PlacementRounds(heartbeat_seconds=0.5))
    rig.client.on_held = times.append
    rig.now += 1
    rig.submit(1)
    assert rig.submitted("a") == [1], "nothing was placed for a heartbeat"
    rig.now += 0.2
    for prompt in ((2,), (3, 3, 3), (4, 4)):
        rig.submit(*prompt)
    assert (rig.submitted("a"), rig.client.num_parked) == ([1], 3)
    assert times == [101.5] * 3
    rig.now = 101.5
    rig.client.dispatch_parked()
    assert rig.submitted("a") == [1, 3, 4, 2]
    assert rig.client.rounds.num_held == 3


def test_requests_wait_for_room_in_order_and_moved_ones_do_not_wait() -> None:
    rig = Rig("a", "b")
    hold(rig, PlacementRounds(waits_for_room=True))
    moving = rig.submit(1)
    rig.closed = {"a", "b"}
    rig.now += 1
    waiting = rig.submit(2)
    rig.closed = {"b"}
    rig.now += 1
    # Nothing has said that an engine has room again, so the second one does not pass the first.
    rig.submit(3)
    assert rig.submitted("a") == [1]
    assert (rig.client.num_parked, rig.client.rounds.num_held) == (2, 2)
    rig.client.dispatch_parked()
    assert rig.submitted("a") == [1, 2, 3]
    rig.closed = {"a", "b"}
    rig.now += 1
    rig.submit(4)
    rig.lose("a")
    # All three lost ones are offered, though the new one finds no room; none finds some.
    assert rig.client.num_parked == 4
    rig.closed = {"a"}
    rig.client.dispatch_parked()
    assert rig.submitted("b") == [1, 2, 3, 4]
    assert moving.alive
    assert waiting.alive


def test_requests_that_move_together_count_as_load_of_their_engine_one_after_the_other() -> None:
    rig = Rig("a", "b", "c")
    rig.closed = {"b", "c"}
    for number in range(4):
        rig.submit(number)
    rig.closed = set()

    def choose_fewest(stream: RequestStream, names: frozenset[str]) -> str | None:
        return min(sorted(names), key=rig.client.num_running)

    rig.client._choose = choose_fewest
    assert rig.client.migrate("a") == 4
    assert (len(rig.submitted("b")), len(rig.submitted("c"))) == (2, 2)
