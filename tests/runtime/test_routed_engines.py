"""Presets of a router over real engines: who is chosen when, and the text of one engine."""

import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from random import Random
from typing import NoReturn

import pytest

from gllm.messages.kv_transfer import FetchKv
from gllm.messages.sampling import SequenceSamplingParams
from gllm.routing.disaggregation.policy import PairRequest
from gllm.routing.disaggregation.splitwise import SplitwisePairPolicy
from gllm.routing.handoff import Handoff, HandoffState
from gllm.runtime.head.request_stream import RequestStream
from gllm.scheduler.plan import SchedulerStats
from tests.support.engines.moving_engines import MappedStages, MovingCluster, closing
from tests.support.engines.routed_engines import RoutedCluster, routed
from tests.support.text.grammar_writing import FOLDER

GREEDY = SequenceSamplingParams(temperature=0)
MAX_TOKENS, CHUNK = 6, 32
PROMPT = Random(1).choices(range(3, 2048), k=100)


@cache
def stages_of(
    name: str, preset: str = "tetri", kv_push: str = "off", kv_cache_dtype: str = "auto"
) -> MappedStages:
    """Weights are loaded once per engine; each cluster has new drivers and movers over them."""
    return MappedStages(
        FOLDER,
        preset=preset,
        kv_cache_dtype=kv_cache_dtype,
        kv_push=kv_push,
        kv_push_threshold=CHUNK,
        prefill_batch_tokens=CHUNK,
    )


def engines(names: str, kv_push: str = "off", preset: str = "tetri") -> dict[str, MappedStages]:
    return {name: stages_of(name, preset, kv_push) for name in names.split()}


def submit(rig: MovingCluster, prompt: list[int], max_tokens: int = MAX_TOKENS) -> RequestStream:
    return rig.client.submit(prompt, GREEDY, max_tokens, [])


@cache
def expected(
    prompt: tuple[int, ...], max_tokens: int = MAX_TOKENS, kv_cache_dtype: str = "auto"
) -> list[int]:
    """Return the greedy output of a prompt on one engine."""
    stages = stages_of("one", kv_cache_dtype=kv_cache_dtype)
    with closing(MovingCluster({"one": stages})) as rig:
        stream = submit(rig, list(prompt), max_tokens)
        rig.run([stream])
        return stream.entry.outputs[0]


class Choices:
    """Choices of decode engines, with the prompt tokens that engine P0 had computed then."""

    def __init__(self, rig: RoutedCluster, stream: RequestStream | None = None) -> None:
        self.at: list[tuple[str | None, int, HandoffState]] = []
        self.stream = stream
        choose = rig.policy.choose_decode

        def choose_decode(request: PairRequest, snapshots, now: float) -> str | None:
            name = choose(request, snapshots, now)
            sequences = rig.engines["P0"].scheduler._sequences.values()
            num_computed = sum(each.num_computed_tokens for each in sequences)
            assert self.stream is not None
            state = rig.client.handoffs.state_of(self.stream)
            self.at.append((name, num_computed, state))
            return name

        rig.policy.choose_decode = choose_decode  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("kv_push", ["off", "layer", "chunk"])
async def test_tetri_chooses_the_decode_engine_after_the_first_chunk(kv_push: str) -> None:
    """P1; with pushes, that engine fetches all chunks while the later ones are computed."""
    with routed(engines("P0 D0 D1", kv_push), "tetri") as rig:
        choices = Choices(rig)
        choices.stream = stream = submit(rig, PROMPT)
        rig.run([stream])
        ((name, num_computed, state),) = choices.at
        assert (num_computed, state) == (CHUNK, HandoffState.PREFILL)
        assert rig.num_first_chunks == 1
        assert stream.entry.outputs[0] == expected(tuple(PROMPT))
        assert rig.client.num_dispatched == {"P0": 1, name: 1}
        assert name is not None
        (fetch,) = [each for each in rig.engines[name].commands if isinstance(each, FetchKv)]
        assert fetch.is_per_layer == (kv_push != "off") == bool(rig.engines["P0"].pushed)
        assert rig.engines[name].scheduler.stats().fetched_tokens == len(PROMPT)
        rig.check_empty()


async def test_entries_of_8_bits_are_fetched_with_their_scales() -> None:
    stages = {name: stages_of(name, kv_cache_dtype="int8") for name in ("P0", "D0")}
    with routed(stages, "tetri") as rig:
        stream = submit(rig, PROMPT)
        rig.run([stream])
        assert stream.entry.outputs[0] == expected(tuple(PROMPT), kv_cache_dtype="int8")
        assert rig.engines["D0"].scheduler.stats().fetched_tokens == len(PROMPT)
        rig.check_empty()


@pytest.mark.parametrize("num_tokens", [1, CHUNK])
async def test_tetri_chooses_when_a_prompt_of_one_chunk_ends(num_tokens: int) -> None:
    with routed(engines("P0 D0 D1", "layer"), "tetri") as rig:
        choices = Choices(rig)
        choices.stream = stream = submit(rig, PROMPT[:num_tokens])
        rig.run([stream])
        assert [state for *_, state in choices.at] == [HandoffState.TRANSFER]
        assert stream.entry.outputs[0] == expected(tuple(PROMPT[:num_tokens]))
        rig.check_empty()


@pytest.mark.parametrize("preset", ["distserve", "splitwise"])
async def test_other_presets_choose_at_their_own_moment(preset: str) -> None:
    """P1: when the prefill has ended, and at arrival. No engine reports first chunks."""
    with routed(engines("P0 D0", preset=preset), preset) as rig:
        choices = Choices(rig)
        choices.stream = stream = submit(rig, PROMPT)
        rig.run([stream])
        assert rig.num_first_chunks == 0
        states = [] if preset == "splitwise" else [HandoffState.TRANSFER]
        assert [state for *_, state in choices.at] == states
        assert stream.entry.outputs[0] == expected(tuple(PROMPT))
        rig.check_empty()


@pytest.mark.parametrize("kv_push", ["off", "layer"])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
async def test_a_decode_engine_that_dies_before_the_transfer_is_chosen_again(
    num_steps: int, kv_push: str
) -> None:
    with routed(engines("P0 D0 D1", kv_push), "tetri") as rig:
        choices = Choices(rig)
        choices.stream = stream = submit(rig, PROMPT)
        prefill = rig.engines["P0"].scheduler
        rig.run([stream], until=lambda: bool(choices.at) and prefill.stats().steps >= num_steps)
        first = choices.at[0][0]
        assert first is not None
        assert rig.client.handoffs.state_of(stream) is HandoffState.PREFILL
        rig.kill(first)
        rig.run([stream])
        (other,) = {"D0", "D1"} - {first}
        assert [name for name, *_ in choices.at] == [first, other]
        assert rig.client.num_dispatched[other] == 1
        assert stream.entry.outputs[0] == expected(tuple(PROMPT))
        assert rig.client.handoffs.num_ended == {"transferred": 1}
        rig.check_empty()


@pytest.mark.parametrize("kv_push", ["off", "layer"])
async def test_a_decode_engine_that_drains_gets_no_request_that_was_meant_for_it(
    kv_push: str,
) -> None:
    """Splitwise chooses it when the request arrives; it would refuse both commands."""
    with routed(engines("P0 D0 D1", kv_push, "splitwise"), "splitwise") as rig:
        stream = submit(rig, PROMPT)
        (handoff,) = rig.client.handoffs.running.values()
        chosen = handoff.decode
        (other,) = {"D0", "D1"} - {chosen}
        rig.report(chosen, state="draining")
        rig.run([stream])
        assert rig.client.num_dispatched == {"P0": 1, other: 1}
        assert not rig.engines[chosen].commands
        assert rig.engines[other].scheduler.stats().fetched_tokens == len(PROMPT)
        assert rig.client.handoffs.num_ended == {"transferred": 1}
        assert stream.entry.outputs[0] == expected(tuple(PROMPT))
        rig.check_empty()


async def test_blocks_are_fetched_again_by_an_engine_that_does_not_drain() -> None:
    with routed(engines("P0 D0 D1 D2"), "tetri") as rig:
        names = iter(["D0", "D1", "D2", "D2"])

        def choose_decode(request: PairRequest, snapshots, now: float) -> str | None:
            """Do not look at the states of engines."""
            return next(names)

        rig.policy.choose_decode = choose_decode  # type: ignore[method-assign, assignment]
        rig.moves_kv = False
        stream = submit(rig, PROMPT)
        rig.run([stream], until=lambda: rig.client.num_dispatched["D0"] == 1)
        rig.report("D1", state="draining")
        rig.kill("D0")
        rig.moves_kv = True
        rig.run([stream])
        assert "D1" not in rig.client.num_dispatched
        assert stream.entry.outputs[0] == expected(tuple(PROMPT))
        rig.check_empty()


class _UniteratedDict(dict[RequestStream, Handoff]):
    """Table that is only looked up in."""

    def _raise(self) -> NoReturn:
        raise AssertionError("all hand-offs are read")

    __iter__ = keys = values = items = _raise


async def test_a_report_of_a_prompt_reads_its_own_hand_off_alone() -> None:
    with routed(engines("P0 D0 D1", "layer"), "tetri") as rig:
        streams = [submit(rig, PROMPT[i:]) for i in range(8)]
        handoffs = rig.client.handoffs
        table, now = handoffs._by_stream, time.monotonic()
        handoffs._by_stream = _UniteratedDict(table)
        tickets = {handoff.ticket: stream for stream, handoff in table.items()}
        for ticket, stream in tickets.items():
            handoffs.on_first_chunk("D0", ticket, now)
            assert not table[stream].decode
            handoffs.on_first_chunk("P0", ticket, now)
            assert table[stream].decode
            handoffs.on_readable("P0", ticket, now)
        handoffs.on_first_chunk("P0", 1 + max(tickets), now)
        handoffs._by_stream = table
        rig.run(streams)
        for stream in streams:
            assert stream.entry.outputs[0] == expected(tuple(stream.entry.prompt))
        rig.check_empty()


@pytest.mark.parametrize("kv_push", [pytest.param("off", marks=pytest.mark.full), "layer"])
async def test_tetri_with_two_engines_per_phase_has_the_text_of_one_engine(kv_push: str) -> None:
    """Prompts of one to four chunks, in groups that are prefilled shortest first."""
    rng = Random(2)
    prompts = [PROMPT[: rng.randint(1, 50)] + PROMPT[rng.randint(50, 99) :] for _ in range(24)]
    with routed(engines("P0 P1 D0 D1", kv_push), "tetri") as rig:
        streams = [submit(rig, prompt) for prompt in prompts]
        rig.run(streams)
        for prompt, stream in zip(prompts, streams, strict=True):
            assert stream.entry.outputs[0] == expected(tuple(prompt))
        assert rig.client.handoffs.num_ended == {"transferred": 24}
        dispatched = rig.client.num_dispatched
        assert dispatched["P0"] + dispatched["P1"] == dispatched["D0"] + dispatched["D1"] == 24
        # The pending tokens of both engines of a phase are much alike.
        assert min(dispatched.values()) >= 6
        pushed = rig.engines["P0"].pushed | rig.engines["P1"].pushed
        assert bool(pushed) == (kv_push != "off")
        rig.check_empty()


def mixed_pool(rig: RoutedCluster) -> list[str]:
    """Return the names of the machines that are in the pool of both phases."""
    assert isinstance(rig.policy, SplitwisePairPolicy)
    snapshots = [each.snapshot() for each in rig.fleet._dispatcher.records.values()]
    return [each.name for each in rig.policy.pools.divide(snapshots).mixed]


async def test_a_machine_of_splitwise_that_was_lent_returns_home() -> None:
    """S3: a decode machine without room borrows a prompt machine, until its decodes have ended."""
    with routed(engines("P0 P1 D0", preset="splitwise"), "splitwise") as rig:
        streams = [submit(rig, PROMPT, 20)]
        assert mixed_pool(rig) == []
        rig.report("D0", SchedulerStats(kv_usage=0.97))
        streams.append(submit(rig, PROMPT[::-1], 20))
        (name,) = mixed_pool(rig)
        assert name in ("P0", "P1")
        num_dispatched = rig.client.num_dispatched[name]
        # It takes further work of both phases as long as it has a decode.
        decode = rig.engines[name].scheduler
        rig.run(streams, until=lambda: decode.stats().decode_tokens > 2)
        assert mixed_pool(rig) == [name]
        assert rig.client.num_dispatched[name] > num_dispatched
        rig.run(streams)
        assert mixed_pool(rig) == []
        rig.report("D0")
        streams.append(submit(rig, PROMPT[5:], 20))
        rig.run(streams)
        assert rig.client.num_dispatched["D0"] == 2
        for stream in streams:
            assert stream.entry.outputs[0] == expected(tuple(stream.entry.prompt), 20)
        rig.check_empty()


async def test_a_decode_machine_that_was_lent_returns_home_once_its_prompts_are_computed() -> None:
    """S3, the other way round: the prompt machine has a long queue."""
    with routed(engines("P0 D0 D1", preset="splitwise"), "splitwise") as rig:
        rig.report("P0", SchedulerStats(waiting=2, waiting_tokens=9000))
        stream = submit(rig, PROMPT, 20)
        (name,) = mixed_pool(rig)
        (other,) = {"D0", "D1"} - {name}
        rig.run([stream], until=lambda: rig.client.num_dispatched[other] == 1)
        assert mixed_pool(rig) == []
        assert stream.alive
        rig.run([stream])
        assert rig.client.num_dispatched == {name: 1, other: 1}
        assert stream.entry.outputs[0] == expected(tuple(PROMPT), 20)
        rig.check_empty()


FLOWS = {("P0", "D0"): 3.0, ("P0", "D1"): 1.0, ("P1", "D0"): 0.5, ("P1", "D1"): 2.5}


def longest_run(names: Sequence[str], name: str) -> int:
    """Return the greatest number of times that a name follows itself."""
    return max(len(list(run)) for each, run in groupby(names) if each == name)


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.full)])
async def test_kv_goes_in_proportion_to_the_flows_of_a_plan(count: int) -> None:
    """L3 and H8 on a whole router: shares of 1,000 requests within 1 %, and short runs."""
    routes = tuple(f"{prefill}:{decode}={flow}" for (prefill, decode), flow in FLOWS.items())
    rng = Random(4)
    with routed(engines("P0 P1 D0 D1", preset="flow"), "flow", routes=routes) as rig:
        for _ in range(count // 20):
            # Starts that differ: of what the prefix cache has nothing moves.
            prompts = [rng.sample(PROMPT, rng.randint(1, 12)) for _ in range(20)]
            rig.run([submit(rig, prompt, 2) for prompt in prompts])
        assert rig.client.handoffs.num_ended == {"transferred": count}
        targets = {
            message.kv_source.ticket: (message.kv_source.engine, name)
            for name, message in rig.submissions
            if message.kv_source is not None
        }
        pairs = [targets[each.kv_ticket] for _, each in rig.submissions if each.kv_ticket]
        assert len(pairs) == count
        for name in ("D0", "D1"):
            commands = rig.engines[name].commands
            fetched = {each.ticket for each in commands if isinstance(each, FetchKv)}
            assert fetched == {ticket for ticket, pair in targets.items() if pair[1] == name}
        rig.check_empty()
    total, counts = sum(FLOWS.values()), Counter(pairs)
    for pair, flow in FLOWS.items():
        assert counts[pair] / count == pytest.approx(flow / total, abs=10 / count)
    for prefill in ("P0", "P1"):
        flows = {decode: flow for (name, decode), flow in FLOWS.items() if name == prefill}
        # No engine gets more requests in a row than its share of the turns explains.
        share = sum(flows.values()) / total
        assert longest_run([each[0] for each in pairs], prefill) <= 2 + 2 * share / (1 - share)
        turns = [decode for name, decode in pairs if name == prefill]
        for decode, flow in flows.items():
            share = flow / sum(flows.values())
            assert longest_run(turns, decode) <= 2 + 2 * share / (1 - share)
