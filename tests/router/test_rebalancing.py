"""Running requests move between a router's engines, within limits, and only if that saves time."""

import time
from typing import Any

import msgspec
import pytest

from gllm.config.router import RouterConfig
from gllm.messages.fleet import EngineReport
from gllm.messages.handoff import HandOffSequence, ReleaseKvHolds
from gllm.messages.requests import EngineOutputs
from gllm.messages.sampling import SequenceSamplingParams
from gllm.router.fleet import Fleet
from gllm.router.rebalancing import REST_SECONDS
from gllm.runtime.head.request_stream import RequestStream
from gllm.scheduler.output_lengths import LengthQuery
from gllm.scheduler.plan import FinishedSequence, SchedulerStats, StepOutput
from gllm.scheduler.step_cost import StepCostCoefficients
from tests.support.routing.scripted_links import ANNOUNCE, ScriptedLink, ScriptedLinks

PREDICTED, MAX_TOKENS = 10, 60
COSTS = StepCostCoefficients(step=0.01, token=0.002, context_token=1e-5)


class Rig:
    """A fleet whose engine `a` gets more than was predicted, and `b` less."""

    def __init__(self, max_moves: int, **options: Any) -> None:
        self.now = time.monotonic()
        config = RouterConfig(**{"policy": "round-robin", "move_requests": max_moves, **options})
        self.fleet = Fleet(config, "hash", 64, self._create_links, clock=lambda: self.now)
        self.streams: list[RequestStream] = []
        query = LengthQuery(3, MAX_TOKENS)
        for _ in range(64):
            self.fleet._dispatcher.output_lengths.estimate(query).record(PREDICTED)

    def _create_links(self, *args: Any) -> Any:
        self.links = ScriptedLinks(*args)
        return self.links

    def attach(
        self, name: str, costs: StepCostCoefficients | None = COSTS, **facts: Any
    ) -> ScriptedLink:
        able = {"kv_endpoint": b"here", "accepts_moves": True, "accepts_checkpoints": True}
        link = self.links.attach(
            msgspec.structs.replace(ANNOUNCE, **{"name": name, "num_blocks": 4096, **able, **facts})
        )
        self.links.on_message(link, EngineReport("ready", "", SchedulerStats(), costs))
        return link

    def submit(self, count: int, n: int = 1) -> None:
        for _ in range(count):
            self.streams.append(
                self.fleet.client.submit([1, 2, 3], SequenceSamplingParams(), MAX_TOKENS, [], n)
            )

    def step(self, link: ScriptedLink, num_tokens: int = 1, end: str = "") -> None:
        """Let an engine compute tokens of all its requests, and end them for a reason."""
        seqs = [*self.fleet.client.choices_on(link.name)]
        for _ in range(num_tokens):
            message = EngineOutputs(StepOutput(seqs, [7] * len(seqs), [], []), SchedulerStats())
            self.links.on_message(link, message)
        for stream in self.streams:
            stream.pop_deltas()
        if end:
            ends = [FinishedSequence(seq, end) for seq in seqs]
            self.links.on_message(
                link, EngineOutputs(StepOutput([], [], [], ends), SchedulerStats())
            )

    def tick(self, seconds: float = 0.5) -> None:
        self.now += seconds
        self.fleet.on_tick()

    def unbalance(self, a: ScriptedLink, b: ScriptedLink) -> None:
        """Run the requests of `a` beyond the prediction, and end those of `b` before."""
        self.step(a)
        self.step(b)
        self.tick()
        self.step(b, end="stop")
        self.step(a, PREDICTED + 2)

    def finish_move(self, link: ScriptedLink, command: HandOffSequence) -> None:
        """Let an engine end a sequence at its next token, and keep its blocks."""
        end = FinishedSequence(command.seq, "length", kv_ticket=command.ticket)
        step = StepOutput([command.seq], [8], [], [end])
        self.links.on_message(link, EngineOutputs(step, SchedulerStats()))
        for stream in self.streams:
            stream.pop_deltas()
        self.fleet.client.continue_handoffs()


def commands(link: ScriptedLink) -> list[HandOffSequence]:
    return [message for message in link.sent if isinstance(message, HandOffSequence)]


async def uneven(
    max_moves: int, num_requests: int = 12, n: int = 1, **options: Any
) -> tuple[Any, ...]:
    rig = Rig(max_moves, **options)
    a, b = rig.attach("a"), rig.attach("b")
    rig.submit(num_requests, n)
    rig.unbalance(a, b)
    rig.tick()
    return rig, a, b


async def test_a_request_moves_from_the_engine_with_more_than_was_predicted() -> None:
    rig, a, b = await uneven(1)
    (command,) = commands(a)
    assert not commands(b)
    rig.tick()
    assert len(commands(a)) == 1, "one move per engine at a time"
    rig.finish_move(a, command)
    moved = b.requests[-1]
    assert (moved.kv_source.ticket, moved.outputs) == (command.ticket, [[7] * 13 + [8]])
    rig.now += 0.002
    rig.step(b)
    assert a.sent[-1] == ReleaseKvHolds([command.ticket])
    totals = rig.fleet.totals()
    assert totals.migrations == {"rebalanced": 1}
    assert totals.rebalancing_seconds == pytest.approx(0.002)
    # Others follow while that saves time; each moves once.
    for _ in range(40):
        rig.tick(REST_SECONDS)
        for link in (a, b):
            rig.step(link)
            for again in commands(link):
                if again.seq in rig.fleet.client.choices_on(link.name):
                    rig.finish_move(link, again)
        rig.step(a)
        rig.step(b)
    counts = [len(rig.fleet.client.choices_on(name)) for name in "ab"]
    assert 2 <= len(commands(a)) <= 4
    assert sum(counts) == 6 or not sum(counts)
    assert not commands(b)


async def test_nothing_moves_by_default_or_without_a_gain() -> None:
    for max_moves, num_requests, n in ((0, 12, 1), (1, 2, 1), (1, 12, 2)):
        _, a, b = await uneven(max_moves, num_requests, n)
        assert not commands(a) + commands(b)


async def test_a_move_that_takes_longer_than_it_saves_is_not_made() -> None:
    rig, a, b = await uneven(1)
    (command,) = commands(a)
    rig.finish_move(a, command)
    # Far longer than all remaining tokens.
    rig.now += 100.0
    rig.step(b)
    for _ in range(5):
        rig.tick(REST_SECONDS)
        rig.step(a)
    assert len(commands(a)) == 1


async def test_exact_predictions_move_nothing() -> None:
    rig = Rig(1)
    a, b = rig.attach("a"), rig.attach("b")
    rig.submit(12)
    for _ in range(PREDICTED - 1):
        rig.step(a)
        rig.step(b)
        rig.tick()
    assert not commands(a) + commands(b)


@pytest.mark.parametrize("costs", [COSTS, None])
async def test_an_engine_without_step_costs_has_those_of_the_others(
    costs: StepCostCoefficients | None,
) -> None:
    rig = Rig(1)
    a, b = rig.attach("a", costs), rig.attach("b", costs=None)
    rig.submit(12)
    rig.unbalance(a, b)
    rig.tick()
    assert len(commands(a)) == (costs is not None)


def test_presets_choose_both_engines_themselves() -> None:
    with pytest.raises(ValueError, match="move_requests is 2, but preset distserve"):
        RouterConfig(move_requests=2, preset="distserve")
